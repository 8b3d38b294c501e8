"""Scores of a prompt are kept as arrays and become objects where they are read."""

import time

import numpy as np
import pytest

from xylite.runtime.logprobs import PromptLogprobs
from xylite.runtime.step import LogprobRows

PROMPT = tuple(range(100, 111))


def rows(first: int, num: int) -> LogprobRows:
    """Rows that score the tokens at positions [first, first + num), two alternatives each."""
    at = np.arange(first, first + num)
    ids = np.stack([at, at + 50], 1).astype(np.int32)
    return LogprobRows(
        -at.astype(np.float32), ids, -ids.astype(np.float32), at.astype(np.int32) + 7
    )


def test_pieces_of_any_cut_join_and_what_is_computed_again_is_left_out():
    scores = PromptLogprobs(PROMPT, top=1)
    assert list(scores) == [None] and len(scores) == 1
    scores.add(1, rows(1, 4), 0, 4)
    scores.add(1, rows(1, 4), 0, 4)  # once more, after a preemption
    scores.add(3, rows(1, 8), 2, 6)  # rows 2 to 7 of a step that scored more than this prompt
    scores.add(9, rows(9, 2), 0, 2)
    assert len(scores) == len(PROMPT)
    assert [e and e.token for e in scores] == [None, *PROMPT[1:]]
    assert [e.logprob for e in scores[1:]] == [-float(i) for i in range(1, 11)]
    assert [e.rank for e in scores[1:]] == [i + 7 for i in range(1, 11)]
    assert [e.top for e in scores[1:]] == [((i, -float(i)),) for i in range(1, 11)]
    assert scores[-1] == scores[10] and scores[2:6] == tuple(scores[i] for i in range(2, 6))
    with pytest.raises(IndexError):
        scores[11]


def test_nothing_is_made_before_it_is_read(monkeypatch):
    made = []
    entry = PromptLogprobs._entry
    monkeypatch.setattr(PromptLogprobs, "_entry", lambda s, i: made.append(i) or entry(s, i))
    scores = PromptLogprobs(PROMPT, top=2)
    scores.add(1, rows(1, 10), 0, 10)
    assert made == []
    assert len(scores[3:5]) == 2 and made == [3, 4]


def test_an_entry_costs_the_same_in_however_many_pieces_the_prompt_came():
    num = 4096  # a long prompt comes in thousands of pieces

    def seconds_to_read(step: int) -> float:
        scores = PromptLogprobs(range(num + 1), top=0)
        for i in range(1, num + 1, step):
            scores.add(i, rows(i, step), 0, step)
        assert [e.token for e in scores[1:9]] == list(range(1, 9)) and len(scores) == num + 1
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            assert len(scores[1:101]) == 100
            times.append(time.perf_counter() - begun)
        return min(times)

    assert seconds_to_read(1) < 5 * seconds_to_read(num), "30 times if pieces are searched in turn"
