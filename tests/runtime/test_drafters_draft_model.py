"""A model that drafts, on tiny random Llamas: itself, and another."""

import random

import pytest

from tests.runtime.tiny_run import V, draft_parts, request, run
from tests.toy import SumConstraint
from xylite.errors import EngineError
from xylite.runtime.drafters import DraftOptions, draft_model
from xylite.runtime.sequence import Sequence


def make(seed, n=4, **parts):
    return draft_model.make(DraftOptions(num_tokens=n, parts=draft_parts(seed, **parts)))


def prompts(number, longest=30):
    rng = random.Random(8)
    return [[rng.randrange(V) for _ in range(rng.randint(1, longest))] for _ in range(number)]


def many(number=6, **params):
    params = {"max_tokens": 16, "ignore_eos": True} | params
    return [request(f"r{i}", p, **params) for i, p in enumerate(prompts(number))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_model_is_accepted_and_changes_nothing(temperature):
    asked = many(temperature=temperature)
    plain, drafted = run(asked), run(asked, make(0))
    assert drafted.tokens() == plain.tokens()
    assert drafted.acceptance > 0.99
    assert drafted.counters.num_steps < 0.6 * plain.counters.num_steps


def test_the_same_model_draws_with_the_same_filters_seeds_and_bias():
    asked = many(temperature=1.3, top_k=9, top_p=0.9, min_p=0.01, logit_bias={5: 9.0}, seed=3, n=2)
    plain, drafted = run(asked), run(asked, make(0))
    assert drafted.tokens() == plain.tokens()
    assert drafted.acceptance > 0.99


def test_allowed_tokens_bind_the_draft_model_too():
    asked = many(temperature=1.0, allowed_token_ids=(3, 4, 5, 40, 41))
    plain, drafted = run(asked), run(asked, make(0))
    assert drafted.tokens() == plain.tokens()
    assert drafted.acceptance > 0.99


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_another_model_changes_nothing(temperature):
    asked = many(temperature=temperature)
    plain, drafted = run(asked), run(asked, make(1))
    assert drafted.tokens() == plain.tokens()
    assert 0 <= drafted.acceptance < 0.9


def test_penalties_and_constraints_are_the_targets_business():
    asked = many(temperature=0.7, presence_penalty=1.5, repetition_penalty=1.3)
    asked += [request("c", [1, 2, 3], max_tokens=20, constraint=SumConstraint)]
    plain, drafted = run(asked), run(asked, make(0))
    assert drafted.tokens() == plain.tokens()


def test_a_preempted_sequence_is_followed_again():
    asked = many(8, temperature=0.9)
    plain = run(asked)
    drafter = make(0)
    drafted = run(asked, drafter, num_blocks=26)
    assert drafted.counters.num_preemptions > 0
    assert drafted.tokens() == plain.tokens()
    assert drafted.acceptance > 0.99


def test_a_small_cache_lets_idle_sequences_go_and_drafts_for_the_rest():
    asked = many(8, temperature=0.9)
    drafted = run(asked, make(0, num_blocks=30, rows=4))
    assert drafted.tokens() == run(asked).tokens()
    assert drafted.acceptance > 0.99 and drafted.counters.spec_num_drafts > 8


def test_a_prompt_longer_than_the_budget_takes_several_calls():
    asked = [request("r", list(range(50)), max_tokens=12, temperature=0.0, ignore_eos=True)]
    drafted = run(asked, make(0, budget=16))
    assert drafted.tokens() == run(asked).tokens()
    assert drafted.counters.spec_num_drafts > 0 and drafted.acceptance > 0.99


def test_a_beginning_that_was_seen_before_is_not_computed_again():
    drafter = make(0)
    steps = []
    real = drafter._parts.executor.run
    drafter._parts.executor.run = lambda step, mask: steps.append(step) or real(step, mask)
    prompt = list(range(41))
    for name in ("a", "b"):
        steps.clear()
        run([request(name, prompt, max_tokens=4, ignore_eos=True)], drafter)
        first = len(steps[0].table.tokens)
        assert first == (42 if name == "a" else 1), first


def test_what_was_drafted_in_vain_leaves_no_trace():
    rng = random.Random(4)
    drafter = make(0)
    seq = run_sequence([5, 9, 2, 7])
    for _ in range(12):
        (got,) = drafter.propose([(seq, rng.randint(1, 4))])
        (fresh,) = make(0).propose([(seq, len(got))])
        assert got == fresh
        right = got.tokens[: rng.randint(0, len(got))]
        seq.tokens += [*right, *(rng.randrange(V) for _ in range(rng.randint(1, 3)))]


def test_a_sequence_that_found_no_blocks_drafts_as_well_once_there_are():
    drafter = make(0, num_blocks=7)
    early, other = run_sequence([1, 2, 3, 4, 5, 6]), run_sequence(list(range(30, 45)))
    late = run_sequence([1, 2, 3, 4, 5, 6] + list(range(20, 34)))
    drafter.propose([(early, 1)])
    drafter.forget(early)
    other_draft, none = drafter.propose([(other, 1), (late, 1)])
    assert other_draft is not None and none is None
    drafter.forget(other)
    assert drafter.propose([(late, 1)]) == make(0).propose([(late, 1)])


def test_blocks_and_rows_come_back_and_stay_whole():
    drafter = make(0, num_blocks=64)

    def check():
        drafter.blocks.check([s.seq for s in drafter._shadows.values() if s.seq.row >= 0])

    run(many(8, temperature=0.9), drafter, after_step=check)
    drafter.propose([])
    assert not drafter._shadows and len(drafter._rows) == 8
    assert drafter.blocks.num_free == 64 and not drafter.blocks._pending
    drafter.blocks.check([])


def test_a_sequence_that_ends_before_the_device_thread_drafts_for_it_leaves_nothing():
    drafter = make(0)
    gone, other = run_sequence([1, 2, 3]), run_sequence([4, 5, 6])
    drafter.forget(gone)
    (none, draft) = drafter.propose([(gone, 2), (other, 2)])
    assert none is None and len(draft) == 2
    assert list(drafter._shadows) == [other] and len(drafter._rows) == 7


def test_nothing_is_drafted_beyond_the_draft_models_context():
    drafter = make(0)
    seq = run_sequence(list(range(50)) * 2 + [1] * 26)
    assert drafter.expects(seq) == 2
    seq.tokens += [1, 1]
    assert drafter.expects(seq) == 0


def run_sequence(prompt):
    return Sequence(request("r", prompt, max_tokens=1, temperature=0.0), 0, 0.0)


def test_a_draft_ends_with_an_end_token():
    asked = many(temperature=1.0, ignore_eos=False, stop_token_ids=tuple(range(10)))
    drafter = make(0)
    drafted = run(asked, drafter)
    assert drafted.tokens() == run(asked).tokens()
    assert drafted.ends() == run(asked).ends()
    assert any(reason == "stop" for reason, _ in drafted.ends().values())


def test_numbers_that_are_not_finite_raise():
    drafter = make(0)
    drafter._parts.executor.model.params.norm.fill_(float("nan"))
    with pytest.raises(EngineError, match="not finite"):
        run(many(1), drafter)
