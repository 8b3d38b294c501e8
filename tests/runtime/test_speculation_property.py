"""With a real drafter, any schedule gives the tokens of full recomputation.

Few tokens are allowed, so that the toy's texts repeat and drafts are often right.
"""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.runtime.driver import Driver
from tests.runtime.test_scheduler_property import requests, worlds
from tests.toy import ToyDrafter, ToyExecutor, expected_tokens, toy_request
from xylite.runtime.drafters import DraftOptions, ngram, suffix
from xylite.runtime.request import SamplingParams

OPTIONS = DraftOptions(
    num_tokens=5, lookup_min=1, lookup_max=3, max_cached_requests=50, max_spec_factor=3.0
)


class Proposing:
    """A drafter as `Driver.run` takes it, with random lengths."""

    def __init__(self, drafter, rng):
        self.drafter = drafter
        self.rng = rng
        self.seen = set()
        self.num_chains = self.num_trees = 0

    def __call__(self, seq):
        for old in [s for s in self.seen if s.finish is not None]:
            self.seen.discard(old)
            self.drafter.forget(old)
        self.seen.add(seq)
        most = self.drafter.expects(seq)
        if not most or self.rng.random() < 0.2:
            return None
        (draft,) = self.drafter.propose([(seq, self.rng.randint(1, most))])
        if draft is not None:
            self.num_trees += draft.parents is not None
            self.num_chains += draft.parents is None
        return draft


def run_world(data, drafter, rng, executor=ToyExecutor):
    world, capacity = data.draw(worlds())
    wanted = data.draw(st.lists(requests(capacity), min_size=1, max_size=7))
    allowed = data.draw(st.sampled_from([(9, 40), (7, 36), (3, 23, 43), (7, 22, 37, 52)]))
    driver = Driver(**world | {"max_draft": 5})
    driver.executor = executor(world["num_blocks"], world["block_size"])
    later, built = [], []
    for i, w in enumerate(wanted):
        params = dataclasses.replace(
            w["params"],
            allowed_token_ids=allowed,
            banned_token_ids=(),
            stop_token_ids=allowed[:1] if w["params"].stop_token_ids else (),
        )
        request = toy_request(
            f"r{i}",
            w["prompt"],
            params,
            capacity=capacity,
            cache_salt=w["cache_salt"],
            priority=w["priority"],
        )
        built.append((request, w))
        later.append((w["at"], request))
    aborted = set()

    def on_step(number):
        for at, request in list(later):
            if at <= number:
                later.remove((at, request))
                driver.add(request)
        for request, w in built:
            if w["abort_at"] is not None and w["abort_at"] + w["at"] == number:
                aborted.add(request.id)
                for i in range(request.params.n):
                    seq = driver.sequences.get((request.id, i))
                    if seq is not None:
                        driver.queues.stop(seq, "abort")

    propose = Proposing(drafter, rng)
    while True:
        driver.run(propose=propose, on_step=on_step)
        if not later:
            break
        driver.add(later.pop(0)[1])
    for request, _ in built:
        for i in range(request.params.n):
            truth = expected_tokens(request, i)
            got = driver.tokens(request.id, i)
            assert got == (truth[: len(got)] if request.id in aborted else truth), (request, i)
    assert driver.blocks.num_free == world["num_blocks"]
    c = driver.queues.counters
    assert sum(c.spec_accepted_per_pos) == c.spec_num_accepted_tokens <= c.spec_num_draft_tokens
    delivered = sum(len(e.tokens) for events in driver.events.values() for e in events)
    assert c.spec_num_accepted_tokens <= delivered
    return propose, c


@pytest.mark.parametrize("module", [ngram, suffix])
def test_any_schedule_with_a_real_drafter_gives_the_tokens_of_full_recomputation(module):
    totals = {"accepted": 0, "rejected": 0, "chains": 0, "trees": 0}

    @settings(
        max_examples=150,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.data(), st.integers(0, 2**32))
    def check(data, seed):
        propose, c = run_world(data, module.make(OPTIONS), random.Random(seed))
        totals["accepted"] += c.spec_num_accepted_tokens
        totals["rejected"] += c.spec_num_draft_tokens - c.spec_num_accepted_tokens
        totals["chains"] += propose.num_chains
        totals["trees"] += propose.num_trees

    check()
    assert totals["accepted"] > 60 and totals["rejected"] > 60, totals
    assert totals["chains"] > 50 and (module is ngram or totals["trees"] > 30), totals


@pytest.mark.parametrize("block_size", [1, 4, 5])
def test_the_prefix_cache_holds_the_same_after_drafts(block_size):
    def talk(propose):
        """Turns of a conversation, each with all that was said before; what each found cached."""
        driver = Driver(block_size=block_size, num_blocks=128, budget=16, max_draft=5)
        found, text = [], [3, 1, 4]
        for turn in range(6):
            text += [9 + turn, 2]
            params = SamplingParams(max_tokens=9, ignore_eos=True, seed=turn, n=1 + turn % 2)
            (seq, *_) = driver.add(toy_request(f"t{turn}", text, params))
            driver.run(propose=propose)
            text = list(seq.tokens)
            found.append((seq.num_cached, text))
        c = driver.queues.counters
        counts = (c.prefix_queries, c.prefix_hits, c.prompt_tokens, c.prompt_tokens_cached)
        return found, counts, driver.blocks.num_cached, c

    *plain, before = talk(None)
    *drafted, after = talk(ToyDrafter(random.Random(7), 5).propose)
    assert drafted == plain
    assert before.prefix_hits > 100
    assert after.spec_num_draft_tokens > after.spec_num_accepted_tokens > 10


class Generous(ToyExecutor):
    """Accepts every third wrong draft token."""

    num_wrong = 0

    def _verify(self, step, ids):
        s = step.sample
        drawn = ids.copy()
        for r in np.flatnonzero(s.parent >= 0).tolist():
            if drawn[s.parent[r]] != s.draft_token[r]:
                self.num_wrong += 1
                if self.num_wrong % 3 == 0:
                    drawn[s.parent[r]] = s.draft_token[r]
        return super()._verify(step, drawn)


def test_a_biased_acceptance_would_be_noticed():
    # The first counterexample will do: no shrinking.
    @settings(max_examples=100, phases=[Phase.generate], derandomize=True, database=None)
    @given(st.data(), st.integers(0, 2**32))
    def check(data, seed):
        run_world(data, ngram.make(OPTIONS), random.Random(seed), Generous)

    with pytest.raises(AssertionError):
        check()
