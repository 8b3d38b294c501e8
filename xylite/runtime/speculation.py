"""How much is drafted: stands between the engine and a drafter.

Every draft token costs device time and is accepted with some chance. Both are learnt: chances per
sequence from what was accepted, costs from how long iterations of each size took. Drafts are made
as long as the tokens expected per second grow with them, so they shrink as the batch grows and
stop when it is compute bound, or when a text is not predictable. Source of the idea: Liu et al.,
Optimizing Speculative Decoding for Serving Large Language Models Using Goodput, 2024.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from xylite import plugins
from xylite.config import SpeculativeConfig
from xylite.runtime.chances import Chances
from xylite.runtime.drafters import DraftOptions, Proposer
from xylite.runtime.interfaces import OnDevice
from xylite.runtime.plan import Chunk, Plan
from xylite.runtime.request import Draft
from xylite.runtime.sequence import Sequence

FRESH_STEPS = 512  # a measurement older than this is made again
MIN_SAMPLES = 3  # fewer say nothing: the first ones may pay for what is set up on first use
BEYOND = 0.5  # cost of a token beyond the sizes measured, of that of the last ones measured
MIN_GAIN = 1.05  # expected speed-up below which drafting is left alone

# To look for drafts takes time, and an iteration that waits for one is not planned ahead. After so
# many looks in a row in vain, that found nothing or nothing that was accepted, there is a rest
# before the next one, an iteration longer after each, up to MOST_REST.
VAIN_LOOKS = 16
MOST_REST = 8

ONSET_RATE = 0.1
YIELD_MEMORY = 0.995
YIELD_PRIOR = 20.0
YIELD_RANGE = (0.5, 1.2)  # trees have fewer levels than tokens, so less is accepted than of chains


class _Mean:
    """A running mean that follows changes and lets single outliers pass by."""

    __slots__ = ("_num", "_value")

    def __init__(self) -> None:
        self._value = 0.0
        self._num = 0

    def add(self, x: float) -> None:
        self._num += 1
        if self._num <= MIN_SAMPLES:
            self._value = x if self._num == 1 else min(self._value, x)
        else:
            rate = 0.3 if x < self._value else 0.1
            self._value += rate * (min(x, 2 * self._value) - self._value)

    @property
    def is_known(self) -> bool:
        return self._num >= MIN_SAMPLES

    @property
    def value(self) -> float:
        """0 until it is known: what was not tried is taken to be free, and so is tried."""
        return self._value if self.is_known else 0.0


class StepCosts:
    """Seconds of an iteration of decode and verify chunks, by its number of tokens.

    Sizes that were not measured lately are taken from their neighbours. Beyond the largest measured
    size a token is taken to cost half of what the last ones did: so new sizes are tried, but not
    where the device was found to be compute bound.
    """

    def __init__(self) -> None:
        self._means: dict[int, _Mean] = {}
        self._measured: dict[int, int] = {}
        self._step = 0
        self._curve: tuple[np.ndarray, np.ndarray] | None = None

    @staticmethod
    def _size(num_tokens: int) -> int:
        """The size a number of tokens counts as: itself up to 16, then an eighth of an octave."""
        shift = max(num_tokens.bit_length() - 5, 0)
        return num_tokens >> shift << shift

    def add(self, num_tokens: int, seconds: float) -> None:
        self._step += 1
        size = self._size(num_tokens)
        if not self._is_fresh(size):
            self._means[size] = _Mean()
        self._means[size].add(seconds)
        self._measured[size] = self._step
        self._curve = None

    def _is_fresh(self, size: int) -> bool:
        return self._step - self._measured.get(size, -FRESH_STEPS) < FRESH_STEPS

    def knows(self, num_tokens: int) -> bool:
        """This size was measured, lately and more than once."""
        size = self._size(num_tokens)
        return self._is_fresh(size) and self._means[size].is_known

    def _known(self) -> tuple[np.ndarray, np.ndarray]:
        if self._curve is None:
            sizes = sorted(s for s in self._means if self.knows(s))
            values = np.array([self._means[s].value for s in sizes])
            # Others on the machine make steps longer, never shorter: a smaller one is no dearer.
            self._curve = np.array(sizes), np.minimum.accumulate(values[::-1])[::-1]
        return self._curve

    def seconds(self, num_tokens: np.ndarray) -> np.ndarray:
        """Estimates for several sizes, some size being known."""
        sizes, values = self._known()
        inside = np.interp(num_tokens, sizes, values)
        if len(sizes) < 2:
            return inside
        slope = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
        return inside + BEYOND * slope * np.maximum(num_tokens - sizes[-1], 0)

    def plain(self, batch: int) -> float:
        return float(self.seconds(np.array([batch]))[0]) if self.knows(batch) else 0.0

    @property
    def largest_trial(self) -> int:
        """The largest size worth trying: twice what is known, as beyond it nothing is."""
        return max(2 * int(self._known()[0][-1]), 8)


class Speculation:
    """A drafter as the engine wants it.

    max_draft  longest draft in tokens
    clock      seconds, the engine's
    """

    def __init__(self, proposer: Proposer, max_draft: int, clock: Callable[[], float]):
        self.max_draft = max_draft
        self._proposer = proposer
        self._clock = clock
        self._chances = Chances()
        self._live: dict[Sequence, None] = {}
        self._onset = 0.0  # how often an iteration without drafts leads to one with drafts
        self._after_plain = False
        self._worth = 0.0  # of the lengths last chosen: iterations saved, at most one
        self._vain_looks = 0  # in a row
        self._num_plain = 0  # iterations without drafts so far
        self._next_look = 0  # after so many of them
        self._costs = StepCosts()
        self._forget_draft_costs()
        self._outcome = [YIELD_PRIOR, YIELD_PRIOR]  # draft tokens accepted, and expected to be
        self._offered: dict[Sequence, tuple[int, float]] = {}  # match and tokens expected of drafts
        self._propose_seconds = 0.0
        self._drafted: set[Sequence] = set()  # those the proposer on the device knows

    def _forget_draft_costs(self) -> None:
        self._gap = _Mean()  # seconds lost because a step with drafts cannot be planned ahead
        self._draft_cost = _Mean()  # seconds of drafting per token of depth, on the device
        self._steps_without = 0

    def wants_to_draft(self) -> bool:
        """Drafting would pay now, as far as the tokens known so far tell, or is likely to after the
        token that is being computed. To be asked once per iteration."""
        num_plain = self._num_plain + 1  # with the iteration that runs
        if num_plain < self._next_look:
            return False
        self._next_look = 0
        live = [s for s in self._live if s.row >= 0]
        drafts = any(self._lengths(live, num_unknown=1))
        self._note_onset()
        if drafts:
            return True
        self._look_was_vain(num_plain)
        if self._next_look:
            return False
        # A draft that is missed is an iteration more for one sequence.
        if not any(s.finish is None and s.max_len - len(s.tokens) > 2 for s in live):
            return False
        return self._onset * self._costs.plain(len(live)) / len(live) > self._gap.value > 0.0

    def _look_was_vain(self, num_plain: int) -> None:
        self._vain_looks += 1
        rest = min(max(self._vain_looks - VAIN_LOOKS, 0), MOST_REST)
        if rest:
            self._next_look = num_plain + 1 + rest

    def _note_onset(self) -> None:
        self._onset += ONSET_RATE * (self._worth - self._onset)

    def forget(self, seq: Sequence) -> None:
        self._chances.forget(seq)
        self._live.pop(seq, None)
        self._offered.pop(seq, None)
        if seq in self._drafted or not self._proposer.on_device:
            self._proposer.forget(seq)
        self._drafted.discard(seq)

    async def propose(self, sequences: list[Sequence], on_device: OnDevice) -> None:
        """Set `draft` of those sequences for which one pays; on_device runs on its thread."""
        self._propose_seconds = 0.0
        if self._num_plain < self._next_look:
            return
        self._live.update(dict.fromkeys(sequences))
        lengths = self._lengths(sequences)
        if self._after_plain:
            self._note_onset()
        wanted = [(s, n) for s, n in zip(sequences, lengths, strict=True) if n]
        if not wanted:
            self._look_was_vain(self._num_plain)
            return
        if self._proposer.on_device:
            self._drafted.update(s for s, _ in wanted)
        work = partial(self._proposer.propose, wanted)
        start = self._clock()
        drafts: list[Draft | None] = await on_device(work) if self._proposer.on_device else work()
        self._propose_seconds = self._clock() - start
        depths = [_depth(d) for d in drafts if d is not None]
        if depths and self._proposer.on_device:
            self._draft_cost.add(self._propose_seconds / max(depths))
        drafted = [
            (s, d) for (s, _), d in zip(wanted, drafts, strict=True) if d and s.finish is None
        ]
        if not drafted:
            self._look_was_vain(self._num_plain)
            return
        some, longest = [s for s, _ in drafted], max(len(d) for _, d in drafted)
        matches = np.array([self._proposer.match(s) for s in some])
        chances = self._chances.of(some, matches, longest)
        for (seq, draft), match, p in zip(drafted, matches.tolist(), chances, strict=True):
            seq.draft = draft
            self._offered[seq] = match, float(p[: len(draft)].sum())

    def _lengths(self, sequences: list[Sequence], num_unknown: int = 0) -> list[int]:
        """Draft tokens to ask for, per sequence: as many as raise the tokens per second.

        num_unknown  1 if they will be asked for after a token that is still being computed
        """
        batch = len(sequences)
        lengths = [0] * batch
        self._worth = 0.0
        if not batch or not self._costs.knows(batch):
            return lengths  # what no draft costs is measured first
        most = [self._most(s) for s in sequences]
        depth = max(most)
        if depth <= 0:
            return lengths
        able = [i for i, n in enumerate(most) if n > 0]
        some = [sequences[i] for i in able]
        matches = np.array([self._proposer.match(s) for s in some])
        chances = self._chances.of(some, matches, depth + num_unknown)
        # Matches go on only if that token is what they expect.
        chances = np.where(matches[:, None] > 0, chances[:, num_unknown:], chances[:, :depth])
        chances[np.arange(depth) >= np.array([most[i] for i in able])[:, None]] = 0.0
        # Depth by depth: of equally likely tokens the first ones come first.
        offers = chances.T.ravel()
        order = np.argsort(-offers, kind="stable")
        order = order[: min(max(self._costs.largest_trial - batch, 0), int((offers > 0).sum()))]
        best = order[: self._best_number(batch, offers[order], order // len(able) + 1)]
        for i, n in enumerate(np.bincount(best % len(able), minlength=len(able)).tolist()):
            lengths[able[i]] = n
        return lengths

    def _most(self, seq: Sequence) -> int:
        """The longest draft there can be for a sequence."""
        if seq.finish is not None:
            return 0
        room = seq.max_len - len(seq.tokens) - 1
        return min(self._proposer.expects(seq), room, self.max_draft) if room > 0 else 0

    def _best_number(self, batch: int, chances: np.ndarray, depths: np.ndarray) -> int:
        """How many of the offered tokens, best first, give the most tokens per second."""
        num = len(chances)
        if not num:
            return 0
        accepted, expected = self._outcome
        gain = min(max(accepted / expected, YIELD_RANGE[0]), YIELD_RANGE[1]) * chances.cumsum()
        seconds = self._costs.seconds(batch + np.arange(num + 1))
        drafting = self._gap.value + self._draft_cost.value * np.maximum.accumulate(depths)
        rate = (batch + gain) / (seconds[1:] + drafting)
        best = int(rate.argmax())
        speedup = float(rate[best] * seconds[0] / batch)
        if speedup <= MIN_GAIN:
            return 0
        self._worth = min(speedup - 1.0, 1.0)
        return best + 1

    def observe(self, plan: Plan, seconds: float, gap: float) -> None:
        """Learn from a committed iteration.

        seconds  the device took for it
        gap      the device waited before it, because it could not be planned ahead
        """
        self._proposer.begin_iteration()
        num_tokens, num_draft = plan.num_tokens, sum(c.num_draft for c in plan.chunks)
        if num_tokens - num_draft == len(plan.chunks):  # no prompts
            self._costs.add(num_tokens, seconds)
        self._after_plain = not num_draft
        if num_draft:
            self._gap.add(max(gap - self._propose_seconds, 0.0))
            self._steps_without = 0
        else:
            self._num_plain += 1
            self._steps_without += 1
            self._outcome = [x + 0.02 * (YIELD_PRIOR - x) for x in self._outcome]
            if self._steps_without >= FRESH_STEPS:
                self._forget_draft_costs()
        sampling = [c for c in plan.chunks if c.samples and c.seq.finish is None]
        self._live.update([(c.seq, None) for c in sampling])
        if num_draft:
            self._learn(sampling)
        self._chances.end_iteration()

    def _learn(self, sampling: list[Chunk]) -> None:
        """From the drafts that were verified."""
        verified: list[tuple[Sequence, int, int]] = []  # draft tokens accepted, and tried
        for c in sampling:
            new = len(c.seq.tokens) - (c.start + c.num - c.num_draft)
            if c.draft is not None and new > 0:
                verified.append((c.seq, new - 1, min(new, _depth(c.draft))))
        if not verified:
            return
        sequences, num_accepted, num_tried = zip(*verified, strict=True)
        offered = [self._offered.pop(s, (0, 0.0)) for s in sequences]
        matches = np.array([match for match, _ in offered])
        self._chances.verified(sequences, matches, np.array(num_accepted), np.array(num_tried))
        if any(num_accepted):
            self._vain_looks = 0
        else:  # the next iteration is not planned ahead anyway, and is no rest
            self._look_was_vain(self._num_plain + 1)
        accepted, expected = self._outcome
        for (_, hoped), num in zip(offered, num_accepted, strict=True):
            accepted = YIELD_MEMORY * accepted + num
            expected = YIELD_MEMORY * expected + hoped
        self._outcome = [accepted, expected]


def _depth(draft: Draft) -> int:
    """Most draft tokens that can be accepted."""
    if draft.parents is None:
        return len(draft)
    depth: list[int] = []
    for up in draft.parents:
        depth.append(1 if up < 0 else depth[up] + 1)
    return max(depth)


def make(config: SpeculativeConfig, clock: Callable[[], float], parts: Any = None) -> Speculation:
    """The drafter that settings completed by `speculative` name.

    parts  what draft_model runs on
    """
    c = config
    cached, factor = c.suffix_decoding_max_cached_requests, c.suffix_decoding_max_spec_factor
    prob, method, num_tokens = c.suffix_decoding_min_token_prob, c.method, c.num_speculative_tokens
    low, high = c.prompt_lookup_min, c.prompt_lookup_max
    assert method is not None and num_tokens is not None and low is not None and high is not None
    assert cached is not None and factor is not None and prob is not None, "not from speculative()"
    options = DraftOptions(
        num_tokens=num_tokens,
        lookup_min=low,
        lookup_max=high,
        max_cached_requests=cached,
        max_spec_factor=factor,
        min_token_prob=prob,
        parts=parts,
    )
    proposer = plugins.find("runtime.drafters", method).make(options)
    return Speculation(proposer, options.num_tokens, clock)
