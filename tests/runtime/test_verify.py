"""Drafts change nothing but speed: every parameter, chains and trees, on a tiny random Llama."""

import itertools
import random

import pytest

from tests.runtime.tiny_run import V, draft_parts, request, run
from tests.toy import SumConstraint
from xylite.runtime.drafters import DraftOptions, draft_model, ngram, suffix
from xylite.runtime.request import Draft

PARAMS = {
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 1.0},
    "filtered": {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "penalties": {
        "temperature": 0.8,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.4,
    },
    "bias": {"temperature": 0.9, "logit_bias": {4: 6.0, 9: 5.5, 2: -100.0}},
    "min_tokens": {
        "temperature": 0.7,
        "min_tokens": 9,
        "ignore_eos": False,
        "stop_token_ids": tuple(range(0, V, 2)),
    },
    "stop tokens": {"temperature": 0.7, "stop_token_ids": (3, 5, 7, 9, 11, 13)},
    "few tokens": {"temperature": 0.9, "allowed_token_ids": (3, 8, 9)},
    "constraint": {"temperature": 0.9, "constraint": SumConstraint},
    "logprobs": {"temperature": 0.6, "logprobs": 3, "prompt_logprobs": 2},
    "several": {"temperature": 1.0, "n": 3, "seed": 11},
    "one token": {"temperature": 1.0, "max_tokens": 1},
    "two tokens": {"temperature": 1.0, "max_tokens": 2},
    "nothing": {"max_tokens": 0},
}


class Knowing:
    """Knows what will be said and spoils some of it: chains or trees."""

    on_device = False

    def __init__(self, truth, trees):
        self.truth = truth
        self.trees = trees
        self.rng = random.Random(5)

    def expects(self, seq):
        return 5

    def forget(self, seq):
        pass

    def propose(self, wanted):
        return [self._draft(seq, n) for seq, n in wanted]

    def _draft(self, seq, n):
        right = self.truth[seq.request.id, seq.index][seq.num_output :][:n]
        if not self.trees:
            return Draft(tuple(t if self.rng.random() < 0.8 else 1 for t in right)) or None
        tokens, parents, last = [], [], -1
        for t in right:
            wrong = (t + 1 + self.rng.randrange(V - 1)) % V
            base = last
            for token in self.rng.choice([[t, wrong], [wrong, t], [t]]):
                if token == t:
                    last = len(tokens)
                tokens.append(token)
                parents.append(base)
        return Draft(tuple(tokens), tuple(parents)) if tokens else None


def requests(**params):
    rng = random.Random(2)
    params = {"max_tokens": 18, "ignore_eos": True} | params
    stem = [rng.randrange(V) for _ in range(6)]
    prompts = [stem * 3 + [i] for i in range(3)] + [[rng.randrange(V) for _ in range(30)], [5]]
    return [request(f"r{i}", p, **params) for i, p in enumerate(prompts)]


def drafters(truth):
    options = DraftOptions(
        num_tokens=5, lookup_min=1, lookup_max=3, max_cached_requests=9, max_spec_factor=4.0
    )
    yield Knowing(truth, False)
    yield Knowing(truth, True)
    yield ngram.make(options)
    yield suffix.make(options)
    yield draft_model.make(DraftOptions(num_tokens=4, parts=draft_parts(1)))


def assert_same(drafted, plain):
    assert drafted.tokens() == plain.tokens()
    assert drafted.ends() == plain.ends()
    for got, expected in zip(drafted.logprobs().values(), plain.logprobs().values(), strict=True):
        assert [x.token for x in got] == [x.token for x in expected]
        assert [x.logprob for x in got] == pytest.approx([x.logprob for x in expected], abs=1e-4)
        assert [[t for t, _ in x.top] for x in got] == [[t for t, _ in x.top] for x in expected]
    for key, events in drafted.events.items():
        scored = [e.prompt_logprobs for e in events if e.prompt_logprobs is not None]
        expected = [e.prompt_logprobs for e in plain.events[key] if e.prompt_logprobs is not None]
        assert len(scored) == len(expected)
        for got, want in zip(itertools.chain(*scored), itertools.chain(*expected), strict=True):
            assert (got is None) == (want is None)
            assert got is None or got.logprob == pytest.approx(want.logprob, abs=1e-4)


@pytest.mark.parametrize("name", PARAMS)
def test_every_drafter_changes_nothing(name):
    asked = requests(**PARAMS[name])
    plain = run(asked)
    for drafter in drafters(plain.tokens()):
        drafted = run(asked, drafter, max_draft=5)
        assert_same(drafted, plain)
        c = drafted.counters
        assert sum(c.spec_accepted_per_pos) == c.spec_num_accepted_tokens
        assert c.spec_num_accepted_tokens <= c.spec_num_draft_tokens


@pytest.mark.parametrize("trees", [False, True])
def test_good_drafts_are_accepted_and_save_steps(trees):
    asked = requests(temperature=1.0)
    plain = run(asked)
    drafted = run(asked, Knowing(plain.tokens(), trees), max_draft=5)
    assert_same(drafted, plain)
    assert drafted.acceptance > 0.4
    assert drafted.counters.num_steps < 0.7 * plain.counters.num_steps


@pytest.mark.parametrize("trees", [False, True])
def test_preemption_in_the_midst_of_drafts_changes_nothing(trees):
    asked = requests(temperature=1.0, n=2)
    plain = run(asked)
    drafted = run(asked, Knowing(plain.tokens(), trees), max_draft=5, num_blocks=20)
    assert drafted.counters.num_preemptions > 0
    assert_same(drafted, plain)


def test_accepted_tokens_are_counted_by_depth_and_only_if_delivered():
    (asked,) = [request("r", [1, 2, 3], max_tokens=10, temperature=0.0, ignore_eos=True)]
    truth = run([asked]).tokens()["r", 0]

    class Right(Knowing):
        def _draft(self, seq, n):
            return Draft(tuple(truth[seq.num_output :][:4]))

    first = run([asked], Right({}, False), max_draft=4).counters
    # 1 by the prompt's step; 4 + 1; then 3 + 1 of the 4 that are left
    assert first.spec_accepted_per_pos == [2, 2, 2, 1]
    assert (first.spec_num_drafts, first.spec_num_draft_tokens) == (2, 7)
    stop = truth[2]
    assert stop not in truth[:2]
    (short,) = [request("r", [1, 2, 3], max_tokens=10, temperature=0.0, stop_token_ids=(stop,))]
    second = run([short], Right({}, False), max_draft=4)
    assert second.tokens()["r", 0] == truth[:3]
    assert second.counters.spec_accepted_per_pos == [1, 1]
