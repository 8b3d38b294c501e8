"""An iteration that fails ends those whose data made it fail, and nobody else."""

import asyncio

import pytest

from tests.runtime.driver import Driver
from tests.runtime.test_engine import ask, read, toy_engine
from tests.toy import expected_tokens, toy_request
from xylite.errors import EngineError
from xylite.runtime.commit import fail
from xylite.runtime.request import SamplingParams
from xylite.runtime.trials import MAX_FAILURES

MARK = 50
NUM = 8


def fault_of_a_token(step):
    """The prompt holds a token that the model chokes on."""
    return ((step.table.tokens == MARK) & (step.table.positions == 1)).any()


def fault_of_a_position(step):
    """The answers of some requests, told by their seeds, cannot go beyond the fourth token."""
    return ((step.sample.seed >= MARK) & (step.sample.token_index >= 4)).any()


def failing(runner, is_faulty):
    """Let iterations fail that have what is faulty in them; how many of them did."""
    failed, real = [], runner.run

    def run(step, mask=None):
        if is_faulty(step):
            failed.append(step.number)
            raise RuntimeError("injected")
        return real(step, mask)

    runner.run = run
    return failed


def ask_all(engine, bad, *, fault=None):
    """NUM requests at once, those numbered in `bad` with the marks of either fault."""
    asked = []
    for i in range(NUM):
        mark = MARK if i in bad else 1
        prompt = [i, mark if fault is fault_of_a_token else 1, 2, 3]
        asked.append(ask(engine, f"r{i}", prompt, max_tokens=9, ignore_eos=True, seed=mark + i))
    return asked


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("bad", [{0}, {5}, {2, 3}, {0, 4, 7}, set(range(NUM))], ids=str)
@pytest.mark.parametrize("fault", [fault_of_a_token, fault_of_a_position], ids=lambda f: f.__name__)
async def test_only_the_requests_whose_data_fail_iterations_end(fault, bad, async_scheduling):
    async with toy_engine(num_blocks=40, async_scheduling=async_scheduling) as (engine, runner):
        failed = failing(runner, fault)
        asked = ask_all(engine, bad, fault=fault)
        answers = await asyncio.wait_for(asyncio.gather(*(read(q) for _, q, _ in asked)), 30)
        for i, ((request, _, _), (tokens, last)) in enumerate(zip(asked, answers, strict=True)):
            assert tokens == expected_tokens(request)[: len(tokens)]
            if i in bad:
                assert last.error.code == "step_failed"
            else:
                assert len(tokens) == 9 and last.finish_reason == "length"
        # Halving finds one of eight in three steps more; one may be planned on a failing one.
        assert len(bad) <= len(failed) <= 5 * len(bad)
        await engine._idle.wait()
        assert engine.state == "ready"
        assert engine.queues.blocks.num_free == 40


async def test_a_fault_that_does_not_come_again_is_nobodys():
    async with toy_engine() as (engine, runner):
        runner.raise_at = {2}
        asked = ask_all(engine, set())
        answers = await asyncio.gather(*(read(q) for _, q, _ in asked))
        assert [tokens for tokens, _ in answers] == [expected_tokens(r) for r, _, _ in asked]
        assert engine.snapshot()["failed_steps"] == 1


def test_who_is_left_of_a_failed_iteration_is_not_guilty_for_that():
    """The other one, whose data it was, has been aborted meanwhile."""
    driver = Driver(budget=16, block_size=4)
    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    left, gone = (toy_request(name, [i, 1, 2], greedy) for i, name in enumerate(("left", "gone")))
    driver.add(left)
    (culprit,) = driver.add(gone)
    plan, _ = driver.plan()
    assert len(plan.chunks) == 2
    driver.queues.stop(culprit, "abort")
    assert fail(driver.queues, plan, EngineError("x")) == []
    driver.check()
    driver.run()
    assert driver.tokens("left") == expected_tokens(left)
    (alone,) = driver.add(toy_request("alone", [5], greedy))
    plan, _ = driver.plan()
    assert [s for s, _ in fail(driver.queues, plan, EngineError("x"))] == [alone]


async def test_requests_that_fail_one_after_the_other_do_not_end_the_engine():
    async with toy_engine() as (engine, runner):
        failed = failing(runner, fault_of_a_token)
        for i in range(12):
            _, queue, _ = ask(engine, f"r{i}", [0, MARK], max_tokens=5)
            assert (await read(queue))[1].error.code == "step_failed"
        request, queue, _ = ask(engine, "good", [1], max_tokens=5, ignore_eos=True)
        assert (await read(queue))[0] == expected_tokens(request)
        await engine._idle.wait()
        assert len(failed) == 12 and engine.state == "ready"
        assert engine.queues.blocks.num_free == engine.queues.blocks.num_blocks


async def test_a_fault_that_needs_two_requests_comes_to_an_end():
    async with toy_engine(async_scheduling=False) as (engine, runner):
        failed = failing(runner, lambda step: len(step.table.kv_len) > 1)
        asked = [
            ask(engine, f"r{i}", [i], max_tokens=200, ignore_eos=True, seed=i) for i in range(2)
        ]
        answers = await asyncio.wait_for(asyncio.gather(*(read(q) for _, q, _ in asked)), 30)
        for (request, _, _), (tokens, last) in zip(asked, answers, strict=True):
            assert tokens == expected_tokens(request)[: len(tokens)]
            assert last.finish_reason == "length" or last.error.code == "step_failed"
        assert len(failed) <= 33 and engine.state == "ready"


async def test_the_accused_run_though_others_hold_every_block():
    async with toy_engine(num_blocks=6, max_num_seqs=3) as (engine, runner):
        failed = failing(runner, fault_of_a_token)
        asked = [
            ask(engine, f"r{i}", [i] * 7, max_tokens=9, ignore_eos=True, seed=i) for i in range(3)
        ]
        _, bad, _ = ask(engine, "bad", [0, MARK], max_tokens=9)
        answers = await asyncio.wait_for(asyncio.gather(*(read(q) for _, q, _ in asked)), 30)
        assert [tokens for tokens, _ in answers] == [expected_tokens(r) for r, _, _ in asked]
        assert (await read(bad))[1].error.code == "step_failed" and failed


async def test_requests_that_fail_beside_a_long_answer_do_not_wear_it_out():
    """However many come while it runs, each time the guilty one is found, and it is cleared."""
    async with toy_engine() as (engine, runner):
        failed = failing(runner, fault_of_a_token)
        long, answer, _ = ask(engine, "long", [1, 2], max_tokens=250, ignore_eos=True)
        for i in range(2 * MAX_FAILURES):
            _, queue, _ = ask(engine, f"bad{i}", [0, MARK], max_tokens=5)
            assert (await read(queue))[1].error.code == "step_failed"
        tokens, last = await asyncio.wait_for(read(answer), 30)
        assert tokens == expected_tokens(long) and last.finish_reason == "length"
        assert len(failed) > 2 * MAX_FAILURES, "the two were in failing iterations together"
