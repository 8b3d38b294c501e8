"""The scheduling rules, one by one, with the toy model."""

from tests.runtime.driver import Driver
from tests.runtime.steps import ask, chunks, step
from tests.toy import expected_tokens
from xylite.runtime.commit import commit
from xylite.runtime.request import Draft
from xylite.runtime.scheduler import AGEING_S


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
    while any(s.num_output == 0 for s in driver.queues.running) or driver.queues.waiting:
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
    while any(s.num_output == 0 for s in driver.queues.running) or driver.queues.waiting:
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


def test_iteration_planned_ahead_leaves_out_sequences_known_to_end():
    driver = Driver()
    ask(driver, "ends", [1, 2], 1)
    ask(driver, "goes on", [3, 4], 5)
    driver.plan()
    plan, made = driver.plan(ahead=True)
    assert chunks(plan) == [("goes on", 2, 1)]
    assert made.table.carry.tolist() == [1]


def test_drafts_shrink_before_decodes_are_left_out():
    driver = Driver(budget=8, block_size=4, max_num_seqs=4, max_draft=4)
    for name in "abc":
        ask(driver, name, [ord(name) % 61] * 2, 20)
    step(driver)
    step(driver)
    for seq in driver.queues.running:
        seq.draft = Draft((1, 2, 3, 4))
    plan = driver.scheduler.plan(0.0)
    assert [c.num for c in plan.chunks] == [5, 2, 1]


def test_draft_never_passes_the_length_limit():
    driver = Driver(max_draft=4)
    request = ask(driver, "a", [1, 2], 3)
    step(driver)
    (seq,) = driver.queues.running
    seq.draft = Draft(tuple(expected_tokens(request)[1:]) + (0, 0))
    plan = step(driver)
    assert chunks(plan) == [("a", 2, 2)]
    assert driver.tokens("a") == expected_tokens(request)


def test_a_draft_that_comes_while_a_token_is_on_its_way_is_dropped():
    driver = Driver(max_draft=4)
    request = ask(driver, "a", [1, 2], 8)
    truth = expected_tokens(request)
    first, made = driver.plan()
    (seq,) = driver.queues.running
    seq.draft = Draft(tuple(truth[:4]))  # follows the prompt, whose next token is being drawn
    second, following = driver.plan(ahead=True)
    assert chunks(second) == [("a", 2, 1)] and not second.has_drafts
    for plan, tables in ((first, made), (second, following)):
        for _, event in commit(driver.queues, plan, driver.executor.run(tables)):
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


def test_decode_and_prefill_take_turns_where_there_is_room_for_one_token():
    driver = Driver(budget=1, max_num_seqs=2)
    ask(driver, "talks", [1], 60)
    for _ in range(3):
        step(driver)
    ask(driver, "comes", [2, 3], 2)
    for _ in range(6):
        step(driver)
    assert driver.tokens("comes"), "the prompt waits for the end of the other's answer"


def test_sequence_that_starts_over_and_is_stopped_at_once_is_gone():
    driver = Driver(block_size=4)
    driver.executor.corrupt = {(0, 0)}
    ask(driver, "r", [1] * 12, n=2)
    plan, made = driver.plan()
    ahead = driver.plan(ahead=True)
    outcomes = commit(driver.queues, plan, driver.executor.run(made))
    assert [event.finish_reason for _, event in outcomes] == ["error"]
    driver.queues.stop(driver.sequences["r", 1], "abort")
    if ahead:
        commit(driver.queues, ahead[0], driver.executor.run(ahead[1]))
    driver.check()
    assert driver.queues.num_unfinished == 0
    assert driver.blocks.num_free == driver.blocks.num_blocks
