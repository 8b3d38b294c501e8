"""The engine with drafters: real ones, failing ones, and texts that leave nothing to draft."""

import asyncio
import itertools
import logging
import random

import pytest

from tests.runtime.test_engine import ask, read, toy_engine
from tests.toy import SumConstraint, ToyDrafter, expected_tokens, toy_request
from xylite.config import speculative
from xylite.runtime import speculation
from xylite.runtime.drafters import ngram, suffix
from xylite.runtime.event_queue import TokenQueue
from xylite.runtime.request import SamplingParams


def even_clock():
    """Time passes with every look at it, so all iterations seem to take about as long."""
    count = itertools.count()
    return lambda: next(count) * 1e-6


def make(given, clock):
    return speculation.make(speculative(given), clock)


async def answers(engine, asked):
    return await asyncio.gather(*(read(queue) for _, queue, _ in asked))


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1},
        {"method": "suffix", "suffix_decoding_max_spec_factor": 3.0},
    ],
    ids=lambda g: g["method"],
)
async def test_concurrent_requests_get_the_tokens_of_full_recomputation(given, async_scheduling):
    rng = random.Random(3)
    clock = even_clock()
    drafter = make(given, clock)
    async with toy_engine(
        num_blocks=40, async_scheduling=async_scheduling, drafter=drafter, clock=clock
    ) as (engine, _):
        asked = [
            ask(
                engine,
                f"r{i}",
                [rng.choice([9, 40]) for _ in range(rng.randint(1, 30))],
                max_tokens=rng.randint(1, 40),
                temperature=rng.choice([0.0, 1.0]),
                seed=i,
                presence_penalty=rng.choice([0.0, 1.0]),
                allowed_token_ids=rng.choice([(9, 40), (3, 23, 43)]),
                ignore_eos=True,
                constraint=rng.choice([None, None, SumConstraint]),
            )
            for i in range(40)
        ]
        for (request, _, _), (tokens, last) in zip(
            asked, await answers(engine, asked), strict=True
        ):
            assert tokens == expected_tokens(request)
            assert last.finish_reason == "length"
        counts = engine.snapshot()
        assert counts["spec_num_accepted_tokens"] > 20
        assert counts["spec_num_draft_tokens"] > counts["spec_num_accepted_tokens"]
        assert sum(counts["spec_accepted_per_pos"]) == counts["spec_num_accepted_tokens"]
        assert not len(drafter._chances) and not drafter._proposer._tracks


class Failing:
    """Drafts well until it is told to raise at one of its four places."""

    def __init__(self, place):
        self.place = place
        self.drafter = ToyDrafter(random.Random(1), 3)
        self.num_calls = 0
        self.num_after = 0

    def _at(self, place):
        self.num_after += self.num_calls > 9
        self.num_calls += 1
        if self.num_calls > 9 and place == self.place:
            raise ValueError("as told")

    def wants_to_draft(self):
        self._at("wants_to_draft")
        return True

    async def propose(self, sequences, on_device):
        self._at("propose")
        for seq in sequences:
            seq.draft = await on_device(lambda seq=seq: self.drafter.propose(seq))

    def observe(self, plan, seconds, gap):
        self._at("observe")

    def forget(self, seq):
        self._at("forget")


@pytest.mark.parametrize("place", ["wants_to_draft", "propose", "observe", "forget"])
async def test_a_drafter_that_raises_is_switched_off_and_everything_goes_on(place, caplog):
    drafter = Failing(place)
    with caplog.at_level(logging.ERROR):
        async with toy_engine(drafter=drafter) as (engine, _):
            asked = [
                ask(engine, f"r{i}", [i, 2], max_tokens=10 + i, ignore_eos=True) for i in range(8)
            ]
            for (request, _, _), (tokens, last) in zip(
                asked, await answers(engine, asked), strict=True
            ):
                assert tokens == expected_tokens(request)
                assert last.finish_reason == "length"
            assert engine._drafter is None
            assert engine.state == "ready"
    assert [r.message for r in caplog.records] == ["the drafter failed and is switched off"]
    assert "as told" in caplog.text


async def test_a_drafter_that_hangs_is_switched_off():
    class Hanging(Failing):
        async def propose(self, sequences, on_device):
            await asyncio.Event().wait()

    async with toy_engine(drafter=Hanging(None), watchdog_s=0.05) as (engine, _):
        request, queue, _ = ask(engine, "r", [1, 2], max_tokens=9, ignore_eos=True)
        assert (await read(queue))[0] == expected_tokens(request)
        assert engine._drafter is None


async def test_aborts_while_a_draft_is_made_leave_nothing_behind():
    tickets = []

    class Slow(Failing):
        async def propose(self, sequences, on_device):
            await super().propose(sequences, on_device)
            if self.num_calls > 9 and tickets:
                tickets.pop().cancel()
                await on_device(lambda: None)

    async with toy_engine(drafter=Slow(None)) as (engine, _):
        asked = [ask(engine, f"r{i}", [i, 2], max_tokens=40, ignore_eos=True) for i in range(6)]
        tickets += [ticket for _, _, ticket in asked[:3]]
        got = await answers(engine, asked[3:])
        for (request, _, _), (tokens, _) in zip(asked[3:], got, strict=True):
            assert tokens == expected_tokens(request)
        for request, queue, _ in asked[:3]:
            queue.close()
            tokens, _ = await read(queue)
            truth = expected_tokens(request)
            assert 0 < len(tokens) < len(truth) and tokens == truth[: len(tokens)]
        assert not tickets
        blocks = engine.queues.blocks
        assert not engine.queues.running and blocks.num_free == blocks.num_blocks


@pytest.mark.parametrize("method", ["ngram", "suffix"])
async def test_a_request_that_leaves_right_after_its_token_is_forgotten_for_good(method):
    drafter = make({"method": method}, even_clock())

    class Leaving(TokenQueue):
        """Its reader leaves in the next turn of the event loop after the third token."""

        ticket = None
        num = 0

        def put(self, event):
            self.num += len(event.tokens)
            if self.num >= 3:
                asyncio.get_running_loop().call_soon(self.ticket.cancel)
            return super().put(event)

    async with toy_engine(drafter=drafter, async_scheduling=False) as (engine, _):
        for i in range(5):
            queue = Leaving(1)
            params = SamplingParams(max_tokens=50, ignore_eos=True)
            queue.ticket = engine.submit(toy_request(f"r{i}", [1, 2, 3], params), queue)
            await engine._idle.wait()
            assert 3 <= queue.num < 50
        assert not drafter._live and not len(drafter._chances) and not drafter._proposer._tracks


@pytest.mark.parametrize("module", [ngram, suffix])
async def test_iterations_are_planned_ahead_while_there_is_nothing_to_draft(module):
    clock = even_clock()
    drafter = make({"method": module.__name__.rsplit(".", 1)[-1]}, clock)
    async with toy_engine(drafter=drafter, clock=clock) as (engine, _):
        planned = []
        plan = engine.scheduler.plan

        def note(now, *, ahead=False):
            made = plan(now, ahead=ahead)
            if made is not None:
                planned.append(ahead)
            return made

        engine.scheduler.plan = note
        request, queue, _ = ask(
            engine, "r", [1, 2, 3], max_tokens=100, temperature=1.0, ignore_eos=True
        )
        assert (await read(queue))[0] == expected_tokens(request)
        assert sum(planned) > 0.8 * len(planned)
