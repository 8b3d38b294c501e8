"""What the device thread does while nothing is asked of it."""

import asyncio
import logging
import threading

from tests.runtime.test_engine import ask, read, toy_engine
from tests.toy import expected_tokens


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


async def test_chores_are_done_on_the_device_thread_while_nothing_is_asked():
    done = []

    def chores():
        for i in range(5):
            done.append((i, threading.current_thread().name))
            yield

    async with toy_engine(chores=chores()) as (engine, _):
        await until(lambda: len(done) == 5 and engine._chores is None)
        assert [i for i, _ in done] == list(range(5))
        assert all(name.startswith("ThreadPoolExecutor") for _, name in done)
        request, queue, _ = ask(engine, "r", [1, 2], max_tokens=3, ignore_eos=True)
        assert (await read(queue))[0] == expected_tokens(request)


async def test_a_request_waits_for_one_chore_at_most_and_the_rest_are_done_after_it():
    begun, may_end = threading.Semaphore(0), threading.Semaphore(0)
    done = []

    def chores():
        for i in range(3):
            begun.release()
            assert may_end.acquire(timeout=20)
            done.append(i)
            yield

    async with toy_engine(chores=chores()) as (engine, runner):
        await asyncio.to_thread(begun.acquire, timeout=20)
        runner.open.clear()
        request, queue, _ = ask(engine, "r", [1, 2], max_tokens=3, ignore_eos=True)
        may_end.release(3)
        await asyncio.to_thread(runner.entered.wait, 20)
        assert done == [0]
        runner.open.set()
        assert (await read(queue))[0] == expected_tokens(request)
        await until(lambda: engine._chores is None)
        assert done == [0, 1, 2]


async def test_a_chore_that_raises_is_told_once_and_requests_go_on(caplog):
    def chores():
        yield
        raise OSError("no memory")

    with caplog.at_level(logging.ERROR):
        async with toy_engine(chores=chores()) as (engine, _):
            await until(lambda: engine._chores is None)
            request, queue, _ = ask(engine, "r", [1, 2], max_tokens=3, ignore_eos=True)
            assert (await read(queue))[0] == expected_tokens(request)
    assert [r.message for r in caplog.records] == ["chores are given up"]


async def test_closing_does_not_wait_for_chores_that_are_left():
    done = []

    def chores():
        while True:
            done.append(1)
            yield

    async with toy_engine(chores=chores()) as (engine, _):
        await until(lambda: done)
        async with asyncio.timeout(20):
            await engine.close()
        count = len(done)
        assert engine._chores is None
    assert len(done) == count
