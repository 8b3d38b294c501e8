"""The engine loop with the toy model: what clients get, whatever happens meanwhile."""

import asyncio
import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.toy import WORDS, SumConstraint, ToyExecutor, expected_tokens, toy_request
from xylite.errors import EngineError, Overloaded
from xylite.runtime.blocks import KVBlocks
from xylite.runtime.engine import Engine, _size_class
from xylite.runtime.event_queue import TokenQueue
from xylite.runtime.queues import Queues
from xylite.runtime.request import SamplingParams
from xylite.runtime.scheduler import Scheduler
from xylite.runtime.token_table import Tabulator


class Gate(ToyExecutor):
    """A toy whose iterations wait while the gate is closed."""

    def __init__(self, *args):
        super().__init__(*args)
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()

    def run(self, step, mask=None):
        self.entered.set()
        assert self.open.wait(20), "the gate was never opened"
        return super().run(step, mask)


class Stepwise(Gate):
    """A toy each of whose iterations waits for a permit."""

    def __init__(self, *args):
        super().__init__(*args)
        self.permits = threading.Semaphore(0)

    def run(self, step, mask=None):
        self.entered.set()
        assert self.permits.acquire(timeout=20), "no permit came"
        return super().run(step, mask)


class Recorder:
    def __init__(self):
        self.records = []

    def on_finished(self, record):
        self.records.append(record)


@contextlib.asynccontextmanager
async def toy_engine(*, num_blocks=256, block_size=4, budget=32, max_num_seqs=8, **settings):
    max_queued = settings.pop("max_queued", 1000)
    blocks = KVBlocks(num_blocks, block_size)
    queues = Queues(blocks, max_num_seqs=max_num_seqs, max_queued=max_queued)
    tabulator = Tabulator(max_num_seqs, num_blocks, block_size)
    runner = settings.pop("runner", Gate)(num_blocks, block_size)
    with ThreadPoolExecutor(1) as device:
        scheduler = Scheduler(queues, budget=budget)
        engine = Engine(scheduler, tabulator, runner, device, num_words=WORDS, **settings)
        engine.tickets.observers.append(Recorder())
        try:
            yield engine, runner
        finally:
            runner.open.set()
            await engine.close()
        blocks.check(queues.running)


def ask(engine, name, prompt, **params):
    constraint = params.pop("constraint", None)
    request = toy_request(name, prompt, SamplingParams(**params), constraint=constraint)
    queue = TokenQueue(request.params.n)
    return request, queue, engine.submit(request, queue)


async def read(queue):
    """All tokens of sequence 0 and how it ended."""
    tokens, last = [], None
    async for event in queue:
        if event.index == 0:
            tokens += event.tokens
            last = event
    return tokens, last


async def entered(runner):
    await asyncio.to_thread(runner.entered.wait, 20)


@pytest.mark.parametrize("async_scheduling", [False, True])
async def test_concurrent_requests_get_the_tokens_of_full_recomputation(async_scheduling):
    rng = random.Random(3)
    async with toy_engine(num_blocks=40, async_scheduling=async_scheduling) as (engine, _):
        asked = [
            ask(
                engine,
                f"r{i}",
                [rng.randrange(60) for _ in range(rng.randint(1, 30))],
                max_tokens=rng.randint(1, 20),
                temperature=rng.choice([0.0, 1.0]),
                seed=i,
                presence_penalty=rng.choice([0.0, 1.0]),
                constraint=rng.choice([None, SumConstraint]),
            )
            for i in range(40)
        ]
        answers = await asyncio.gather(*(read(queue) for _, queue, _ in asked))
        for (request, _, _), (tokens, last) in zip(asked, answers, strict=True):
            assert tokens == expected_tokens(request)
            assert last.finish_reason in ("stop", "length")
        assert engine.snapshot()["generation_tokens"] == sum(len(t) for t, _ in answers)
        assert not engine.tickets


async def test_requests_cancelled_at_any_moment_leave_nothing_behind():
    rng = random.Random(4)
    async with toy_engine(num_blocks=40) as (engine, _):

        async def client(i):
            request, queue, ticket = ask(
                engine, f"r{i}", [i % 7] * rng.randint(1, 30), max_tokens=60, ignore_eos=True
            )
            patience = rng.randint(0, 12)
            got = []
            async for event in queue:
                got += event.tokens
                if len(got) > patience:
                    break
            ticket.cancel()
            assert got == expected_tokens(request)[: len(got)]

        for _ in range(5):
            await asyncio.gather(*(client(i) for i in range(20)))
            assert not engine.tickets
            await engine._idle.wait()
        await asyncio.wait_for(_until_free(engine), 5)
        assert engine.snapshot()["finished"]["abort"] > 0


async def _until_free(engine):
    while engine.queues.num_unfinished:
        await asyncio.sleep(0)
    assert engine.queues.blocks.num_free == engine.queues.blocks.num_blocks


async def test_cancel_frees_blocks_within_two_iterations():
    async with toy_engine() as (engine, _):
        _, _, ticket = ask(engine, "gone", [1] * 40, max_tokens=900, ignore_eos=True)
        _, queue, _ = ask(engine, "stays", [2] * 4, max_tokens=60, ignore_eos=True)
        await anext(queue)
        ticket.cancel()
        before = engine.queues.counters.num_steps
        while engine.queues.num_unfinished > 1:
            await anext(queue)
        assert engine.queues.counters.num_steps - before <= 2
        await read(queue)


async def test_iteration_that_raises_fails_its_requests_and_no_others():
    async with toy_engine(async_scheduling=True) as (engine, runner):
        runner.raise_at = {3}
        request, queue, _ = ask(engine, "in it", [1, 2, 3], max_tokens=30, ignore_eos=True)
        tokens, last = await read(queue)
        assert tokens == expected_tokens(request)[: len(tokens)] and len(tokens) < 30
        assert last.finish_reason == "error" and last.error.code == "step_failed"
        request, queue, _ = ask(engine, "after", [1, 2, 3], max_tokens=30, ignore_eos=True)
        assert (await read(queue))[0] == expected_tokens(request)
        assert engine.state == "ready"
        assert engine.snapshot()["failed_steps"] == 1


async def test_numbers_that_are_not_finite_fail_their_request_only():
    async with toy_engine() as (engine, runner):
        runner.open.clear()
        _, bad_queue, _ = ask(engine, "bad", [5] * 9, max_tokens=20, ignore_eos=True)
        good, good_queue, _ = ask(engine, "good", [6] * 9, max_tokens=20, ignore_eos=True)
        await entered(runner)
        runner.corrupt = {(number, 0) for number in range(2, 4)}
        runner.open.set()
        (_, last), (tokens, _) = await asyncio.gather(read(bad_queue), read(good_queue))
        assert last.error.code == "non_finite"
        assert tokens == expected_tokens(good)
        again, queue, _ = ask(engine, "again", [5] * 9, max_tokens=20, ignore_eos=True)
        runner.corrupt = set()
        assert (await read(queue))[0] == expected_tokens(again)
        assert engine.snapshot()["corrupted"] == 1


async def test_device_that_does_not_answer_ends_every_stream_with_an_error():
    async with toy_engine(watchdog_s=0.05) as (engine, runner):
        runner.open.clear()
        _, queue, _ = ask(engine, "stuck", [1], max_tokens=5)
        _, last = await asyncio.wait_for(read(queue), 10)
        assert last.finish_reason == "error" and last.error.code == "engine_dead"
        assert engine.state == "dead" and engine.dead.is_set()
        with pytest.raises(EngineError):
            ask(engine, "late", [1], max_tokens=5)


async def test_device_that_fails_every_iteration_is_given_up():
    async with toy_engine() as (engine, runner):
        runner.raise_at = set(range(100))
        for i in range(5):
            _, queue, _ = ask(engine, f"r{i}", [1], max_tokens=5)
            assert (await read(queue))[1].finish_reason == "error"
        await asyncio.wait_for(engine.dead.wait(), 10)
        assert engine.state == "dead"


async def test_request_beyond_the_queue_is_refused_at_once():
    async with toy_engine(max_num_seqs=1, max_queued=1) as (engine, runner):
        runner.open.clear()
        first = ask(engine, "runs", [1], max_tokens=5)
        second = ask(engine, "waits", [2], max_tokens=5)
        with pytest.raises(Overloaded, match="limit is 2") as refused:
            ask(engine, "too many", [3], max_tokens=5)
        assert 1 <= refused.value.retry_after_s <= 60
        runner.open.set()
        for request, queue, _ in (first, second):
            assert (await read(queue))[0] == expected_tokens(request)
        assert engine.snapshot()["rejections"] == {"max_num_queued_reqs": 1}


async def test_who_is_refused_waits_less_where_most_of_a_prompt_is_found_computed():
    async with toy_engine(max_num_seqs=1, max_queued=1) as (engine, runner):
        runner.open.clear()
        asked = [ask(engine, "first", [1]), ask(engine, "second", [2] * 35)]
        counters = engine.queues.counters
        counters.step_tokens, engine.tallies.step_seconds = 10, 1.0
        waits = []
        for counters.prefix_queries, counters.prefix_hits in ((0, 0), (100, 0), (100, 75)):
            with pytest.raises(Overloaded) as refused:
                ask(engine, "too many", [3])
            waits.append(refused.value.retry_after_s)
        assert waits == [pytest.approx(s) for s in ((36 + 64) / 10, (36 + 64) / 10, (9 + 64) / 10)]
        runner.open.set()
        for _, queue, _ in asked:
            await read(queue)


async def test_drain_lets_running_requests_end_and_takes_no_new_ones():
    async with toy_engine() as (engine, runner):
        runner.open.clear()
        request, queue, _ = ask(engine, "running", [1, 2], max_tokens=9, ignore_eos=True)
        draining = asyncio.create_task(engine.drain(20))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            ask(engine, "new", [3], max_tokens=5)
        assert refused.value.code == "draining"
        runner.open.set()
        assert (await read(queue))[0] == expected_tokens(request)
        await asyncio.wait_for(draining, 10)


async def test_drain_that_takes_too_long_ends_streams_with_an_error():
    async with toy_engine() as (engine, runner):
        runner.open.clear()
        _, queue, _ = ask(engine, "slow", [1, 2], max_tokens=9)
        await engine.drain(0.01)
        _, last = await read(queue)
        assert last.error.code == "shutdown"


async def test_sink_that_raises_loses_its_request_only():
    class Broken(TokenQueue):
        def put(self, event):
            raise ValueError("broken")

    async with toy_engine() as (engine, _):
        request = toy_request("broken", [1], SamplingParams(max_tokens=5))
        queue = Broken(1)
        engine.submit(request, queue)
        with pytest.raises(EngineError):
            await asyncio.wait_for(anext(queue), 10)
        assert not engine.tickets
        request, queue, _ = ask(engine, "fine", [2], max_tokens=5)
        assert (await read(queue))[0] == expected_tokens(request)


async def test_sink_that_wants_no_more_ends_its_sequence_and_its_tokens_are_not_counted():
    class Three(TokenQueue):
        def put(self, event):
            self.count = getattr(self, "count", 0) + len(event.tokens)
            self.add(event, is_last=self.count >= 3)
            return len(event.tokens), "stop" if self.count >= 3 else event.finish_reason

    async with toy_engine() as (engine, _):
        request = toy_request("r", [1], SamplingParams(max_tokens=50, ignore_eos=True))
        queue = Three(1)
        engine.submit(request, queue)
        tokens, _ = await read(queue)
        assert tokens == expected_tokens(request)[:3]
        await engine._idle.wait()
        assert engine.snapshot()["generation_tokens"] == 3
        assert engine.snapshot()["finished"] == {"stop": 1}


async def test_records_tell_the_course_of_each_request_once():
    async with toy_engine() as (engine, _):
        asked = [
            ask(engine, f"r{i}", [i] * 5, n=2, max_tokens=6, ignore_eos=True) for i in range(3)
        ]
        await asyncio.gather(*(read(queue) for _, queue, _ in asked))
        records = engine.tickets.observers[0].records
        assert sorted(r.request_id for r in records) == ["r0", "r1", "r2"]
        for r in records:
            assert (r.num_prompt, r.num_output, r.n, r.finish_reason) == (5, 12, 2, "length")
            assert len(r.itl_s) == 10
            assert 0 <= r.queue_s <= r.ttft_s <= r.e2e_s
            assert r.prefill_s + r.decode_s == pytest.approx(r.inference_s)


async def test_closing_ends_what_runs():
    async with toy_engine() as (engine, runner):
        runner.open.clear()
        _, queue, _ = ask(engine, "running", [1], max_tokens=5)
        await entered(runner)
        closing = asyncio.create_task(engine.close())
        _, last = await read(queue)
        assert last.error.code == "shutdown"
        runner.open.set()
        await closing
        with pytest.raises(EngineError):
            ask(engine, "late", [1], max_tokens=5)


async def test_request_that_arrives_during_an_iteration_is_in_the_next_one():
    async with toy_engine(budget=8) as (engine, runner):
        engine._durations[_size_class(8)] = 30.0  # the iteration is expected to take long
        runner.open.clear()
        runner.entered.clear()
        first, first_queue, _ = ask(engine, "first", [1] * 8, max_tokens=4, ignore_eos=True)
        await entered(runner)
        second, second_queue, _ = ask(engine, "second", [2] * 4, max_tokens=4, ignore_eos=True)
        runner.open.set()
        answers = await asyncio.gather(read(first_queue), read(second_queue))
        assert [t for t, _ in answers] == [expected_tokens(first), expected_tokens(second)]
        # 4 iterations for the first's tokens, and the second ran beside the last three.
        assert engine.queues.counters.num_steps <= 6


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


async def test_iteration_that_was_planned_ahead_lets_those_in_who_come_while_it_runs():
    now = [0.0]
    async with toy_engine(budget=8, runner=Stepwise, clock=lambda: now[0]) as (engine, runner):
        try:
            # The first is planned ahead of at once; the second takes 50 s, from when it begins.
            engine._durations = {_size_class(8): 0.0, _size_class(1): 50.0}
            _, first, _ = ask(engine, "first", [1] * 8, max_tokens=4, ignore_eos=True)
            await until(lambda: engine.queues.counters.num_steps == 2)
            now[0] = 100.0
            runner.permits.release()
            await until(lambda: engine.tallies.generation_tokens == 1)
            for _ in range(10):
                await asyncio.sleep(0)
            assert engine.queues.counters.num_steps == 2
            _, second, _ = ask(engine, "second", [2] * 4, max_tokens=4, ignore_eos=True)
        finally:
            runner.permits.release(100)
        await asyncio.gather(read(first), read(second))
        # 4 iterations for the first's tokens, the second's in the last two of them and after.
        assert engine.queues.counters.num_steps == 6


def test_iterations_of_one_size_class_differ_by_an_eighth_at_most():
    for n in range(1, 5000):
        same = [m for m in range(n, 2 * n) if _size_class(m) == _size_class(n)]
        assert max(same) <= n * 9 / 8
        assert _size_class(n) <= _size_class(n + 1)


async def test_device_that_hangs_after_an_iteration_failed_is_given_up():
    async with toy_engine(watchdog_s=0.2, async_scheduling=True) as (engine, runner):
        runner.open.clear()
        runner.raise_at = {1}
        _, queue, _ = ask(engine, "r", [1, 2], max_tokens=9, ignore_eos=True)
        await entered(runner)
        real = runner.run

        def run(step, mask=None):
            if step.number == 2:
                runner.open.clear()
            return real(step, mask)

        runner.run = run
        runner.open.set()
        assert (await asyncio.wait_for(read(queue), 10))[1].finish_reason == "error"
        await asyncio.wait_for(engine.dead.wait(), 10)


async def test_observer_that_raises_stops_nothing():
    class Broken:
        def on_finished(self, record):
            raise ValueError("broken")

    async with toy_engine() as (engine, _):
        engine.tickets.observers.insert(0, Broken())
        for i in range(2):
            request, queue, _ = ask(engine, f"r{i}", [i], max_tokens=3)
            assert (await read(queue))[0] == expected_tokens(request)
        assert len(engine.tickets.observers[1].records) == 2


@pytest.mark.parametrize("method", ["fill", "accept"])
async def test_constraint_that_raises_ends_its_own_request_only(method):
    class Broken(SumConstraint):
        pass

    def fail(self, *args):
        raise ValueError("broken")

    setattr(Broken, method, fail)
    async with toy_engine() as (engine, _):
        _, bad, _ = ask(engine, "bad", [1], max_tokens=5, ignore_eos=True, constraint=Broken)
        request, good, _ = ask(
            engine, "good", [2], max_tokens=5, ignore_eos=True, constraint=SumConstraint
        )
        (_, last), (tokens, _) = await asyncio.gather(read(bad), read(good))
        assert last.error.code == "constraint_failed"
        assert tokens == expected_tokens(request)
        assert engine.state == "ready"


async def test_iterations_are_counted_by_their_tokens():
    async with toy_engine(async_scheduling=False) as (engine, _):
        _, queue, _ = ask(engine, "r", [1, 2, 3, 4, 5], max_tokens=3, ignore_eos=True)
        await read(queue)
        assert engine.snapshot()["iterations"] == {5: 1, 1: 2}
