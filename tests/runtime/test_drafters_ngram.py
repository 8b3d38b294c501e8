"""Prompt lookup: the longest recent match of the text's end, and what followed it."""

import random

from tests.toy import toy_request
from xylite.runtime.drafters import DraftOptions, ngram
from xylite.runtime.request import SamplingParams
from xylite.runtime.sequence import Sequence


def make(n=4, low=2, high=4):
    return ngram.make(DraftOptions(num_tokens=n, lookup_min=low, lookup_max=high))


def sequence(prompt, output=(), index=0, name="r", n=1):
    request = toy_request(name, prompt, SamplingParams(max_tokens=1000, n=n))
    seq = Sequence(request, index, 0.0)
    seq.tokens += output
    return seq


def draft(drafter, seq, n=4):
    drafter.begin_iteration()
    expected = drafter.expects(seq)
    (made,) = drafter.propose([(seq, n)])
    assert (made is not None) == (expected > 0)
    return None if made is None else made.tokens


def place_by_hand(tokens, low, high):
    """The latest of the places before which the most tokens agree with the text's end, and how
    many those are."""
    best, best_length = -1, low - 1
    for place in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < min(high, place) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length > best_length:
            best, best_length = place, length
    return best, best_length if best >= 0 else 0


def test_the_longest_match_wins_over_a_later_one():
    assert draft(make(), sequence([1, 2, 3, 10, 11, 12, 13, 9, 2, 3, 20, 21, 1, 2, 3])) == (
        10, 11, 12, 13,
    )  # fmt: skip


def test_of_equally_long_matches_the_latest_wins():
    assert draft(make(), sequence([2, 3, 10, 11, 2, 3, 20, 21, 22, 23, 2, 3])) == (20, 21, 22, 23)


def test_a_match_shorter_than_the_minimum_is_none():
    assert draft(make(low=2), sequence([3, 10, 11, 12, 3])) is None
    assert draft(make(low=1), sequence([3, 10, 11, 12, 3])) == (10, 11, 12, 3)
    assert draft(make(low=2), sequence([3])) is None


def test_no_more_tokens_are_compared_than_the_maximum():
    tokens = [1, 2, 3, 10, 7, 9, 2, 3, 20, 8, 1, 2, 3]
    assert draft(make(n=2, high=2), sequence(tokens), 2) == (20, 8)
    assert draft(make(n=2, high=3), sequence(tokens), 2) == (10, 7)


def test_a_text_that_repeats_itself_is_continued_beyond_its_end():
    assert draft(make(n=7), sequence([5, 1, 2, 1, 2]), 7) == (1, 2, 1, 2, 1, 2, 1)


def test_matches_run_across_the_end_of_the_prompt_and_into_the_output():
    seq = sequence([1, 2, 3, 4], [5, 6, 7, 3, 4, 5])
    assert draft(make(), seq) == (6, 7, 3, 4)
    seq.tokens += [8, 9, 5, 6]
    assert draft(make(), seq) == (7, 3, 4, 5)


def test_every_place_equals_the_one_found_by_hand(monkeypatch):
    monkeypatch.setattr(ngram, "MAX_CANDIDATES", 1000)
    rng = random.Random(1)
    for low, high in ((1, 1), (1, 3), (2, 4), (3, 8)):
        for _ in range(20):
            drafter = make(low=low, high=high)
            seq = sequence([rng.randrange(3) for _ in range(rng.randint(1, 12))])
            for _ in range(25):
                expected = place_by_hand(seq.tokens, low, high)
                found = drafter._look(seq).place, drafter.match(seq)
                assert found == expected, (seq.tokens, low, high)
                if rng.random() < 0.7:
                    seq.tokens.append(rng.randrange(3))
                else:
                    seq.tokens += [rng.randrange(3) for _ in range(3)]


def test_no_more_earlier_occurrences_are_compared_than_the_limit():
    seq = sequence([1, 2, 3, 10] + [2, 3, 20] * ngram.MAX_CANDIDATES + [1, 2, 3])
    assert draft(make(), seq, 2) == (20, 1)
    seq = sequence([1, 2, 3, 10] + [2, 3, 20] * (ngram.MAX_CANDIDATES - 1) + [1, 2, 3])
    assert draft(make(), seq, 2) == (10, 2)


def test_a_long_prompt_is_indexed_in_pieces(monkeypatch):
    monkeypatch.setattr(ngram, "MAX_GROWTH", 100)
    prompt = [1, 2, 3, 4] + list(range(5, 60)) * 4 + [1, 2]
    drafter, seq = make(), sequence(prompt)
    found = []
    for i in range(4):
        found.append(draft(drafter, seq))
        seq.tokens += [1, 2] if i % 2 else [2, 1, 2]
    assert found[:2] == [None, None]
    assert found[2] is not None


def test_all_sequences_of_an_iteration_share_one_limit_of_growth(monkeypatch):
    monkeypatch.setattr(ngram, "MAX_GROWTH", 100)
    drafter = make()
    prompt = list(range(45)) * 2
    texts = [sequence(prompt, name=f"r{i}") for i in range(4)]
    found = []
    for _ in range(5):
        drafter.begin_iteration()
        found.append(sum(drafter.expects(s) > 0 for s in texts))
        grown = sum(t.index.under.end - 2 + t.index.end - 90 for t in drafter._tracks.values())
        assert grown <= 100 * len(found)
        for seq in texts:
            seq.tokens.append(len(seq.tokens) % 45)
    assert found == [1, 2, 3, 4, 4]


def test_sequences_of_one_request_share_the_prompts_index_and_leave_nothing():
    prompt = [1, 2, 3, 4, 5, 1, 2]
    drafter = make()
    one, two = (sequence(prompt, index=i, n=2) for i in range(2))
    assert draft(drafter, one) == draft(drafter, two) == (3, 4, 5, 1)
    assert drafter._tracks[one].index.under is drafter._tracks[two].index.under
    one.tokens += [3, 9, 1, 2]
    two.tokens += [3, 8, 1, 2]
    assert draft(drafter, one, 2) == (3, 9)
    assert draft(drafter, two, 2) == (3, 8)
    drafter.forget(one)
    assert draft(drafter, two, 2) == (3, 8)
    drafter.forget(two)
    drafter.forget(two)
    assert not drafter._tracks and not drafter._prompts
