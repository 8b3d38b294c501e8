"""Budgets that follow from what iterations take."""

import pytest

from tests.runtime.test_engine import ask, read, toy_engine
from xylite.runtime.budgets import WINDOW, Budgets, Pace


def pace(per_token_s=1e-3, fixed_s=0.01):
    return Pace(fixed_s, per_token_s, 64)


def test_a_pace_that_was_measured_while_the_machine_was_busy_is_mended_by_what_iterations_take():
    slow, true = Budgets(None, 40.0, pace()), pace(0.5e-3, 0.005)
    assert (slow.full, slow.mixed) == (80, 64)
    for changed in [*[False] * (WINDOW - 1), True]:
        assert slow.observe(80, true.seconds(80)) is changed
    mended = Budgets(None, 40.0, true)
    assert (slow.full, slow.mixed) == (mended.full, mended.mixed) == (176, 64)
    assert not any(slow.observe(176, true.seconds(176)) for _ in range(3 * WINDOW))
    assert slow.full == 176


@pytest.mark.parametrize("share", [0.8, 1.0, 3.0])
def test_a_pace_that_iterations_keep_or_miss_stays(share):
    budgets, true = Budgets(None, 40.0, pace()), pace()
    assert not any(budgets.observe(80, share * true.seconds(80)) for _ in range(5 * WINDOW))
    assert (budgets.full, budgets.mixed) == (80, 64)


def test_an_end_that_was_noticed_late_makes_no_pace():
    """It lengthens one iteration and shortens the next."""
    budgets, takes = Budgets(None, 40.0, pace()), pace().seconds(80)
    assert not any(budgets.observe(80, s * takes) for _ in range(WINDOW) for s in (0.2, 1.8))


def test_small_iterations_say_nothing():
    """They may be much faster than the line through larger ones."""
    budgets = Budgets(None, 40.0, pace())
    assert not any(budgets.observe(63, 1e-6) for _ in range(5 * WINDOW))
    assert budgets.full == 80


def test_a_budget_that_was_set_stays_and_the_other_is_mended():
    budgets = Budgets(512, 200.0, pace())
    assert (budgets.full, budgets.mixed) == (512, 112)
    assert any(budgets.observe(112, 0.5 * pace().seconds(112)) for _ in range(WINDOW))
    assert (budgets.full, budgets.mixed) == (512, 240)


def test_nothing_is_learnt_where_there_is_no_pace():
    budgets = Budgets(None, 40.0, None)
    assert not any(budgets.observe(64, 1e-6) for _ in range(5 * WINDOW))
    assert (budgets.full, budgets.mixed) == (64, 64)


async def test_a_server_that_started_on_a_busy_machine_gets_the_budget_of_a_quiet_one(caplog):
    caplog.set_level("INFO")
    budgets = Budgets(None, 40.0, Pace(0.0, 1.0, 64))
    async with toy_engine(budget=budgets.full, budgets=budgets, num_blocks=1024) as (engine, _):
        for i in range(WINDOW):
            # Prompts that share no prefix.
            _, queue, _ = ask(
                engine, f"r{i}", [i, *range(60), *range(4)], max_tokens=1, ignore_eos=True
            )
            await read(queue)
        assert engine.scheduler.budget == budgets.full > 64
        assert engine.scheduler.mixed_budget == budgets.mixed != 64
    assert caplog.text.count("iterations are faster than at the start") == 1
