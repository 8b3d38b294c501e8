"""Beginnings that were computed before are shared, copied and forgotten, with the toy model."""

import pytest

from tests.runtime.driver import Driver
from tests.runtime.steps import ask, chunks, step
from tests.toy import expected_tokens
from xylite.runtime.commit import commit, fail


def test_prompts_that_arrive_together_compute_their_common_beginning_once():
    driver = Driver(budget=64, block_size=4)
    stem = list(range(20))
    requests = [ask(driver, f"r{i}", [*stem, 40 + i]) for i in range(3)]
    plan = step(driver)
    assert chunks(plan) == [("r0", 0, 21), ("r1", 20, 1), ("r2", 20, 1)]
    driver.run()
    for r in requests:
        assert driver.tokens(r.id) == expected_tokens(r)


def test_chunked_prompts_with_a_common_beginning_do_not_compute_it_twice():
    driver = Driver(budget=8, block_size=4, max_num_seqs=4)
    stem = list(range(32))
    requests = [ask(driver, f"r{i}", [*stem, 40 + i], 1) for i in range(4)]
    driver.run()
    computed = sum(p.num_tokens for p in driver.plans)
    assert computed <= len(stem) + 4 * 4
    for r in requests:
        assert driver.tokens(r.id) == expected_tokens(r)


def test_sequence_that_leaves_the_tree_inside_a_block_copies_the_rows_it_shares():
    driver = Driver(block_size=8)
    ask(driver, "first", [*range(16), 1, 2, 3, 4, 5, 6, 7, 8], 1)
    driver.run()
    second = ask(driver, "second", [*range(16), 1, 2, 3, 9, 9, 9], 3)
    plan = step(driver)
    assert [c.num for c in plan.copies] == [3]
    assert chunks(plan) == [("second", 19, 3)]
    driver.run()
    assert driver.tokens("second") == expected_tokens(second)
    assert driver.events["second", 0][-1].num_cached == 19


def test_part_filled_last_block_of_a_finished_sequence_is_reused():
    driver = Driver(block_size=8)
    first = ask(driver, "first", [5, 6, 7], 3)
    driver.run()
    told = [5, 6, 7, *expected_tokens(first)]
    second = ask(driver, "second", [*told, 9], 3)
    plan = step(driver)
    assert chunks(plan) == [("second", 5, 2)]  # the last token's KV was never computed
    driver.run()
    assert driver.tokens("second") == expected_tokens(second)


def test_prompt_that_is_wholly_cached_computes_its_last_token():
    for length in range(1, 20):
        driver = Driver(block_size=4)
        ask(driver, "first", list(range(length)))
        driver.run()
        second = ask(driver, "second", list(range(length)))
        assert chunks(step(driver)) == [("second", length - 1, 1)]
        driver.run()
        assert driver.tokens("second") == expected_tokens(second)


def test_salts_do_not_share_and_leave_nothing_behind():
    driver = Driver(block_size=4, num_blocks=16)
    ask(driver, "one", [1] * 12, cache_salt="tenant 1")
    driver.run()
    ask(driver, "two", [1] * 12, cache_salt="tenant 2")
    assert chunks(step(driver)) == [("two", 0, 12)]
    driver.run()
    for i in range(50):
        ask(driver, f"s{i}", [2] * 12, 1, cache_salt=f"salt {i}")
        driver.run()
    assert len(driver.blocks._roots) <= 16
    driver.blocks.clear()
    assert not driver.blocks._roots


def test_reuse_can_be_switched_off():
    driver = Driver(block_size=4, reuse=False)
    for name in ("one", "two"):
        ask(driver, name, [1] * 12)
        assert chunks(step(driver)) == [(name, 0, 12)]
        driver.run()
    assert driver.blocks.num_cached == 0


def test_least_recently_used_beginnings_are_evicted_first():
    driver = Driver(block_size=4, num_blocks=8)
    for name, token in (("a", 1), ("b", 2)):
        ask(driver, name, [token] * 12, 1)
        driver.run()
    ask(driver, "a again", [1] * 12, 1)
    driver.run()
    ask(driver, "big", [3] * 17, 1)
    driver.run()
    ask(driver, "a once more", [1] * 12, 1)
    assert chunks(step(driver)) == [("a once more", 11, 1)]


def test_failed_iteration_removes_what_it_promised_and_requeues_those_who_built_on_it():
    driver = Driver(budget=8, block_size=4)
    driver.executor.raise_at = {0}
    ask(driver, "fails", list(range(9)))
    plan, made = driver.plan()
    later = ask(driver, "later", [*range(9), 50])
    ahead = driver.plan(ahead=True)
    assert any(c.seq.request.id == "later" and c.start >= 8 for c in ahead[0].chunks)
    with pytest.raises(RuntimeError):
        driver.executor.run(made)
    outcomes = fail(driver.queues, plan, RuntimeError("x"), ahead[0])
    assert [s.request.id for s, _ in outcomes] == ["fails"]
    driver.executor.run(ahead[1])
    driver.check()
    assert driver.blocks.num_cached == 0
    driver.run()
    assert driver.tokens("later") == expected_tokens(later)


def test_who_got_a_row_but_no_tokens_in_a_failed_iteration_gets_it_again():
    driver = Driver(budget=4, block_size=4, max_num_seqs=2)
    ask(driver, "before", list(range(4)), 1)
    driver.run()
    fails, other = (ask(driver, f"{i}", [*range(10), i], 5, presence_penalty=1.0) for i in (1, 2))
    plan, _ = driver.plan()
    assert chunks(plan) == [(fails.id, 4, 4)] and len(plan.admitted) == 2
    fail(driver.queues, plan, RuntimeError("before the rows were set up on the device"))
    driver.run()
    assert driver.tokens(other.id) == expected_tokens(other)


def test_values_that_are_not_finite_stay_out_of_the_tree_if_their_client_has_left():
    driver = Driver()
    driver.executor.corrupt = {(0, 0)}
    ask(driver, "bad", [1] * 12)
    plan, made = driver.plan()
    driver.queues.stop(plan.chunks[0].seq, "abort")
    assert commit(driver.queues, plan, driver.executor.run(made)) == []
    driver.check()
    again = ask(driver, "again", [1] * 12)
    driver.run()
    assert driver.tokens("again") == expected_tokens(again)
    assert driver.queues.counters.corrupted == 0


def test_block_of_an_iteration_in_flight_is_no_source_of_a_copy():
    driver = Driver(block_size=8)
    ask(driver, "first", [1] * 8 + [2] * 8, 4)
    driver.plan()
    ask(driver, "second", [1] * 8 + [2] * 3 + [4] * 3, 4)
    plan, _ = driver.plan(ahead=True)
    assert not plan.copies


def test_tokens_found_again_after_starting_over_are_not_counted_as_cached():
    driver = Driver(block_size=4, budget=64)
    ask(driver, "first", list(range(20)), 3)
    plan, made = driver.plan()
    driver.executor.raise_at = {1}
    commit(driver.queues, plan, driver.executor.run(made))
    other = ask(driver, "other", [50] * 20, 3)
    driver.run()
    assert driver.finish("first") == driver.finish("other") == "length"
    assert driver.tokens("other") == expected_tokens(other)
    assert all(s.num_cached < s.num_prompt for s in driver.sequences.values())
    assert driver.queues.counters.prefix_hits == 0
