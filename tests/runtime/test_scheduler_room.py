"""Who gets blocks and tokens when there are not enough of them, with the toy model."""

from tests.runtime.driver import Driver
from tests.runtime.test_scheduler import ask, chunks, step
from xylite.runtime.request import Draft


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
    assert driver.scheduler.counters.num_preemptions == 0


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
