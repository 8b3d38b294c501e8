"""Who gets blocks and tokens when there are not enough of them, with the toy model."""

import pytest

from tests.runtime.driver import Driver
from tests.runtime.steps import ask, chunks, step
from tests.toy import expected_tokens
from xylite.errors import Overloaded, RequestError
from xylite.runtime.commit import commit
from xylite.runtime.request import Draft
from xylite.runtime.scheduler import NO_PASSING_S


def test_preempted_sequence_returns_first_and_says_the_same():
    driver = Driver(num_blocks=12, block_size=4, budget=16, max_num_seqs=4, reuse=False)
    requests = [
        ask(driver, f"r{i}", [i + 1] * 8, 20, seed=i, presence_penalty=1.0) for i in range(4)
    ]
    order = []
    driver.run(on_step=lambda n: order.append([s.request.id for s in driver.queues.waiting]))
    assert driver.queues.counters.num_preemptions > 0
    for r in requests:
        assert driver.tokens(r.id) == expected_tokens(r)
    ends = [
        next(
            i
            for i, p in reversed(list(enumerate(driver.plans)))
            if any(c.seq.request.id == r.id for c in p.chunks)
        )
        for r in requests
    ]
    assert ends == sorted(ends), "the first to come are the first to end"


def test_two_half_computed_prompts_that_fill_the_pool_do_not_wait_for_each_other():
    driver = Driver(num_blocks=8, block_size=4, budget=8, max_num_seqs=2, reuse=False)
    first = ask(driver, "first", [1] * 16, 16)
    step(driver)
    second = ask(driver, "second", [2] * 8, 20)
    driver.run()
    for r in (first, second):
        assert driver.tokens(r.id) == expected_tokens(r)


def test_small_request_passes_one_that_waits_for_memory_but_not_for_ever():
    driver = Driver(num_blocks=10, block_size=4, budget=16, max_num_seqs=4, reuse=False)
    ask(driver, "runs", [1] * 8, 20)
    step(driver)
    ask(driver, "big", [2] * 30, 8)
    ask(driver, "small", [3] * 3, 1)
    assert ("small", 0, 3) in chunks(step(driver))
    driver.now += NO_PASSING_S + 1
    ask(driver, "late", [4] * 3, 1)
    assert all(c[0] != "late" for c in chunks(step(driver)))
    driver.run()
    assert driver.finish("big") == driver.finish("late") == "length"


def test_prompt_that_is_scored_waits_for_room_for_all_of_it_as_it_shares_no_blocks():
    driver = Driver(num_blocks=36, block_size=1, budget=64)
    beginning = list(range(16))
    ask(driver, "first", [*beginning, 20], 8)
    step(driver)
    scored = ask(driver, "scored", [*beginning, 1, 2, 3, 4], prompt_logprobs=0)
    assert chunks(step(driver)) == [("first", 17, 1)]
    shared = ask(driver, "shared", [*beginning, 1, 2, 3, 4])
    assert chunks(step(driver)) == [("first", 18, 1), ("shared", 16, 4)]
    driver.run()
    assert driver.tokens("scored") == driver.tokens("shared") == expected_tokens(scored)
    assert expected_tokens(scored) == expected_tokens(shared)


def test_planning_ahead_without_blocks_waits_and_takes_its_plan_back():
    driver = Driver(num_blocks=9, block_size=2, budget=8, max_num_seqs=2, reuse=False)
    requests = [ask(driver, name, [i + 1] * 3, 9) for i, name in enumerate("ab")]
    flight = driver.plan()
    while True:
        before = [(s.num_planned, s.num_pending) for s in driver.queues.running]
        ahead = driver.plan(ahead=True)
        if ahead is None:
            break
        plan, made = flight
        for seq, event in commit(driver.queues, plan, driver.executor.run(made)):
            driver.events[seq.request.id, seq.index].append(event)
        flight = ahead
    assert driver.blocks.num_free == 0, "one of the two found the last block"
    assert [(s.num_planned, s.num_pending) for s in driver.queues.running] == before
    plan, made = flight
    for seq, event in commit(driver.queues, plan, driver.executor.run(made)):
        driver.events[seq.request.id, seq.index].append(event)
    driver.run()
    assert driver.queues.counters.num_preemptions == 1
    for r in requests:
        assert driver.tokens(r.id) == expected_tokens(r)


def test_request_that_is_too_many_for_the_queue_is_refused_whole():
    driver = Driver(max_num_seqs=2, max_queued=1)
    ask(driver, "a", [1], n=2)
    with pytest.raises(Overloaded, match="needs 2"):
        ask(driver, "b", [2], n=2)
    ask(driver, "c", [3])
    assert driver.queues.num_unfinished == 3


def test_request_that_can_never_fit_is_the_clients_mistake():
    driver = Driver(max_num_seqs=2, max_queued=1)
    with pytest.raises(RequestError, match="at most 3"):
        ask(driver, "a", [1], n=4)


def test_a_draft_takes_no_block_that_another_needs_for_its_next_token():
    driver = Driver(num_blocks=8, budget=64, max_num_seqs=4, max_draft=4)
    ask(driver, "a", [1] * 8, 20)
    ask(driver, "b", [2] * 7, 20)
    step(driver)
    step(driver)
    driver.blocks.take(driver.blocks.num_free - 1)  # as other sequences would
    driver.sequences["a", 0].draft = Draft((1, 1, 1, 1))
    plan = driver.scheduler.plan(0.0)
    assert chunks(plan) == [("a", 9, 1), ("b", 8, 1)]
    assert driver.queues.counters.num_preemptions == 0


def test_what_nobody_behind_can_take_goes_to_the_first_prompt():
    driver = Driver(num_blocks=110, budget=64, reuse=False)
    ask(driver, "long", [1] * 400)
    ask(driver, "has no room", [2] * 300)
    sizes = [chunks(step(driver)) for _ in range(7)]
    assert sizes == [[("long", i * 64, min(64, 400 - i * 64))] for i in range(7)]


def test_a_short_prompt_behind_a_long_one_takes_its_part_and_no_more():
    driver = Driver(num_blocks=200, budget=64, reuse=False)
    ask(driver, "long", [1] * 400)
    ask(driver, "short", [2] * 5)
    assert sorted(chunks(step(driver))) == [("long", 0, 56), ("short", 0, 5)]
