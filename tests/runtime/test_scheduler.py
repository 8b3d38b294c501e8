"""The scheduling rules, one by one, with the toy model."""

import pytest

from tests.runtime.driver import Driver
from tests.toy import expected_tokens, toy_request
from xylite.errors import Overloaded, RequestError
from xylite.runtime.request import Draft, SamplingParams
from xylite.runtime.scheduler import AGEING_S, NO_PASSING_S


def ask(driver, name, prompt, max_tokens=4, *, priority=0, cache_salt="", **params):
    request = toy_request(
        name,
        prompt,
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, **params),
        priority=priority,
        cache_salt=cache_salt,
    )
    driver.add(request)
    return request


def chunks(plan):
    return [(c.seq.request.id, c.start, c.num) for c in plan.chunks]


def step(driver, *, ahead=False):
    """Plan one iteration, run it and commit it."""
    plan, made = driver.plan(ahead=ahead)
    for seq, event in driver.scheduler.commit(plan, driver.executor.run(made)):
        driver.events[seq.request.id, seq.index].append(event)
    driver.check()
    return plan


def test_long_prompt_is_cut_into_chunks_of_whole_blocks():
    driver = Driver(budget=9, block_size=4)
    ask(driver, "a", [1] * 21)
    assert chunks(step(driver)) == [("a", 0, 8)]
    assert chunks(step(driver)) == [("a", 8, 8)]
    assert chunks(step(driver)) == [("a", 16, 5)]
    assert chunks(step(driver)) == [("a", 21, 1)]


def test_prompts_that_wait_together_end_their_chunks_with_blocks_even_if_that_costs_more():
    driver = Driver(budget=7, block_size=4)
    ask(driver, "a", [1] * 21)
    assert chunks(step(driver)) == [("a", 0, 7)]
    ask(driver, "b", [2] * 21)
    assert chunks(step(driver)) == [("a", 7, 5), ("b", 0, 2)]


def test_budget_smaller_than_a_block_is_used_in_full():
    driver = Driver(budget=3, block_size=8)
    ask(driver, "a", [1] * 7)
    assert [chunks(step(driver))[0][1:] for _ in range(3)] == [(0, 3), (3, 3), (6, 1)]


def test_decode_runs_beside_prefill_in_its_reserve_and_prefill_takes_the_rest():
    driver = Driver(budget=12, block_size=4, max_num_seqs=4)
    ask(driver, "talks", [1] * 4, 9)
    step(driver)
    ask(driver, "long", [2] * 40)
    assert chunks(step(driver)) == [("talks", 4, 1), ("long", 0, 11)]


def talking(driver, number):
    """So many sequences that decode from now on."""
    for i in range(number):
        ask(driver, f"talks{i}", [10 + i] * 4, 90)
    while any(s.num_output == 0 for s in driver.scheduler.running) or driver.scheduler.waiting:
        step(driver)


def prompt_chunks(plan):
    return [c for c in chunks(plan) if not c[0].startswith("talks")]


def test_prompts_fill_the_mixed_budget_only_while_others_decode():
    driver = Driver(budget=64, mixed_budget=12, block_size=4, num_blocks=200)
    ask(driver, "first", [1] * 40, 1)
    assert prompt_chunks(step(driver)) == [("first", 0, 40)]
    talking(driver, 4)
    ask(driver, "long", [2] * 24, 1)
    cut = [prompt_chunks(step(driver)) for _ in range(3)]
    assert cut == [[("long", 0, 8)], [("long", 8, 8)], [("long", 16, 8)]]


def test_the_more_prompt_waits_for_each_decode_the_larger_its_share():
    driver = Driver(budget=64, mixed_budget=12, block_size=4, num_blocks=200)
    talking(driver, 4)
    ask(driver, "long", [2] * 80, 1)
    ask(driver, "behind", [3] * 80, 1)
    # 160 tokens within 4 iterations, the last quarter of the room for the one behind.
    assert prompt_chunks(step(driver)) == [("long", 0, 28), ("behind", 0, 12)]
    driver = Driver(budget=64, mixed_budget=12, block_size=4, num_blocks=200)
    talking(driver, 1)
    ask(driver, "long", [2] * 160, 1)
    assert prompt_chunks(step(driver)) == [("long", 0, 60)]


def test_decodes_that_fill_the_mixed_budget_leave_half_of_it_to_prompts():
    driver = Driver(budget=64, mixed_budget=12, block_size=2, num_blocks=400, max_num_seqs=32)
    talking(driver, 20)
    ask(driver, "long", [2] * 30, 1)
    assert prompt_chunks(step(driver)) == [("long", 0, 6)]


def test_decodes_beyond_the_reserve_take_turns():
    driver = Driver(budget=4, block_size=4, max_num_seqs=8)
    for name in "abcd":
        ask(driver, name, [ord(name)] * 1 if ord(name) < 61 else [ord(name) % 61], 30)
    while any(s.num_output == 0 for s in driver.scheduler.running) or driver.scheduler.waiting:
        step(driver)
    ask(driver, "long", [2] * 100)
    turns = [{c[0] for c in chunks(step(driver)) if c[0] != "long"} for _ in range(4)]
    assert all(len(t) == 2 for t in turns)
    assert turns[0] | turns[1] == set("abcd") and turns[0] == turns[2]


def test_budget_below_the_demand_still_serves_everyone():
    driver = Driver(budget=1, max_num_seqs=4)
    requests = [ask(driver, f"r{i}", [i] * 5, 6) for i in range(4)]
    driver.run()
    for r in requests:
        assert driver.tokens(r.id) == expected_tokens(r)


def test_prompt_longer_than_the_budget_leaves_a_share_to_those_behind():
    driver = Driver(num_blocks=200, budget=16, block_size=4)
    ask(driver, "long", [1] * 400)
    ask(driver, "short", [2] * 4)
    assert chunks(step(driver)) == [("long", 0, 12), ("short", 0, 4)]


def test_request_with_higher_priority_goes_first_and_waiting_raises_priority():
    driver = Driver(budget=4, block_size=4, max_num_seqs=1)
    ask(driver, "later", [1] * 4, priority=0)
    ask(driver, "urgent", [2] * 4, priority=-1)
    assert chunks(step(driver)) == [("urgent", 0, 4)]
    driver = Driver(budget=4, block_size=4, max_num_seqs=1)
    ask(driver, "waits", [1] * 4, priority=3)
    driver.now = 4 * AGEING_S
    ask(driver, "urgent", [2] * 4, priority=0)
    assert chunks(step(driver)) == [("waits", 0, 4)]


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


def test_preempted_sequence_returns_first_and_says_the_same():
    driver = Driver(num_blocks=12, block_size=4, budget=16, max_num_seqs=4, reuse=False)
    requests = [
        ask(driver, f"r{i}", [i + 1] * 8, 20, seed=i, presence_penalty=1.0) for i in range(4)
    ]
    order = []
    driver.run(on_step=lambda n: order.append([s.request.id for s in driver.scheduler.waiting]))
    assert driver.scheduler.counters.num_preemptions > 0
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


def test_iteration_planned_ahead_leaves_out_sequences_known_to_end():
    driver = Driver()
    ask(driver, "ends", [1, 2], 1)
    ask(driver, "goes on", [3, 4], 5)
    driver.plan()
    plan, made = driver.plan(ahead=True)
    assert chunks(plan) == [("goes on", 2, 1)]
    assert made.table.carry.tolist() == [1]


def test_planning_ahead_without_blocks_waits_and_takes_its_plan_back():
    driver = Driver(num_blocks=9, block_size=2, budget=8, max_num_seqs=2, reuse=False)
    requests = [ask(driver, name, [i + 1] * 3, 9) for i, name in enumerate("ab")]
    flight = driver.plan()
    while True:
        before = [(s.num_planned, s.num_pending) for s in driver.scheduler.running]
        ahead = driver.plan(ahead=True)
        if ahead is None:
            break
        plan, made = flight
        for seq, event in driver.scheduler.commit(plan, driver.executor.run(made)):
            driver.events[seq.request.id, seq.index].append(event)
        flight = ahead
    assert driver.blocks.num_free == 0, "one of the two found the last block"
    assert [(s.num_planned, s.num_pending) for s in driver.scheduler.running] == before
    plan, made = flight
    for seq, event in driver.scheduler.commit(plan, driver.executor.run(made)):
        driver.events[seq.request.id, seq.index].append(event)
    driver.run()
    assert driver.scheduler.counters.num_preemptions == 1
    for r in requests:
        assert driver.tokens(r.id) == expected_tokens(r)


def test_request_that_is_too_many_for_the_queue_is_refused_whole():
    driver = Driver(max_num_seqs=2, max_queued=1)
    ask(driver, "a", [1], n=2)
    with pytest.raises(Overloaded, match="needs 2"):
        ask(driver, "b", [2], n=2)
    ask(driver, "c", [3])
    assert driver.scheduler.num_unfinished == 3


def test_drafts_shrink_before_decodes_are_left_out():
    driver = Driver(budget=8, block_size=4, max_num_seqs=4, max_draft=4)
    for name in "abc":
        ask(driver, name, [ord(name) % 61] * 2, 20)
    step(driver)
    step(driver)
    for seq in driver.scheduler.running:
        seq.draft = Draft((1, 2, 3, 4))
    plan = driver.scheduler.plan(0.0)
    assert [c.num for c in plan.chunks] == [5, 2, 1]


def test_draft_never_passes_the_length_limit():
    driver = Driver(max_draft=4)
    request = ask(driver, "a", [1, 2], 3)
    step(driver)
    (seq,) = driver.scheduler.running
    seq.draft = Draft(tuple(expected_tokens(request)[1:]) + (0, 0))
    plan = step(driver)
    assert chunks(plan) == [("a", 2, 2)]
    assert driver.tokens("a") == expected_tokens(request)


def test_a_draft_that_comes_while_a_token_is_on_its_way_is_dropped():
    driver = Driver(max_draft=4)
    request = ask(driver, "a", [1, 2], 8)
    truth = expected_tokens(request)
    first, made = driver.plan()
    (seq,) = driver.scheduler.running
    seq.draft = Draft(tuple(truth[:4]))  # follows the prompt, whose next token is being drawn
    second, following = driver.plan(ahead=True)
    assert chunks(second) == [("a", 2, 1)] and not second.has_drafts
    for plan, tables in ((first, made), (second, following)):
        for _, event in driver.scheduler.commit(plan, driver.executor.run(tables)):
            driver.events["a", 0].append(event)
        driver.check()
    driver.run()
    assert driver.tokens("a") == truth


def test_zero_tokens_score_the_prompt_and_end():
    driver = Driver(budget=4, block_size=4)
    ask(driver, "a", [1, 2, 3, 4, 5, 6], 0, prompt_logprobs=0)
    driver.run()
    (event,) = driver.events["a", 0]
    assert event.tokens == () and event.finish_reason == "length"
    assert [e and e.token for e in event.prompt_logprobs] == [None, 2, 3, 4, 5, 6]


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
    outcomes = driver.scheduler.fail(plan, RuntimeError("x"), ahead[0])
    assert [s.request.id for s, _ in outcomes] == ["fails"]
    driver.executor.run(ahead[1])
    driver.check()
    assert driver.blocks.num_cached == 0
    driver.run()
    assert driver.tokens("later") == expected_tokens(later)


def test_decode_and_prefill_take_turns_where_there_is_room_for_one_token():
    driver = Driver(budget=1, max_num_seqs=2)
    ask(driver, "talks", [1], 60)
    for _ in range(3):
        step(driver)
    ask(driver, "comes", [2, 3], 2)
    for _ in range(6):
        step(driver)
    assert driver.tokens("comes"), "the prompt waits for the end of the other's answer"


def test_values_that_are_not_finite_stay_out_of_the_tree_if_their_client_has_left():
    driver = Driver()
    driver.executor.corrupt = {(0, 0)}
    ask(driver, "bad", [1] * 12)
    plan, made = driver.plan()
    driver.scheduler.stop(plan.chunks[0].seq, "abort")
    assert driver.scheduler.commit(plan, driver.executor.run(made)) == []
    driver.check()
    again = ask(driver, "again", [1] * 12)
    driver.run()
    assert driver.tokens("again") == expected_tokens(again)
    assert driver.scheduler.counters.corrupted == 0


def test_sequence_that_starts_over_and_is_stopped_at_once_is_gone():
    driver = Driver(block_size=4)
    driver.executor.corrupt = {(0, 0)}
    ask(driver, "r", [1] * 12, n=2)
    plan, made = driver.plan()
    ahead = driver.plan(ahead=True)
    outcomes = driver.scheduler.commit(plan, driver.executor.run(made))
    assert [event.finish_reason for _, event in outcomes] == ["error"]
    driver.scheduler.stop(driver.sequences["r", 1], "abort")
    if ahead:
        driver.scheduler.commit(ahead[0], driver.executor.run(ahead[1]))
    driver.check()
    assert driver.scheduler.num_unfinished == 0
    assert driver.blocks.num_free == driver.blocks.num_blocks


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
    driver.scheduler.commit(plan, driver.executor.run(made))
    other = ask(driver, "other", [50] * 20, 3)
    driver.run()
    assert driver.finish("first") == driver.finish("other") == "length"
    assert driver.tokens("other") == expected_tokens(other)
    assert all(s.num_cached < s.num_prompt for s in driver.sequences.values())
    assert driver.scheduler.counters.prefix_hits == 0


def test_request_that_can_never_fit_is_the_clients_mistake():
    driver = Driver(max_num_seqs=2, max_queued=1)
    with pytest.raises(RequestError, match="at most 3"):
        ask(driver, "a", [1], n=4)
