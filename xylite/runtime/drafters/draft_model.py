"""A smaller model of the same vocabulary drafts: batched over sequences, with KV blocks of its own.

It runs on the device thread between two iterations. Each sequence has a shadow: the same request
with the same seed, so the draft model draws with the uniforms that the target will draw with, which
makes the two agree as often as their distributions allow. A shadow's KV follows the target's
tokens; what was drafted in vain is written over.

Drafts are accepted while they equal what the target draws, which keeps every answer the same as
without. Classical residual rejection (Leviathan et al. 2023) is not offered: it accepts more at
temperature > 0, but an answer then depends on what was drafted, so on load and batch. What that
costs, for SmolLM2-135M at temperature 1, in shares of draft tokens accepted over 480 positions of
six sampled texts, here and by residual rejection, by bench/acceptance.py:

    draft                               here   residual
    the same, 8-bit weights             0.80   0.98
    the same, 4-bit weights             0.39   0.66
    its first 28 of 30 layers           0.33   0.44

With top_k 50 and top_p 0.95 it is 0.89 to 0.98, 0.45 to 0.66 and 0.36 to 0.45; at temperature 0
both are the same. The loss comes from drawing by cumulated probability in id order, where small
differences add up; Gumbel noise of (seed, token index, id) would keep the answers and lose little
(0.98, 0.61, 0.42).
"""

import dataclasses
from collections import deque
from dataclasses import dataclass

import numpy as np

from xylite.errors import EngineError
from xylite.runtime.blocks import KVBlocks
from xylite.runtime.drafters import DraftOptions
from xylite.runtime.executor import Executor
from xylite.runtime.masks import fill_masks
from xylite.runtime.plan import Chunk, Plan
from xylite.runtime.request import Draft
from xylite.runtime.sequence import Sequence
from xylite.runtime.token_table import Tabulator


@dataclass(frozen=True, slots=True, eq=False)
class DraftParts:
    """What the draft model runs on.

    budget        tokens per forward pass
    max_num_seqs  sequences it follows at once
    max_len       longest sequence it can follow
    num_words     int32 words of a mask row
    """

    executor: Executor
    tabulator: Tabulator
    blocks: KVBlocks
    budget: int
    max_num_seqs: int
    max_len: int
    num_words: int


class _Shadow:
    """A sequence as the draft model sees it.

    known  its first tokens that are the target's; those after were drafted
    used   number of the call that last needed it
    """

    __slots__ = ("known", "seq", "used")

    def __init__(self, target: Sequence):
        params = dataclasses.replace(
            target.request.params,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            logprobs=None,
            prompt_logprobs=None,
        )
        request = dataclasses.replace(target.request, params=params, constraint=None)
        self.seq = Sequence(request, target.index, 0.0)
        self.known = 0
        self.used = 0

    def sync(self, target: Sequence) -> None:
        """Take over the target's tokens; KV stays valid as far as the drafted ones were right."""
        seq, tokens = self.seq, target.tokens
        same = self.known
        while same < min(len(seq.tokens), len(tokens)) and seq.tokens[same] == tokens[same]:
            same += 1
        seq.tokens[same:] = tokens[same:]
        seq.num_computed = seq.num_planned = min(seq.num_computed, same, len(tokens) - 1)
        self.known = len(tokens)


class DraftModel:
    """Drafts chains with a model. Penalties and constraints are left to the target."""

    on_device = True

    def __init__(self, parts: DraftParts, num_tokens: int):
        self.blocks = parts.blocks
        self._parts = parts
        self._num_tokens = num_tokens
        self._shadows: dict[Sequence, _Shadow] = {}
        self._rows = list(range(parts.max_num_seqs - 1, -1, -1))
        self._number = 0
        self._call = 0
        self._admitted: list[Sequence] = []
        self._ended: deque[Sequence] = deque()

    def begin_iteration(self) -> None:
        """Nothing is learnt on the event loop."""

    def expects(self, seq: Sequence) -> int:
        return max(0, min(self._num_tokens, self._parts.max_len - len(seq.tokens)))

    def match(self, seq: Sequence) -> int:
        return 0

    def forget(self, seq: Sequence) -> None:
        # On the event loop, perhaps while the device thread drafts: done at the next proposal.
        self._ended.append(seq)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft | None]:
        self._call += 1
        for target, _ in wanted:
            shadow = self._shadows.get(target)
            if shadow is None:
                shadow = self._shadows[target] = _Shadow(target)
            shadow.sync(target)
            shadow.used = self._call
        while self._ended:  # not before: one may be among those wanted
            self._release(self._ended.popleft())
        drafting = self._catch_up([(t, n) for t, n in wanted if t in self._shadows])
        for depth in range(1, max((n for _, n in drafting), default=0)):
            going = [s for s, n in drafting if n > depth and not self._ends(s)]
            if not going:
                break
            plan = self._plan()
            plan.chunks = [self._chunk(s, len(s.seq.tokens)) for s in going]
            self._execute(plan)
        shadows = {id(s) for s, _ in drafting}
        return [self._draft(self._shadows.get(target), shadows) for target, _ in wanted]

    @staticmethod
    def _draft(shadow: _Shadow | None, drafting: set[int]) -> Draft | None:
        if shadow is None or id(shadow) not in drafting:
            return None
        return Draft(tuple(shadow.seq.tokens[shadow.known :]))

    @staticmethod
    def _ends(shadow: _Shadow) -> bool:
        request = shadow.seq.request
        last = shadow.seq.tokens[-1]
        return last in request.end_tokens or last in request.params.stop_token_ids

    # Following the target

    def _catch_up(self, wanted: list[tuple[Sequence, int]]) -> list[tuple[_Shadow, int]]:
        """One pass over tokens that the draft model has not seen, within its budget.

        Returns the shadows that drew their first draft token in it, and how many they want. Long
        prompts take several calls, so that no iteration waits for one.
        """
        plan = self._plan()
        left = self._parts.budget
        drafting: list[tuple[_Shadow, int]] = []
        order = sorted(wanted, key=lambda w: self._remaining(w[0]))
        for target, n in order:
            if left <= 0:
                break
            shadow = self._shadows[target]
            seq = shadow.seq
            if not self._admit(shadow):
                continue
            self.blocks.extend(seq)
            copy = self.blocks.partial(seq)
            num = min(seq.remaining, left)
            ends = num == seq.remaining
            end = seq.num_planned + num
            if not self._reserve(shadow, end + n - 1 if ends else end):
                continue  # `sync` takes back what was matched, and it is computed instead
            if copy is not None:
                plan.copies.append(copy)
            left -= num
            plan.chunks.append(self._chunk(shadow, end))
            self.blocks.publish(seq, plan.number)
            if ends:
                drafting.append((shadow, n))
        if plan.chunks:
            self._execute(plan)
        return drafting

    def _remaining(self, target: Sequence) -> int:
        return self._shadows[target].seq.remaining

    def _admit(self, shadow: _Shadow) -> bool:
        """Give a shadow a row and a place in the prefix tree if it has none."""
        seq = shadow.seq
        if seq.row >= 0:
            return True
        if not self._rows and not self._release_oldest():
            return False
        seq.row = self._rows.pop()
        self.blocks.attach(seq)
        self._admitted.append(seq)
        return True

    def _reserve(self, shadow: _Shadow, length: int) -> bool:
        """Blocks for `length` tokens, taken from sequences that draft nothing now if needed."""
        seq = shadow.seq
        missing = -(-length // self.blocks.block_size) - len(seq.blocks)
        while missing > 0:
            taken = self.blocks.take(missing)
            if taken is not None:
                seq.blocks += taken
                break
            if not self._release_oldest():
                return False
        return True

    def _release_oldest(self) -> bool:
        """Let go of the shadow unused for longest; False if all are needed now."""
        idle = [t for t, s in self._shadows.items() if s.used < self._call and s.seq.row >= 0]
        if not idle:
            return False
        self._release(min(idle, key=lambda t: self._shadows[t].used))
        return True

    def _release(self, target: Sequence) -> None:
        shadow = self._shadows.pop(target, None)
        if shadow is not None and shadow.seq.row >= 0:
            self._rows.append(shadow.seq.row)
            self.blocks.release(shadow.seq)

    # Running

    def _plan(self) -> Plan:
        self._number += 1
        return Plan(self._number, [], [], [], [])

    @staticmethod
    def _chunk(shadow: _Shadow, end: int) -> Chunk:
        """The shadow's tokens that are not computed, up to `end`; draws if that is all of them."""
        seq = shadow.seq
        start = seq.num_planned
        seq.num_planned = end
        return Chunk(seq, start, end - start, None, end == len(seq.tokens), seq.epoch)

    def _execute(self, plan: Plan) -> None:
        """Run the chunks; those that draw get their token appended."""
        plan.admitted, self._admitted = self._admitted, []
        step = self._parts.tabulator.build(plan)
        mask = None
        if step.num_mask_rows:
            mask = np.empty((step.num_mask_rows, self._parts.num_words), np.int32)
            fill_masks(plan, mask)
        result = self._parts.executor.run(step, mask)
        if not result.finite.all():
            raise EngineError("the draft model produced numbers that are not finite")
        self.blocks.commit(plan.number)
        ids = iter(result.ids.tolist())
        for chunk in plan.chunks:
            chunk.seq.num_computed = chunk.start + chunk.num
            if chunk.samples:
                chunk.seq.tokens.append(next(ids))


def make(options: DraftOptions) -> DraftModel:
    assert isinstance(options.parts, DraftParts)
    return DraftModel(options.parts, options.num_tokens)
