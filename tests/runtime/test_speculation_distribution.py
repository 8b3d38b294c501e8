"""What is drawn with drafts has the distribution of the model: chi-square over 2000 answers."""

import math

import numpy as np
import pytest
import torch

from tests.models.driver import Chunk, Driver
from tests.runtime.tiny_run import V, executor, request, run
from xylite.ops import reference
from xylite.runtime.executor import Executor
from xylite.runtime.request import Draft

PROMPT = (5, 17, 41, 8, 30)
ANSWERS = 2000
N = 50  # answers of one request
# Parameters, and how many tokens of an answer are looked at: the rest is cut off.
CASES = {
    "temperature 1": ({}, 2),
    "top_k": ({"top_k": 4}, 3),
    "top_p": ({"top_p": 0.6}, 2),
    "top_k and top_p": ({"top_k": 12, "top_p": 0.8}, 2),
    "bias and few tokens": (
        {"allowed_token_ids": (3, 8, 9, 21, 33), "logit_bias": {8: 1.0, 33: -1.0}},
        3,
    ),
}


def probabilities(logits, top_k=0, top_p=1.0, allowed_token_ids=None, logit_bias=None):
    """[V] in float64, as the parameters are documented and by nothing that the engine uses."""
    x = np.full(V, -np.inf)
    ids = list(range(V)) if allowed_token_ids is None else list(allowed_token_ids)
    x[ids] = logits[ids]
    for token, bias in (logit_bias or {}).items():
        x[token] += bias
    order = np.argsort(-x)
    if top_k:
        x[order[top_k:]] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
    p[order[before >= top_p]] = 0.0
    return p / p.sum()


def answers_of(params, depth, tiny):
    """Probability of each answer of `depth` tokens, from whole passes over each beginning."""
    model = tiny.model
    known = {(): 1.0}
    for _ in range(depth):
        starts = list(known)
        tokens = [(*PROMPT, *start) for start in starts]
        driver = Driver(model.params, model.spec, model.family, reference.TABLE, tokens)
        rows = driver.run([[Chunk(i, 0, len(t))] for i, t in enumerate(tokens)])
        longer = {}
        for start, logits in zip(starts, rows, strict=True):
            p = probabilities(logits[-1, :V].double().numpy(), **params)
            longer |= {(*start, t): known[start] * p[t] for t in np.flatnonzero(p).tolist()}
        known = longer
    return known


class Likely:
    """Proposes the tokens that the model would most likely say: right often, but not always."""

    on_device = False

    def __init__(self, expected, trees):
        self.expected = expected
        self.trees = trees

    def expects(self, seq):
        return 2

    def forget(self, seq):
        pass

    def propose(self, wanted):
        return [self._draft(tuple(seq.tokens[seq.num_prompt :])) for seq, _ in wanted]

    def _draft(self, start):
        following = {}
        for answer, p in self.expected.items():
            if answer[: len(start)] == start and len(answer) > len(start):
                token = answer[len(start)]
                following[token] = following.get(token, 0.0) + p
        best = sorted(following, key=following.__getitem__, reverse=True)[: 3 if self.trees else 1]
        if not best:
            return None
        # A second level below the best, so that chains and trees are two deep.
        return Draft((*best, best[0]), (*[-1] * len(best), 0) if self.trees else None)


def chi_square(counts, expected):
    """The statistic, and its degrees of freedom; rare answers are counted together."""
    rare = [k for k, p in expected.items() if p * ANSWERS < 5]
    bins = [(counts.get(k, 0), p * ANSWERS) for k, p in expected.items() if p * ANSWERS >= 5]
    if rare:
        bins.append((sum(counts.get(k, 0) for k in rare), sum(expected[k] for k in rare) * ANSWERS))
    return sum((seen - e) ** 2 / e for seen, e in bins), len(bins) - 1


def limit(freedom):
    """What chi-square exceeds once in 100,000 times (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3


def counted(params, depth, drafter, target):
    asked = [
        request(
            f"r{i}",
            PROMPT,
            temperature=1.0,
            max_tokens=depth + 1,
            ignore_eos=True,
            n=N,
            seed=i,
            **params,
        )
        for i in range(ANSWERS // N)
    ]
    made = run(
        asked, drafter, max_draft=4, num_blocks=512, budget=256, max_num_seqs=64, target=target
    )
    counts = {}
    for tokens in made.tokens().values():
        answer = tuple(tokens[:depth])
        counts[answer] = counts.get(answer, 0) + 1
    return counts, made.counters


@pytest.fixture(scope="module", params=list(CASES))
def case(request):
    params, depth = CASES[request.param]
    return params, depth, answers_of(params, depth, executor(0))


def target(kind=Executor):
    made = executor(0, 512, 64)
    return kind(made.model, made.ops, made.kv, 64)


@pytest.mark.parametrize("trees", [False, True])
def test_answers_with_drafts_have_the_models_distribution(case, trees):
    params, depth, expected = case
    assert math.isclose(sum(expected.values()), 1.0)
    counts, c = counted(params, depth, Likely(expected, trees), target())
    assert c.spec_num_draft_tokens > c.spec_num_accepted_tokens > 0.03 * ANSWERS
    assert set(counts) <= set(expected)
    found, freedom = chi_square(counts, expected)
    assert freedom > 10
    assert found < limit(freedom)
    without, _ = counted(params, depth, None, target())
    assert counts == without


class Biased(Executor):
    """One time in five takes a draft token whatever was drawn."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self._rng = np.random.default_rng(3)

    def _verify(self, table, ids):
        rows = np.flatnonzero((table.parent >= 0) & (self._rng.random(len(table.parent)) < 0.2))
        ids[torch.from_numpy(table.parent[rows]).long()] = torch.from_numpy(
            table.draft_token[rows]
        ).long()
        return super()._verify(table, ids)


@pytest.mark.parametrize("trees", [False, True])
def test_a_bias_towards_drafts_would_be_noticed(case, trees):
    params, depth, expected = case
    counts, _ = counted(params, depth, Likely(expected, trees), target(Biased))
    counts = {k: n for k, n in counts.items() if k in expected}
    found, freedom = chi_square(counts, expected)
    assert found > limit(freedom)
