"""Suffix automata find what brute force finds; drafts follow frequency; outputs keep to a salt."""

import random

import pytest

from tests.toy import toy_request
from xylite.runtime.drafters import DraftOptions, suffix
from xylite.runtime.drafters.suffix import Automaton, grow_draft
from xylite.runtime.request import SamplingParams
from xylite.runtime.sequence import Sequence


def learnt(*texts):
    automaton = Automaton()
    for text in texts:
        last = 0
        for token in text:
            last = automaton.learn(last, token)
    return automaton


def make(**options):
    given = {"num_tokens": 8, "max_cached_requests": 100, "max_spec_factor": 1.0}
    return suffix.make(DraftOptions(**given | {"min_token_prob": 0.1} | options))


def sequence(prompt, output=(), name="r", index=0, salt="", n=1):
    request = toy_request(name, prompt, SamplingParams(max_tokens=1000, n=n), cache_salt=salt)
    seq = Sequence(request, index, 0.0)
    seq.tokens += output
    return seq


def draft(drafter, seq, n=8):
    drafter.begin_iteration()
    if not drafter.expects(seq):
        return None
    (made,) = drafter.propose([(seq, n)])
    return made


def occurs(text, part):
    return any(text[i : i + len(part)] == part for i in range(len(text) - len(part) + 1))


def test_the_link_of_the_end_is_the_longest_end_that_occurred_before():
    rng = random.Random(2)
    for alphabet in (1, 2, 3, 5):
        for _ in range(15):
            automaton, last, text = Automaton(), 0, []
            for _ in range(40):
                token = rng.randrange(alphabet)
                text.append(token)
                last = automaton.learn(last, token)
                longest = max(n for n in range(len(text)) if n == 0 or occurs(text[:-1], text[-n:]))
                assert automaton.length[automaton.link[last]] == longest, text
                assert automaton.length[last] == len(text)


def test_following_a_text_gives_its_longest_known_end_while_the_automaton_grows():
    rng = random.Random(3)
    for _ in range(40):
        texts, automaton = [], Automaton()
        query, state, matched = [], 0, 0
        for _ in range(4):
            text = [rng.randrange(3) for _ in range(rng.randint(1, 15))]
            texts.append(text)
            last = 0
            for token in text:
                last = automaton.learn(last, token)
            for _ in range(8):
                token = rng.randrange(3)
                query.append(token)
                state, matched = automaton.step(state, matched, token)
                # What was learnt after a token was followed may be found one token late.
                longest = max(
                    n
                    for n in range(len(query) + 1)
                    if n == 0 or any(occurs(t, query[-n:]) for t in texts)
                )
                assert matched <= longest
                end = query[len(query) - matched :]
                assert matched == 0 or any(occurs(t, end) for t in texts)
            fresh = (0, 0)
            for token in query:
                fresh = automaton.step(*fresh, token)
            assert fresh[1] == longest


def test_shares_count_what_followed():
    automaton = learnt([1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 3])
    state, matched = 0, 0
    for token in (1, 2):
        state, matched = automaton.step(state, matched, token)
    assert automaton.following(state) == [(0.75, 3), (0.25, 4)]


def test_shares_survive_when_a_shorter_end_is_found_elsewhere():
    automaton = learnt([1, 2, 3], [1, 2, 3], [1, 2, 3], [9, 2, 4])
    assert automaton.following(automaton.step(0, 0, 2)[0]) == [(0.75, 3), (0.25, 4)]
    assert automaton.following(place(automaton, 1, 2)) == [(1.0, 3)]


def test_only_the_likeliest_continuations_are_considered():
    automaton = learnt(*[[1, 2, t] for t in (3, 4, 5, 6, 6, 5, 5)])
    state, _ = automaton.step(*automaton.step(0, 0, 1), 2)
    assert [t for _, t in automaton.following(state)] == [5, 6, 4]


def place(automaton, *tokens):
    state, matched = 0, 0
    for token in tokens:
        state, matched = automaton.step(state, matched, token)
    return automaton.context(state, matched)[0]


def test_one_continuation_gives_a_chain_and_two_give_a_tree():
    automaton = learnt([1, 2, 3, 4, 5])
    assert grow_draft(automaton, place(automaton, 1, 2), 8, 0.1).tokens == (3, 4, 5)
    assert grow_draft(automaton, place(automaton, 1, 2), 8, 0.1).parents is None
    automaton = learnt([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 7, 8])
    tree = grow_draft(automaton, place(automaton, 1, 2), 8, 0.1)
    assert tree.tokens == (3, 4, 7, 8)
    assert tree.parents == (-1, 0, -1, 2)


def test_a_beginning_of_a_draft_is_the_draft_of_that_length():
    rng = random.Random(4)
    automaton = learnt(*[[rng.randrange(4) for _ in range(20)] for _ in range(5)])
    state = place(automaton, 1, 2)
    longest = grow_draft(automaton, state, 12, 0.0)
    for n in range(1, len(longest) + 1):
        short = grow_draft(automaton, state, n, 0.0)
        assert short.tokens == longest.tokens[:n]
        assert short.parents is None or short.parents == longest.parents[:n]
    for i, up in enumerate(longest.parents):
        assert up < i
    children = {}
    for token, up in zip(longest.tokens, longest.parents, strict=True):
        children.setdefault(up, []).append(token)
    assert all(len(set(c)) == len(c) for c in children.values())


def test_unlikely_tokens_are_left_out():
    automaton = learnt(*[[1, 2, 3]] * 9, [1, 2, 4])
    state = place(automaton, 1, 2)
    assert grow_draft(automaton, state, 8, 0.2).tokens == (3,)
    assert set(grow_draft(automaton, state, 8, 0.05).tokens) == {3, 4}


def test_text_of_the_prompt_and_of_the_output_is_found():
    assert draft(make(), sequence([9, 1, 2, 3, 4, 5, 8], [1, 2, 3])).tokens == (4, 5, 8)
    repeated = draft(make(), sequence([9], [5, 1, 2, 3, 4, 6, 1, 2, 3]))
    assert repeated.tokens == (4, 6, 1)
    assert draft(make(max_spec_factor=2.0), sequence([9], [5, 6, 1, 2, 3, 5, 6])).tokens == (
        1, 2, 3, 5,
    )  # fmt: skip


def test_a_text_that_repeats_itself_is_continued_beyond_its_end():
    made = draft(make(max_spec_factor=4.0), sequence([9], [1, 2, 1, 2, 1]))
    assert made.tokens == (2, 1, 2, 1, 2, 1, 2, 1)


def test_a_longer_match_allows_a_longer_draft():
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    lengths = [len(draft(make(), sequence([0, *prompt], prompt[:n]))) for n in range(2, 6)]
    assert lengths == [2, 3, 4, 4]


def end(drafter, seq):
    drafter.expects(seq)
    seq.finish = "stop"
    drafter.forget(seq)


def test_outputs_of_ended_sequences_help_others_of_their_salt_only():
    drafter = make()
    end(drafter, sequence([50], [10, 11, 12, 13, 14], name="a", salt="x"))
    same = sequence([51], [10, 11, 12], name="b", salt="x")
    other = sequence([51], [10, 11, 12], name="c", salt="y")
    assert draft(drafter, same).tokens == (13, 14)
    assert draft(drafter, other) is None
    same.tokens += [13]
    assert draft(drafter, same).tokens == (14,)


def test_a_sequence_that_runs_when_another_ends_finds_its_output():
    drafter = make()
    running = sequence([51, 10, 11], [12], name="b")
    assert draft(drafter, running) is None
    end(drafter, sequence([50], [10, 11, 12, 13, 14], name="a"))
    assert draft(drafter, sequence([1, 2], name="c")) is None  # learns in passing
    running.tokens.append(13)
    assert draft(drafter, running).tokens == (14,)


def test_failed_sequences_and_a_limit_of_zero_teach_nothing():
    drafter = make()
    seq = sequence([50], [10, 11, 12, 13], name="a")
    drafter.expects(seq)
    seq.finish = "error"
    drafter.forget(seq)
    assert draft(drafter, sequence([51], [10, 11, 12], name="b")) is None
    drafter = make(max_cached_requests=0)
    end(drafter, sequence([50], [10, 11, 12, 13], name="a"))
    assert draft(drafter, sequence([51], [10, 11, 12], name="b")) is None


def test_memory_is_bounded_whatever_is_learnt(monkeypatch):
    monkeypatch.setattr(suffix, "GENERATION_TOKENS", 50)
    monkeypatch.setattr(suffix, "MAX_RECENT_TOKENS", 200)
    drafter = make()
    for i in range(60):
        seq = sequence([50], [(i * 7 + k) % 61 for k in range(20)], name=f"a{i}", salt=f"{i % 9}")
        end(drafter, seq)
        drafter.begin_iteration()
        assert sum(r.num_tokens for r in drafter._recent.values()) <= 200 + 20
        assert all(len(r.generations) <= 2 for r in drafter._recent.values())
    assert not drafter._ended


def test_the_number_of_requests_learnt_from_is_bounded():
    drafter = make(max_cached_requests=4)
    for i in range(4):
        end(drafter, sequence([50], [i, 10 + i, 20 + i, 30 + i], name=f"a{i}"))
    drafter.begin_iteration()
    assert draft(drafter, sequence([51], [0, 10, 20], name="b")).tokens == (30,)
    end(drafter, sequence([50], [5, 6, 7, 8], name="last"))
    drafter.begin_iteration()
    assert draft(drafter, sequence([51], [0, 10, 20], name="c")) is None


def test_of_a_very_long_prompt_the_end_is_learnt(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_PROMPT_TOKENS", 10)
    drafter = make()
    seq = sequence([*range(20, 60), 1, 2, 3, 4, 5, 6, 7, 8], [21, 22])
    assert draft(drafter, seq) is None
    assert drafter._prompts["r"].automaton.num_tokens == 10
    seq.tokens += [1, 2, 3]
    assert draft(drafter, seq).tokens == (4, 5, 6)


@pytest.mark.parametrize("growth", [10, 1000])
def test_a_long_prompt_is_learnt_in_pieces_and_shared(growth, monkeypatch):
    monkeypatch.setattr(suffix, "MAX_GROWTH", growth)
    drafter = make()
    prompt = list(range(25)) + [3, 4, 5]
    one, two = (sequence(prompt, index=i, n=2) for i in range(2))
    found = [draft(drafter, one) for _ in range(3)]
    assert (found[0] is None) == (growth == 10)
    assert found[-1].tokens == (6, 7, 8)
    assert draft(drafter, two).tokens == (6, 7, 8)
    drafter.forget(one)
    drafter.forget(two)
    assert not drafter._prompts and not drafter._tracks


def test_all_sequences_of_an_iteration_share_one_limit_of_growth(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_GROWTH", 100)
    drafter = make()
    texts = [sequence(list(range(45)) * 2, name=f"r{i}") for i in range(4)]
    found = []
    for _ in range(5):
        drafter.begin_iteration()
        found.append(sum(drafter.expects(s) > 0 for s in texts))
        learnt = sum(p.automaton.num_tokens for p in drafter._prompts.values())
        assert learnt <= 100 * len(found)
        for seq in texts:
            seq.tokens.append(len(seq.tokens) % 45)
    assert found == [1, 2, 3, 4, 4]


def test_an_output_that_ran_undrafted_is_learnt_within_the_limit(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_GROWTH", 100)
    drafter = make()
    seq = sequence([50], list(range(45)) * 4)
    assert [draft(drafter, seq) is None for _ in range(3)] == [True, False, False]


def test_the_prompts_of_all_that_run_are_bounded_together(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_PROMPTS_TOKENS", 100)
    drafter = make()
    texts = [sequence([*range(30), 0, 1, 2], name=f"r{i}") for i in range(5)]
    drafts = [draft(drafter, s) for s in texts]
    assert [d is not None for d in drafts] == [True, True, True, False, False]
    assert sum(p.automaton.num_tokens for p in drafter._prompts.values()) == 100
    for seq in texts:
        seq.finish = "error"
        drafter.forget(seq)
    assert draft(drafter, sequence([*range(30), 0, 1, 2], name="later")) is not None


def test_an_output_learnt_in_pieces_is_one_output():
    drafter = make(max_cached_requests=10)
    output = list(range(100, 1100))
    end(drafter, sequence([50], output, name="a"))
    for _ in range(4):
        drafter.begin_iteration()
    assert not drafter._ended
    (recent,) = drafter._recent.values()
    assert (recent.num_requests, recent.num_tokens) == (1, 1000)
    for cut in (255, 256, 511, 512):
        made = draft(drafter, sequence([51], output[cut - 3 : cut], name=f"b{cut}"), 1)
        assert made.tokens == (output[cut],)


def test_the_size_of_what_is_learnt_is_kept_right(monkeypatch):
    monkeypatch.setattr(suffix, "GENERATION_TOKENS", 50)
    monkeypatch.setattr(suffix, "MAX_RECENT_TOKENS", 200)
    drafter = make()
    for i in range(60):
        tokens = [(i * 7 + k) % 61 for k in range(20)]
        end(drafter, sequence([50], tokens, name=f"a{i}", salt=f"{i * i % 9}"))
        drafter.begin_iteration()
        assert drafter._recent_size == sum(r.num_tokens for r in drafter._recent.values())


def test_outputs_that_end_faster_than_they_are_learnt_are_passed_over(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_RECENT_TOKENS", 100)
    drafter = make()
    for i in range(50):
        end(drafter, sequence([50], list(range(20)), name=f"a{i}"))
        assert drafter._ended_size == sum(len(e.tokens) for e in drafter._ended) <= 100
    drafter.begin_iteration()
    assert drafter._ended_size == 0 and not drafter._ended


def test_a_match_that_is_found_late_is_as_long_as_it_is(monkeypatch):
    drafter = make()
    end(drafter, sequence([50], [1, 2, 3, 4, 5, 6, 7], name="a"))
    seq = sequence([51], [1, 2], name="b")
    drafter.begin_iteration()
    assert draft(drafter, seq).tokens == (3, 4)
    end(drafter, sequence([52], [3, 4, 5, 9], name="c", salt="other"))
    drafter._recent[""].begin(0)  # a new generation, which nobody follows yet
    for token in (1, 2, 3, 4, 5, 6):
        drafter._recent[""].generations[0].learn(0, token)
    monkeypatch.setattr(suffix, "MAX_GROWTH", 1)
    seq.tokens += [3, 4]
    for _ in range(2):
        drafter.begin_iteration()
        drafter.expects(seq)
    assert drafter.match(seq) == 4
