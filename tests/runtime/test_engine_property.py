"""The engine with everything at once: drafts, planning ahead, aborts, faults, few blocks.

Whatever happens, nobody gets a token that full recomputation does not give, everybody is told an
end, and nothing is left behind.
"""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.runtime.test_scheduler_property import requests, worlds
from tests.runtime.test_speculation_engine import even_clock, make
from tests.toy import WORDS, ToyDrafter, ToyExecutor, drawn_request, expected_tokens
from xylite.runtime.blocks import KVBlocks
from xylite.runtime.engine import Engine
from xylite.runtime.event_queue import TokenQueue
from xylite.runtime.queues import Queues
from xylite.runtime.scheduler import Scheduler
from xylite.runtime.token_table import Tabulator


class Faulty(ToyExecutor):
    """Raises before an iteration or within it, or computes garbage, each with a small chance."""

    def __init__(self, num_blocks, block_size, rng, chance):
        super().__init__(num_blocks, block_size)
        self.rng = rng
        self.chance = chance
        self.num_faults = 0

    def _fails(self):
        fails = self.rng.random() < self.chance
        self.num_faults += fails
        return fails

    def forward(self, step):
        if self._fails():
            self.last_ids = np.zeros(len(step.table.logit_rows), np.int32)
            raise RuntimeError("before anything was set up")
        return step

    def sample(self, forwarded, mask=None):
        chunks = range(len(forwarded.table.kv_len))
        self.raise_at = {forwarded.number} if self._fails() else set()
        self.corrupt = {(forwarded.number, i) for i in chunks if self._fails()}
        return ToyExecutor.run(self, forwarded, mask)

    def run(self, step, mask=None):
        return self.sample(self.forward(step), mask)


class Whimsical(ToyDrafter):
    """Drafts now and then, on the loop or in the device thread, and remembers whom it must not."""

    def __init__(self, rng, max_draft):
        super().__init__(rng, max_draft)
        self.known = set()

    def wants_to_draft(self):
        return self.rng.random() < 0.4

    async def propose(self, sequences, on_device):
        self.known.update(sequences)
        for seq in sequences:
            if self.rng.random() < 0.3:
                draft = await on_device(lambda seq=seq: ToyDrafter.propose(self, seq))
            else:
                draft = super().propose(seq)
            if seq.finish is None:
                seq.draft = draft

    def observe(self, plan, seconds, gap):
        pass

    def forget(self, seq):
        self.known.discard(seq)


def a_drafter(kind, rng, max_draft, clock):
    if kind == "whimsical":
        return Whimsical(rng, max_draft)
    return make({"method": kind, "num_speculative_tokens": max_draft}, clock)


class Leaving(TokenQueue):
    """A reader that leaves in the turn of the loop after so many tokens."""

    def __init__(self, num_open, abort_after):
        super().__init__(num_open)
        self.left = abort_after
        self.ticket = None

    def put(self, event):
        if self.left is not None:
            self.left -= len(event.tokens)
            if self.left <= 0:
                asyncio.get_running_loop().call_soon(self.leave)
        return super().put(event)

    def leave(self):
        self.ticket.cancel()
        self.close()


async def client(engine, request, rng, abort_after):
    """Asks for an answer, perhaps leaves, and checks what it got."""
    for _ in range(rng.randrange(40)):
        await asyncio.sleep(0)
    queue = Leaving(request.params.n, abort_after)
    queue.ticket = engine.submit(request, queue)
    events = {i: [] for i in range(request.params.n)}
    async for event in queue:
        events[event.index].append(event)
    for i, got in events.items():
        tokens = [t for e in got for t in e.tokens]
        truth = expected_tokens(request, i)
        assert tokens == truth[: len(tokens)], (request, i)
        if abort_after is None and got[-1].finish_reason != "error":
            assert tokens == truth and got[-1].finish_reason in ("stop", "length"), (request, i)


async def everything(world, capacity, wanted, rng, kind, chance, executor=Faulty):
    """All requests to their end; how many draft tokens were accepted, and faults there were."""
    max_draft, reuse = world["max_draft"], world["reuse"]
    blocks = KVBlocks(world["num_blocks"], world["block_size"], reuse=reuse)
    queues = Queues(blocks, max_num_seqs=world["max_num_seqs"], max_queued=1000)
    scheduler = Scheduler(
        queues,
        budget=world["budget"],
        max_draft=max_draft,
        mixed_budget=world["mixed_budget"],
    )
    tabulator = Tabulator(world["max_num_seqs"], world["num_blocks"], world["block_size"])
    runner = executor(world["num_blocks"], world["block_size"], rng, chance)
    clock = even_clock()
    drafter = a_drafter(kind, rng, max_draft, clock) if max_draft else None
    with ThreadPoolExecutor(1) as device:
        engine = Engine(
            scheduler,
            tabulator,
            runner,
            device,
            num_words=WORDS,
            drafter=drafter,
            async_scheduling=rng.random() < 0.8,
            clock=clock,
        )
        asked = [drawn_request(f"r{i}", w, capacity) for i, w in enumerate(wanted)]
        async with asyncio.timeout(30):
            await asyncio.gather(
                *(client(engine, r, rng, w["abort_at"]) for r, w in zip(asked, wanted, strict=True))
            )
            await engine._idle.wait()
        assert engine.state == "ready" and not engine.tickets
        assert blocks.num_free == world["num_blocks"]
        blocks.check([])
        assert len(queues.free_rows) == world["max_num_seqs"] and not queues.num_unfinished
        if drafter is not None:
            assert engine._drafter is drafter
            assert not (drafter.known if kind == "whimsical" else drafter._live)
        await engine.close()
    return queues.counters.spec_num_accepted_tokens, runner.num_faults


@pytest.mark.parametrize("chance", [0.0, 0.04])
def test_whatever_happens_tokens_are_those_of_full_recomputation(chance):
    totals = {"accepted": 0, "faults": 0}

    @settings(
        max_examples=120,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        phases=[Phase.generate],  # threads: an example seldom fails twice
    )
    @given(st.data(), st.integers(0, 2**32))
    def check(data, seed):
        world, capacity = data.draw(worlds())
        wanted = data.draw(st.lists(requests(capacity), min_size=1, max_size=9))
        kind = data.draw(st.sampled_from(["whimsical", "ngram", "suffix"]))
        world["max_draft"] = world["max_draft"] or data.draw(st.sampled_from([0, 3]))
        rng = random.Random(seed)
        accepted, faults = asyncio.run(everything(world, capacity, wanted, rng, kind, chance))
        totals["accepted"] += accepted
        totals["faults"] += faults

    check()
    assert totals["accepted"] > 20 and (totals["faults"] > 20) == (chance > 0), totals
