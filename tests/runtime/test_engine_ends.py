"""How sequences and requests end when something else is broken: their readers are always told."""

import asyncio

import pytest

from tests.runtime.test_engine import ask, entered, read, toy_engine
from tests.toy import SumConstraint, expected_tokens, toy_request
from xylite.errors import Closed, EngineError
from xylite.runtime.event_queue import TokenQueue
from xylite.runtime.request import SamplingParams


class Forgetful:
    """A drafter without drafts that only counts whom it has to remember."""

    def __init__(self):
        self.known = set()

    def wants_to_draft(self):
        return False

    def observe(self, plan, seconds, gap_seconds):
        self.known |= {c.seq for c in plan.chunks if c.seq.finish is None}

    async def propose(self, sequences, on_device):
        pass

    def forget(self, seq):
        self.known.discard(seq)


class BrokenAtTheEnd(TokenQueue):
    def put(self, event):
        if event.finish_reason:
            raise ValueError("broken")
        return super().put(event)


async def test_every_reader_is_told_though_the_books_of_blocks_are_wrong():
    async with toy_engine() as (engine, _):

        def broken(seq):
            raise AssertionError("a block is owned twice")

        engine.queues.blocks.release = broken
        asked = [
            ask(engine, f"r{i}", [i, 2, 3], max_tokens=3 + 40 * i, ignore_eos=True)
            for i in range(3)
        ]
        async with asyncio.timeout(10):
            ends = [(await read(queue))[1] for _, queue, _ in asked]
            await engine.dead.wait()
            await engine._idle.wait()
        assert [e.error and e.error.code for e in ends] == ["engine_dead"] * 3
        assert not engine.tickets
        del engine.queues.blocks.release
        for seq in list(engine.queues.running):
            seq.num_inflight = 0
            engine.queues.leave(seq)


async def test_a_sink_that_raises_at_the_end_does_not_keep_others_from_ending():
    async with toy_engine() as (engine, runner):
        runner.open.clear()
        broken = BrokenAtTheEnd(1)
        engine.submit(toy_request("broken", [1], SamplingParams(max_tokens=50)), broken)
        _, fine, _ = ask(engine, "fine", [2], max_tokens=50)
        await entered(runner)
        await engine.drain(0.01)
        runner.open.set()
        with pytest.raises(EngineError, match="could not be put into words"):
            await asyncio.wait_for(anext(broken), 10)
        _, last = await asyncio.wait_for(read(fine), 10)
        assert last.error.code == "shutdown"


async def test_a_step_that_raises_a_timeout_error_is_a_failed_step_not_a_hung_device():
    async with toy_engine() as (engine, runner):
        real = runner.run

        def run(step, mask=None):
            runner.run = real
            raise TimeoutError("a collective took too long")

        runner.run = run
        _, queue, _ = ask(engine, "r", [1], max_tokens=5)
        _, last = await asyncio.wait_for(read(queue), 10)
        assert last.error.code == "step_failed"
        assert engine.state == "ready"
        request, queue, _ = ask(engine, "next", [2], max_tokens=5)
        assert (await read(queue))[0] == expected_tokens(request)


async def test_the_drafter_forgets_requests_whose_sink_is_broken():
    drafter = Forgetful()
    async with toy_engine(drafter=drafter) as (engine, _):
        for i in range(3):
            queue = BrokenAtTheEnd(1)
            engine.submit(toy_request(f"r{i}", [1, 2], SamplingParams(max_tokens=5)), queue)
            with pytest.raises(EngineError):
                await asyncio.wait_for(read(queue), 10)
        assert not drafter.known


@pytest.mark.parametrize("method", ["fill", "accept"])
async def test_a_constraint_that_fails_ends_its_sequence_and_not_its_siblings(method):
    made = []

    class Failing(SumConstraint):
        def __init__(self):
            super().__init__()
            made.append(self)

        def _maybe_fail(self, when):
            if when == method and self is made[1] and len(self.accepted) >= 3:
                raise ValueError("broken")

        def fill(self, draft, out):
            self._maybe_fail("fill")
            super().fill(draft, out)

        def accept(self, ids):
            self._maybe_fail("accept")
            super().accept(ids)

    async with toy_engine() as (engine, _):
        params = {"n": 3, "max_tokens": 12, "ignore_eos": True, "temperature": 1.0}
        _, queue, _ = ask(engine, "r", [1, 2, 3], constraint=Failing, **params)
        ends = {}
        async with asyncio.timeout(10):
            async for event in queue:
                if event.finish_reason:
                    ends[event.index] = event.finish_reason
        assert ends == {0: "length", 1: "error", 2: "length"}


async def test_a_closed_engine_says_that_it_was_closed_and_a_dead_one_that_it_is_dead():
    async with toy_engine() as (engine, runner):
        runner.open.clear()
        ask(engine, "r", [1], max_tokens=5)
        await entered(runner)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        with pytest.raises(Closed) as caught:
            engine.require_room(1)
        assert (caught.value.status, caught.value.code) == (503, "closed")
        runner.open.set()
        await closing
