"""Chances of draft tokens: by the match they continue, of one sequence and of all."""

import numpy as np
import pytest

from tests.toy import toy_request
from xylite.runtime.chances import (
    FADING,
    FIRST_GUESS,
    LEAST_MATCH,
    LEAST_SHARE,
    MEMORY,
    MOST,
    NUM_LEVELS,
    Chances,
    levels,
)
from xylite.runtime.request import SamplingParams
from xylite.runtime.sequence import Sequence


def sequence(name):
    return Sequence(toy_request(name, [1], SamplingParams(max_tokens=9)), 0, 0.0)


def verify(chances, seq, match, accepted, tried, times=1):
    for _ in range(times):
        chances.verified([seq], np.array([match]), np.array([accepted]), np.array([tried]))
        chances.end_iteration()


def first(chances, seq, match):
    """The chance of the first token of a draft."""
    return float(chances.of([seq], np.array([match]), 1)[0, 0])


def test_the_level_of_a_token_is_that_of_the_match_it_continues():
    assert levels(np.array([0, 1, 5, 9]), 3).tolist() == [
        [0, 0, 0],  # of an unknown match nothing is known of its growth either
        [1, 2, 3],
        [5, 5, 6],
        [6, 7, 7],
    ]
    assert levels(np.array(LEAST_MATCH), 1)[:, 0].tolist() == list(range(NUM_LEVELS))
    assert levels(np.array([10**6]), 2).tolist() == [[NUM_LEVELS - 1] * 2]


def test_of_a_new_sequence_longer_matches_are_trusted_more():
    chances, seq = Chances(), sequence("r")
    assert first(chances, seq, 1) < first(chances, seq, 2) < first(chances, seq, 20)
    expected = np.cumprod([FIRST_GUESS[i] for i in (2, 3, 4, 5)])
    assert chances.of([seq], np.array([2]), 4)[0] == pytest.approx(expected)


def test_what_is_learnt_of_a_match_says_nothing_of_longer_ones():
    chances, seq = Chances(), sequence("r")
    before = first(chances, seq, 4)
    verify(chances, seq, 1, 0, 1, times=20)
    assert first(chances, seq, 1) < 0.1
    assert first(chances, seq, 4) == before
    verify(chances, seq, 1, 3, 4, times=20)  # depths 1 to 3 are right, 4 is wrong
    assert first(chances, seq, 1) > 0.7 and first(chances, seq, 3) > 0.8
    assert first(chances, seq, 4) < 0.3


def test_a_sequence_is_judged_by_itself_and_a_new_one_by_all():
    chances = Chances()
    good, bad, new = map(sequence, "abc")
    for _ in range(30):
        chances.verified([good, bad], np.array([3, 3]), np.array([1, 0]), np.array([1, 1]))
    assert first(chances, good, 3) > 0.85
    assert first(chances, bad, 3) < 0.15
    assert 0.4 < first(chances, new, 3) < 0.6
    both = chances.of([bad, good], np.array([3, 3]), 1)[:, 0].tolist()
    assert both == [first(chances, bad, 3), first(chances, good, 3)]


def test_all_together_never_rule_a_draft_out_nor_call_it_certain():
    chances = Chances()
    for i in range(100):
        verify(chances, sequence(f"r{i}"), 2, 0, 1, times=3)
        verify(chances, sequence(f"s{i}"), 20, 9, 9, times=3)
    assert first(chances, sequence("new"), 2) == pytest.approx(LEAST_SHARE * FIRST_GUESS[2])
    assert first(chances, sequence("new"), 20) == pytest.approx(MOST)


def test_without_drafts_what_was_learnt_of_a_sequence_fades():
    chances, seq = Chances(), sequence("r")
    verify(chances, seq, 2, 0, 1, times=20)
    low = first(chances, seq, 2)
    for _ in range(round(3 / (1 - FADING))):
        chances.end_iteration()
    assert first(chances, seq, 2) > 2 * low


def test_fading_is_the_same_whenever_it_is_looked_at_and_spares_what_was_just_verified():
    chances, often, seldom = Chances(), sequence("often"), sequence("seldom")
    for _ in range(3):
        both, one = np.array([2, 2]), np.array([1, 1])
        chances.verified([often, seldom], both, one, one)
        for _ in range(10):
            chances.end_iteration()
            first(chances, often, 2)
    assert first(chances, seldom, 2) == pytest.approx(first(chances, often, 2))
    weight = sum(MEMORY**i * FADING ** (9 * i + 9) for i in range(3))  # the first of 10 spared
    assert chances._tried[chances._row(seldom)].sum() == pytest.approx(weight)


def test_a_forgotten_sequence_leaves_its_row_clean():
    chances = Chances()
    sequences = [sequence(f"r{i}") for i in range(20)]
    for seq in sequences:
        verify(chances, seq, 2, 1, 1, times=5)
    for seq in sequences:
        chances.forget(seq)
        chances.forget(seq)
    assert len(chances) == 0
    others = [sequence(f"s{i}") for i in range(20)]
    assert len({first(chances, seq, 2) for seq in others}) == 1
    assert len(chances._tried) < 40  # rows are used again
