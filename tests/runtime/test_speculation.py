"""How much is drafted: against simulated devices and texts of known predictability."""

import dataclasses
import random

import numpy as np
import pytest

from tests.runtime.driver import Driver
from tests.toy import toy_request
from xylite.runtime.plan import Chunk, Plan
from xylite.runtime.request import Draft, SamplingParams
from xylite.runtime.sequence import Sequence
from xylite.runtime.speculation import (
    FRESH_STEPS,
    MIN_SAMPLES,
    MOST_REST,
    Speculation,
    StepCosts,
)

GAP = 0.02  # of a step of one token: what a step costs more that is not planned ahead


class Always:
    """Proposes as many tokens as it is asked for."""

    def __init__(self, most=8, on_device=False, match=0):
        self.most = most
        self.matched = match
        self.on_device = on_device
        self.num_calls = 0

    def begin_iteration(self):
        pass

    def expects(self, seq):
        return self.most

    def match(self, seq):
        return self.matched

    def propose(self, wanted):
        self.num_calls += 1
        return [Draft((1,) * n) for _, n in wanted]

    def forget(self, seq):
        pass


class World:
    """A device whose steps take `cost(tokens)` seconds, and texts whose next token a drafter knows
    with probability `chance`."""

    plans_ahead = True  # else nobody asks whether to draft before it is done

    def __init__(self, batch, cost, chance, proposer=None, draft_seconds=0.0, seed=1):
        self.cost = cost
        self.chance = chance
        self.rng = random.Random(seed)
        self.now = 0.0
        self.draft_seconds = draft_seconds
        self.drafter = Speculation(proposer or Always(), 8, lambda: self.now)
        self.sequences = []
        for i in range(batch):
            request = toy_request(f"r{i}", [1], SamplingParams(max_tokens=10**5))
            seq = Sequence(request, 0, 0.0)
            seq.row = i
            self.sequences.append(seq)
        self.drafted = 0  # draft tokens of the last step
        self.num_ahead = 0

    async def on_device(self, work):
        drafts = work()
        self.now += self.draft_seconds * max(len(d) for d in drafts)
        return drafts

    async def step(self):
        ahead = self.plans_ahead and self.drafted == 0 and not self.drafter.wants_to_draft()
        before = self.now
        if ahead:
            self.num_ahead += 1
        else:
            await self.drafter.propose(self.sequences, self.on_device)
            self.now += GAP
        plan = Plan(0, [], [], [], [])
        for seq in self.sequences:
            draft, seq.draft = seq.draft, None
            n = 0 if draft is None else len(draft)
            plan.chunks.append(Chunk(seq, len(seq.tokens) - 1, 1 + n, draft, True, seq.epoch))
        gap = self.now - before
        seconds = self.cost(plan.num_tokens)
        self.now += seconds
        self.drafted = plan.num_tokens - len(self.sequences)
        for chunk in plan.chunks:
            chunk.seq.tokens.append(1)
            for _ in range(chunk.num_draft):
                if self.rng.random() >= self.chance:
                    break
                chunk.seq.tokens.append(1)
        self.drafter.observe(plan, seconds, gap)

    async def run(self, steps):
        """Tokens per second over some steps."""
        start, tokens = self.now, sum(len(s.tokens) for s in self.sequences)
        for _ in range(steps):
            await self.step()
        return (sum(len(s.tokens) for s in self.sequences) - tokens) / (self.now - start)


def memory_bound(tokens):
    return 1.0 + 0.02 * tokens


def compute_bound(tokens):
    return 0.1 + 0.9 * tokens


async def test_predictable_text_gets_long_drafts():
    world = World(1, memory_bound, 0.95)
    await world.run(100)
    assert world.drafted >= 6
    assert await world.run(200) > 4 / memory_bound(1)


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("cost", [memory_bound, compute_bound])
async def test_unpredictable_text_costs_at_most_a_twentieth(batch, cost):
    world = World(batch, cost, 0.0)
    assert await world.run(1000) > 0.95 * batch / cost(batch)


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("cost", [memory_bound, compute_bound])
async def test_the_chosen_lengths_are_near_the_best_fixed_one(batch, cost, chance):
    world = World(batch, cost, chance)
    await world.run(300)
    got = await world.run(700)

    def rate(n):
        tokens = batch * sum(chance**i for i in range(n + 1))
        return tokens / (cost(batch * (1 + n)) + (GAP if n else 0))

    assert got > 0.92 * max(map(rate, range(9)))


async def test_a_compute_bound_batch_drafts_nothing_and_is_planned_ahead():
    world = World(32, compute_bound, 0.5)
    await world.run(300)
    before = world.num_ahead
    await world.run(200)
    assert world.num_ahead - before > 180


async def test_a_draft_is_as_long_as_the_match_it_continues_makes_likely():
    lengths = {}
    for match in (1, 2, 20):
        proposer = Always(match=match)
        world = World(1, lambda n: 1 + 0.08 * n, 0.0, proposer)
        world.drafter._costs = StepCosts()
        for size in range(1, 10):
            for _ in range(MIN_SAMPLES):
                world.drafter._costs.add(size, world.cost(size))
        (lengths[match],) = world.drafter._lengths(world.sequences)
    assert lengths[1] < lengths[2] < lengths[20] == 8


async def test_where_matches_begin_often_the_next_step_waits_for_the_token():
    for share, ahead in ((0.5, False), (0.0, True)):
        world = World(1, memory_bound, 0.95)
        await world.run(50)
        proposer, rng = world.drafter._proposer, random.Random(2)
        known = {}

        def expects(seq, rng=rng, known=known, share=share):
            """Every other token, if share is a half, begins a match that ends with the draft."""
            n = len(seq.tokens)
            if n not in known:
                known[n] = 8 if rng.random() < share else 0
            return known[n]

        proposer.expects = expects
        await world.run(100)
        before = world.num_ahead
        await world.run(100)
        assert (world.num_ahead - before > 90) == ahead
        assert ahead or world.num_ahead == before


async def test_a_text_that_becomes_predictable_is_drafted_again():
    world = World(1, lambda n: 1 + 0.15 * n, 0.0)
    await world.run(100)
    assert (await world.run(50)) < 1.0
    world.chance = 0.95
    await world.run(100)
    assert await world.run(50) > 2 / 1.15


async def test_a_bad_spell_of_all_sequences_is_forgiven():
    world = World(8, memory_bound, 0.3)
    await world.run(50)
    world.drafter._outcome = [1.0, 100.0]
    await world.run(300)
    accepted, expected = world.drafter._outcome
    assert accepted / expected > 0.8


async def test_sizes_beyond_those_known_are_tried_step_by_step():
    world = World(32, memory_bound, 0.9)
    while not world.drafted:
        await world.step()
    assert world.drafted == 32
    for _ in range(MIN_SAMPLES):
        await world.step()
    assert 32 < world.drafted <= 96


async def test_a_slow_draft_model_is_left_alone_and_a_fast_one_used():
    for seconds, used in ((0.9, False), (0.05, True)):
        world = World(1, memory_bound, 0.6, Always(on_device=True), seconds)
        await world.run(100)
        rate = await world.run(300)
        assert (rate > 1.3 / memory_bound(1)) == used
        assert rate > 0.95 / memory_bound(1)


async def test_a_draft_model_that_was_slow_once_is_tried_again():
    world = World(1, memory_bound, 0.6, Always(on_device=True), 0.9)
    await world.run(100)
    world.draft_seconds = 0.05
    await world.run(FRESH_STEPS)
    assert await world.run(200) > 1.3 / memory_bound(1)


async def test_nothing_is_drafted_before_the_plain_step_was_measured():
    world = World(1, memory_bound, 0.9)
    for _ in range(MIN_SAMPLES):
        await world.step()
        assert world.drafted == 0
    for _ in range(3):
        await world.step()
    assert world.drafted > 0


async def test_no_draft_reaches_beyond_the_last_token():
    world = World(1, memory_bound, 0.9)
    await world.run(20)
    (seq,) = world.sequences
    seq.request = dataclasses.replace(seq.request, max_tokens=seq.num_output + 3)
    await world.drafter.propose([seq], world.on_device)
    assert seq.draft is not None and len(seq.draft) <= 2
    seq.draft = None
    seq.request = dataclasses.replace(seq.request, max_tokens=seq.num_output + 1)
    await world.drafter.propose([seq], world.on_device)
    assert seq.draft is None and not world.drafter.wants_to_draft()


async def test_a_sequence_that_ends_while_it_is_drafted_for_gets_no_draft():
    world = World(1, memory_bound, 0.9, Always(on_device=True))
    await world.run(20)
    (seq,) = world.sequences

    async def on_device(work):
        seq.finish = "abort"
        return work()

    await world.drafter.propose([seq], on_device)
    assert seq.draft is None


async def test_ended_sequences_are_forgotten():
    world = World(4, memory_bound, 0.9)
    await world.run(20)
    for seq in world.sequences:
        world.drafter.forget(seq)
        world.drafter.forget(seq)
    assert not len(world.drafter._chances) and not world.drafter._live
    assert not world.drafter._offered
    assert not world.drafter.wants_to_draft()


def test_costs_between_measured_sizes_are_interpolated_and_beyond_them_rise_by_half_as_much():
    costs = StepCosts()
    for _ in range(MIN_SAMPLES):
        costs.add(1, 1.0)
    assert costs.seconds(np.array([1, 5])).tolist() == [1.0, 1.0]
    for _ in range(MIN_SAMPLES):
        costs.add(9, 3.0)
    assert costs.seconds(np.array([1, 5, 9, 17])).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert costs.largest_trial == 18


def test_a_step_costs_no_more_than_a_larger_one():
    costs = StepCosts()
    for _ in range(MIN_SAMPLES):
        costs.add(1, 2.0)
        costs.add(4, 1.0)
    assert costs.seconds(np.array([1, 4])).tolist() == [1.0, 1.0]


def test_single_outliers_pass_by_and_changes_are_followed():
    costs = StepCosts()
    costs.add(1, 50.0)  # the first step pays for what is set up
    for _ in range(20):
        costs.add(1, 1.0)
    costs.add(1, 100.0)
    assert costs.seconds(np.array([1]))[0] < 1.2
    for _ in range(60):
        costs.add(1, 3.0)
    assert costs.seconds(np.array([1]))[0] > 2.8


def test_old_measurements_are_made_again():
    costs = StepCosts()
    for _ in range(MIN_SAMPLES):
        costs.add(1, 1.0)
        costs.add(9, 3.0)
    for _ in range(FRESH_STEPS):
        costs.add(2, 1.5)
    assert not costs.knows(9) and costs.knows(2)
    assert costs.seconds(np.array([9]))[0] == 1.5


def test_nobody_is_preempted_for_a_draft():
    driver = Driver(num_blocks=6, block_size=4, budget=32, max_draft=9)

    def params(n):
        return SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True)

    (long,) = driver.add(toy_request("long", [1, 2, 3, 4, 5, 6], params(12)))
    driver.add(toy_request("short", [6, 5, 4, 3, 2, 1], params(4)))

    def on_step(number):
        if number == 2:
            driver.queues.stop(long, "abort")

    def propose(seq):
        # 9 tokens fill the pool; 2 more would need another block.
        return Draft((0,) * (9 if seq is long else 2))

    driver.run(propose=propose, on_step=on_step)
    assert driver.queues.counters.num_preemptions == 0
    assert [[c.num_draft for c in p.chunks] for p in driver.plans[:3]] == [[0, 0], [9, 0], [1]]


@pytest.mark.parametrize("plans_ahead", [True, False])
@pytest.mark.parametrize("batch", [1, 32])
async def test_texts_without_drafts_are_looked_at_seldom_until_a_draft_is_right(batch, plans_ahead):
    class Counting(Always):
        num_looks = 0

        def expects(self, seq):
            self.num_looks += 1
            return 0

    proposer = Counting()
    world = World(batch, memory_bound, 0.0, proposer)
    world.plans_ahead = plans_ahead
    await world.run(100)
    proposer.num_looks = 0
    await world.run(100)
    assert 0 < proposer.num_looks <= 100 * batch / MOST_REST
    proposer.expects = lambda seq: 8  # the texts have become such that there are drafts
    world.chance = 0.9
    await world.run(MOST_REST + 2)
    assert proposer.num_calls > 0
    before = world.num_ahead
    await world.run(20)
    assert world.num_ahead == before


async def test_looks_that_find_what_is_rejected_are_as_vain_as_those_that_find_nothing():
    world = World(1, lambda n: 1 + 0.001 * n, 0.0, Always(match=1))
    await world.run(200)
    before, calls = world.num_ahead, world.drafter._proposer.num_calls
    await world.run(100)
    assert 0 < world.drafter._proposer.num_calls - calls <= 100 / MOST_REST
    assert world.num_ahead - before >= 100 * (1 - 2 / MOST_REST)


async def test_a_draft_after_the_token_in_flight_needs_that_token_to_go_on_with_the_match():
    for match, wanted in ((0, True), (3, False)):
        world = World(1, lambda n: 1 + 0.15 * n, 0.0, Always(match=match))
        drafter = world.drafter
        for size in range(1, 10):
            for _ in range(MIN_SAMPLES):
                drafter._costs.add(size, world.cost(size))
        drafter._chances.of = lambda some, matches, depth: np.full((1, depth), 0.4).cumprod(axis=1)
        assert any(drafter._lengths(world.sequences))
        assert any(drafter._lengths(world.sequences, num_unknown=1)) == wanted
