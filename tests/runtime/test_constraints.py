"""Constraints and drafts: a draft token that the rule forbids ends its branch, and nothing else."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.driver import Driver
from tests.runtime.test_scheduler_property import worlds
from tests.runtime.tiny_run import V as TINY_V
from tests.runtime.tiny_run import request as tiny_request
from tests.runtime.tiny_run import run
from tests.toy import WORDS, SumConstraint, V, expected_tokens, toy_request
from xylite.runtime.masks import bits, fill_masks
from xylite.runtime.request import Draft, SamplingParams
from xylite.runtime.scheduler import Chunk, Plan
from xylite.runtime.sequence import Sequence


@st.composite
def drafts(draw):
    """Chains and trees of any tokens; siblings are distinct."""
    tokens = draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=8))
    if draw(st.booleans()):
        return Draft(tuple(tokens))
    parents = [draw(st.integers(-1, i - 1)) for i in range(len(tokens))]
    kept, place, siblings = [], {-1: -1}, set()
    for i, (token, up) in enumerate(zip(tokens, parents, strict=True)):
        if up in place and (place[up], token) not in siblings:
            siblings.add((place[up], token))
            place[i] = len(kept)
            kept.append((token, place[up]))
    return Draft(*map(tuple, zip(*kept, strict=True)))


def masks(seq, draft):
    """The rows that fill_masks writes for one sequence, and whether its constraint failed."""
    num = 1 if draft is None else 1 + len(draft)
    plan = Plan(0, [Chunk(seq, 0, num, draft, True, seq.epoch)], [], [], [])
    out = np.zeros((num, WORDS), np.int32)
    failed = fill_masks(plan, out)
    return np.unpackbits(out.view(np.uint8), axis=1, bitorder="little")[:, :V], failed


def constrained(accepted=(), **params):
    request = toy_request("r", [1], SamplingParams(**params), constraint=SumConstraint)
    seq = Sequence(request, 0, 0.0)
    seq.constraint.accept(accepted)
    return seq


@settings(max_examples=300)
@given(drafts(), st.sampled_from([(), (1,), (1, 1), (5, 3)]), st.booleans())
def test_rows_follow_the_rule_as_far_as_it_allows_and_are_open_beyond(draft, accepted, limited):
    few = tuple(range(0, V, 2))
    seq = constrained(accepted, allowed_token_ids=few if limited else None)
    rows, failed = masks(seq, draft)
    assert not failed
    assert seq.constraint.accepted == list(accepted)

    def allowed(total, token):
        return bool((total + token) % 3) and (not limited or token in few)

    totals = []
    for i, token in enumerate(draft.tokens):
        up = i - 1 if draft.parents is None else draft.parents[i]
        before = totals[up] if up >= 0 else sum(accepted)
        is_open = before is not None and allowed(before, token)
        totals.append(before + token if is_open else None)
    for total, row in zip([sum(accepted), *totals], rows, strict=True):
        assert row.tolist() == [1 if total is None else allowed(total, t) for t in range(V)]


def test_a_constraint_that_leaves_nothing_fails():
    seq = constrained(allowed_token_ids=(3, 6, 9))
    rows, failed = masks(seq, Draft((4, 5)))
    assert failed == [seq]
    assert rows.all()


def test_nothing_may_follow_a_draft_token_that_completes_the_text():
    class Once(SumConstraint):
        """One token, whichever, and then the end."""

        def _allowed(self, total):
            return bits(range(V) if not self.accepted else (), WORDS)

    request = toy_request("r", [1], SamplingParams(), constraint=Once)
    seq = Sequence(request, 0, 0.0)
    rows, failed = masks(seq, Draft((7, 8), (-1, 0)))
    assert not failed
    assert rows.all(axis=1).tolist() == [True, False, True]
    assert not rows[1].any()


class Misleading:
    """Proposes what would be said without the constraint, and tokens that it forbids."""

    def __init__(self, rng, most):
        self.rng = rng
        self.most = most
        self.num_forbidden = 0

    def __call__(self, seq):
        total = sum(seq.tokens[seq.num_prompt :])
        tokens, parents, last = [], [], -1
        truth = expected_tokens(seq.request, seq.index)[seq.num_output :][: self.most]
        for right in truth:
            forbidden = next(t % V for t in range(right + 1, right + 4) if (t % V + total) % 3 == 0)
            self.num_forbidden += 1
            order = self.rng.choice([[forbidden], [forbidden, right], [right, forbidden]])
            base, last = last, None
            for token in order:
                if token == right:
                    last = len(tokens)
                tokens.append(token)
                parents.append(base)
            if last is None:
                last = len(tokens) - 1  # what follows hangs below a forbidden token
            total += right
        if not tokens:
            return None
        if self.rng.random() < 0.3:
            return Draft(tuple(tokens))
        return Draft(tuple(tokens), tuple(parents))


def test_drafts_of_forbidden_tokens_change_nothing_under_any_schedule():
    num_forbidden = 0

    @settings(max_examples=150)
    @given(worlds(), st.integers(1, 6), st.integers(0, 2**32))
    def check(drawn, count, seed):
        nonlocal num_forbidden
        world, capacity = drawn
        rng = random.Random(seed)
        driver = Driver(**world | {"max_draft": 10})
        requests = []
        for i in range(count):
            params = SamplingParams(
                n=rng.choice([1, 1, 2]),
                max_tokens=rng.randint(1, 12),
                temperature=rng.choice([0.0, 1.0]),
                presence_penalty=rng.choice([0.0, 1.0]),
                allowed_token_ids=rng.choice([None, tuple(range(4, 40))]),
                seed=rng.randrange(9),
            )
            prompt = [rng.randrange(V) for _ in range(rng.randint(1, capacity - 13))]
            requests.append(
                toy_request(f"r{i}", prompt, params, capacity=capacity, constraint=SumConstraint)
            )
            driver.add(requests[-1])
        propose = Misleading(rng, 5)
        driver.run(propose=propose)
        num_forbidden += propose.num_forbidden
        for request in requests:
            for i in range(request.params.n):
                assert driver.tokens(request.id, i) == expected_tokens(request, i)
                assert driver.finish(request.id, i) in ("stop", "length")

    check()
    assert num_forbidden > 1000


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("trees", [False, True])
def test_what_a_model_would_say_without_the_constraint_is_not_accepted(trees, temperature):
    class Unconstrained:
        """Drafts the free answer, in trees with the constrained one beside it."""

        on_device = False

        def expects(self, seq):
            return 4

        def forget(self, seq):
            pass

        def propose(self, wanted):
            return [self._draft(seq, n) for seq, n in wanted]

        def _draft(self, seq, n):
            place = (seq.request.id, seq.index)
            loose = free[place][seq.num_output :][:n]
            if not trees:
                return Draft(tuple(loose)) or None
            tokens, parents, last = [], [], -1
            for one, other in zip(loose, truth[place][seq.num_output :], strict=False):
                base = last
                for token in dict.fromkeys((one, other)):
                    if token == other:
                        last = len(tokens)
                    tokens.append(token)
                    parents.append(base)
            return Draft(tuple(tokens), tuple(parents)) if tokens else None

    def asked(constraint):
        rng = random.Random(4)
        return [
            tiny_request(
                f"r{i}",
                [rng.randrange(TINY_V) for _ in range(9)],
                temperature=temperature,
                max_tokens=20,
                ignore_eos=True,
                seed=i,
                constraint=constraint,
            )
            for i in range(5)
        ]

    free = run(asked(None)).tokens()
    truth = run(asked(SumConstraint)).tokens()
    assert free != truth
    drafted = run(asked(SumConstraint), Unconstrained(), max_draft=10)
    assert drafted.tokens() == truth
    c = drafted.counters
    assert c.spec_num_draft_tokens > c.spec_num_accepted_tokens
    assert c.spec_num_accepted_tokens > (30 if trees else 0)
