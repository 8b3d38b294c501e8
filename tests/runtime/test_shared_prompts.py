"""Many sequences of one long prompt: no turn of the event loop pays for all of them."""

import pytest

from tests.runtime.driver import Driver
from tests.runtime.steps import ask
from tests.toy import expected_tokens
from xylite.runtime import scheduler

PROMPT = list(range(1, 34))


def test_sequences_of_a_request_share_its_prompt_until_they_answer():
    driver = Driver(max_num_seqs=2)
    request = ask(driver, "a", PROMPT, 3, n=4)
    sequences = [driver.sequences["a", i] for i in range(4)]
    assert all(seq.tokens is sequences[0].tokens for seq in sequences)
    driver.run()
    assert len({id(seq.tokens) for seq in sequences}) == 4
    for seq in sequences:
        assert seq.tokens == PROMPT + expected_tokens(request, seq.index)
        assert seq.num_output == 3


@pytest.mark.parametrize(("limit", "at_once"), [(0, 1), (len(PROMPT), 2), (10**6, 6)])
def test_an_iteration_finds_some_tokens_in_the_tree_and_leaves_the_rest_to_the_next(
    limit: int, at_once: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scheduler, "MAX_MATCHED", limit)
    driver = Driver()
    ask(driver, "before", PROMPT, 1)
    driver.run()
    driver.plans.clear()
    many = ask(driver, "many", PROMPT, 3, n=6)
    other = ask(driver, "other", PROMPT[:9], 3)
    driver.run()
    for i in range(6):
        assert driver.tokens("many", i) == expected_tokens(many, i)
    assert driver.tokens("other") == expected_tokens(other)
    found = [sum(s.request.id == "many" for s in plan.admitted) for plan in driver.plans]
    assert max(found) == at_once and sum(found) == 6
