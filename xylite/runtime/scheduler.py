"""What runs next: sequences and a token budget become the chunks of one iteration.

The rules are XY-Serve's (section 4.1): a fixed budget of tokens per iteration whatever their
origin, a reserve for decode and draft tokens so that the time between tokens is stable, priority
for prefill over the rest so that the first token comes soon, long prompts cut into chunks. Ours:
equal prompts that arrive together compute their common beginning once, drafts shrink first,
preemption by recomputation, ageing so that nothing starves, planning an iteration while another
runs.

No clock, no randomness, no I/O: `now` is passed in, so a run can be replayed exactly.
"""

from collections.abc import Collection

from xylite.runtime.plan import Chunk, Plan
from xylite.runtime.queues import Queues
from xylite.runtime.request import Draft, Request, SamplingParams
from xylite.runtime.sequence import Sequence

AGEING_S = 10.0  # waiting this long is worth one level of priority
NO_PASSING_S = 5.0  # a request that waited this long for memory is not passed by others
# Tokens found in the prefix tree in one iteration: 3 ms of the event loop. Others wait for another.
MAX_MATCHED = 2**18
MAX_TRIES = 8  # waiting requests that are tried for memory in one iteration
LONG_SHARE = 4  # a prompt longer than the budget leaves 1/LONG_SHARE of it to those behind


class Scheduler:
    """Plans iterations from the sequences there are.

    queues        those sequences, and the blocks they take
    budget        tokens per iteration
    max_draft     longest draft, for the decode reserve
    mixed_budget  tokens of an iteration that decodes share with prompts; None = budget
    """

    def __init__(
        self,
        queues: Queues,
        *,
        budget: int,
        max_draft: int = 0,
        mixed_budget: int | None = None,
    ):
        self.queues = queues
        self._blocks = queues.blocks
        self.set_budgets(budget, mixed_budget)
        self.max_draft = max_draft
        self._number = 0

    def set_budgets(self, budget: int, mixed_budget: int | None) -> None:
        """For the plans from now on."""
        self.budget = budget
        self.mixed_budget = budget if mixed_budget is None else min(mixed_budget, budget)

    @staticmethod
    def _rank(seq: Sequence, now: float) -> tuple[int, float, int]:
        """Order of service, best first: priority with ageing, then arrival."""
        aged = seq.request.priority - int((now - seq.arrival) / AGEING_S)
        return (aged, seq.arrival, seq.serial)

    def plan(self, now: float, *, ahead: bool = False) -> Plan | None:
        """The chunks of the next iteration; None if there is nothing to do.

        ahead: another iteration is in flight. Nobody is preempted then, and sequences that are
        known to end with it are left out.
        """
        while (group := self.queues.trials.current()) is not None:
            if ahead:  # if this one fails, it shall be for one reason only
                return None
            plan = self._plan_some(now, False, group)
            if plan is not None:
                return plan
            outsiders = [s for s in self.queues.running if s not in group and not s.num_inflight]
            if not outsiders:
                self.queues.trials.drop()
            for seq in outsiders:
                self.queues.preempt(seq)
        return self._plan_some(now, ahead)

    def _plan_some(
        self, now: float, ahead: bool, only: Collection[Sequence] | None = None
    ) -> Plan | None:
        while True:
            before = self.queues.counters.num_preemptions
            plan = self._plan(now, ahead, only)
            # A sequence that gave way to none but itself leaves room for others.
            if plan is not None or self.queues.counters.num_preemptions == before:
                return plan

    def _plan(self, now: float, ahead: bool, only: Collection[Sequence] | None) -> Plan | None:
        plan = Plan(self._number, [], [], [], [])
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for seq in self.queues.running:
            left = seq.remaining
            if left <= 0 or seq.finish is not None or (only is not None and seq not in only):
                continue
            if left > 1:
                prefills.append(seq)
            elif not (seq.num_pending and seq.num_output + 1 >= seq.request.max_tokens):
                decodes.append(seq)
        if self.queues.free_rows:
            prefills += [s for s in self.queues.waiting if only is None or s in only]
        prefills.sort(key=lambda s: self._rank(s, now))
        share = self._decode_share(decodes, prefills)
        if len(decodes) > min(share, self._blocks.num_free):
            decodes.sort(key=lambda s: (s.last_step, self._rank(s, now)))
        used = self._plan_decodes(plan, decodes, share, now, ahead)
        if used is None:
            return None
        room = self._prefill_room(prefills, used, len(plan.chunks))
        self._plan_prefills(plan, prefills, room, now, ahead)
        if not plan.chunks and share == 0:  # prefill had its turn, and found no blocks
            used = self._plan_decodes(plan, decodes, self.budget, now, ahead)
        if used is None or not plan.chunks:
            return None
        for chunk in plan.chunks:
            seq = chunk.seq
            seq.num_inflight += 1
            seq.last_step = plan.number
            self._blocks.publish(seq, plan.number)
        plan.zero = self._blocks.taken_to_zero()
        self._number += 1
        self.queues.counters.num_steps += 1
        self.queues.counters.step_tokens += plan.num_tokens
        return plan

    def _decode_share(self, decodes: list[Sequence], prefills: list[Sequence]) -> int:
        """Tokens for decode and verify: the reserve at least, and what prefill leaves over."""
        demand = sum(1 + (len(s.draft) if s.draft else 0) for s in decodes)
        if self.budget == 1 and decodes and prefills:
            return self._number % 2  # no room for both: by turns
        reserve = min(self.queues.max_num_seqs * (1 + self.max_draft), (self.budget + 1) // 2)
        prefill_demand = 0
        for seq in prefills:
            prefill_demand += seq.remaining
            if prefill_demand >= self.budget:
                break
        return min(demand, max(reserve, self.budget - prefill_demand))

    def _prefill_room(self, prefills: list[Sequence], used: int, num_decodes: int) -> int:
        """Tokens for prompts beside decodes of `used` tokens.

        Every one of them makes each decode wait, so they fill mixed_budget only, or half of it if
        decodes alone fill it. What waits shall not take more iterations than sequences decode,
        though: the more prompts there are for each decode, the larger their share.
        """
        left = self.budget - used
        if not num_decodes or self.mixed_budget == self.budget:
            return left
        room = max(self.mixed_budget - used, (self.mixed_budget + 1) // 2)
        return min(max(room, sum(s.remaining for s in prefills) // num_decodes), left)

    def _plan_decodes(
        self, plan: Plan, decodes: list[Sequence], share: int, now: float, ahead: bool
    ) -> int | None:
        """Chunks of one token and its draft; how many tokens that are. None: no blocks, not now."""
        turn = decodes[:share]
        spare = share - len(turn)
        used = 0
        needs = [self._missing(s, s.num_planned + 1) for s in turn]  # blocks without drafts
        needed = sum(needs)
        for seq, need in zip(turn, needs, strict=True):
            needed -= need
            if seq.row < 0:  # preempted for one served before it
                continue
            if not need and seq.draft is None:
                self._append(plan, seq, 1, None)
                used += 1
                continue
            draft = self._cut_draft(seq, spare)
            num = 1 + (len(draft) if draft else 0)
            free = self._blocks.num_free - needed
            if draft is not None and self._missing(seq, seq.num_planned + num) > free:
                draft, num = None, 1  # nobody is preempted for the sake of a draft
            while not self._reserve(seq, seq.num_planned + num):
                if ahead:
                    self._undo(plan)
                    return None
                if not self._make_room(seq, plan, now):
                    break
            else:
                self._append(plan, seq, num, draft)
                used += num
                spare -= num - 1
        return used

    @staticmethod
    def _cut_draft(seq: Sequence, spare: int) -> Draft | None:
        """The sequence's draft as far as budget and length limit go."""
        draft, seq.draft = seq.draft, None
        if draft is None or seq.num_pending:
            return None
        n = min(len(draft), spare, seq.max_len - len(seq.tokens) - 1)
        if n <= 0:
            return None
        if n == len(draft):
            return draft
        return Draft(draft.tokens[:n], draft.parents[:n] if draft.parents else None)

    def _make_room(self, seq: Sequence, plan: Plan, now: float) -> bool:
        """Preempt who is to be served last; False if that is `seq` or there is none."""
        planned = {id(c.seq) for c in plan.chunks}
        candidates = [s for s in self.queues.running if id(s) not in planned and not s.num_inflight]
        victim = max(candidates, key=lambda s: self._rank(s, now), default=seq)
        if victim is not seq:
            self.queues.preempt(victim)
            return True
        if len(self.queues.running) > 1:
            self.queues.preempt(seq)
        return False

    def _missing(self, seq: Sequence, length: int) -> int:
        """Blocks that the sequence lacks for `length` tokens."""
        return max(0, -(-length // self._blocks.block_size) - len(seq.blocks))

    def _reserve(self, seq: Sequence, length: int) -> bool:
        """Blocks for `length` tokens; False if there are not enough."""
        missing = self._missing(seq, length)
        if not missing:
            return True
        taken = self._blocks.take(missing)
        if taken is None:
            return False
        seq.blocks += taken
        return True

    def _append(self, plan: Plan, seq: Sequence, num: int, draft: Draft | None) -> None:
        start = seq.num_planned
        known_end = start + num - (len(draft) if draft else 0)
        samples = known_end == len(seq.tokens) + seq.num_pending and seq.request.max_tokens > 0
        plan.chunks.append(Chunk(seq, start, num, draft, samples, seq.epoch))
        seq.num_planned = known_end
        seq.num_pending = int(samples)

    def _undo(self, plan: Plan) -> None:
        """Take back chunks of one token planned in vain; the blocks they took stay with them."""
        for chunk in plan.chunks:
            seq = chunk.seq
            seq.num_planned = chunk.start
            seq.num_pending = int(chunk.start == len(seq.tokens))

    def _plan_prefills(
        self, plan: Plan, prefills: list[Sequence], budget: int, now: float, ahead: bool
    ) -> None:
        """Chunks of prompts, and of sequences that compute again after a preemption."""
        full = budget
        curbed: Chunk | None = None
        queues = self.queues
        claimed = (
            sum(map(self._claim, queues.running)) if queues.waiting and queues.free_rows else 0
        )
        tries, matched = MAX_TRIES, 0
        for i, seq in enumerate(prefills):
            if budget <= 0 or (matched > MAX_MATCHED and plan.chunks):
                break
            if seq.finish is not None:
                continue
            if seq.row < 0:
                if tries <= 0 or not self._admit(plan, seq, claimed):
                    tries = 0 if now - seq.arrival > NO_PASSING_S else tries - 1
                    continue
                claimed += self._claim(seq)
            claimed -= self._claim(seq)
            num_copies, known = len(plan.copies), seq.num_planned
            self._match(plan, seq)
            matched += seq.num_planned - known
            want = min(seq.remaining, budget)
            is_curbed = budget == full and want < seq.remaining and i + 1 < len(prefills)
            if is_curbed:
                want = max(budget - full // LONG_SHARE, 1)
            if budget < full and self._leaves_to_others(seq, want):
                claimed += self._claim(seq)
                continue
            want = self._whole_blocks(seq, want, alone=len(prefills) == 1)
            num = self._fit(seq, want)
            while num == 0 and not plan.chunks and not ahead and self._make_room(seq, plan, now):
                num = self._fit(seq, want)
            if num == 0:
                tries = 0
                if seq.row < 0:  # preempted itself: nobody owns the copies' destinations
                    del plan.copies[num_copies:]
                continue
            self._append(plan, seq, num, None)
            self._blocks.publish(seq, plan.number)
            claimed += self._claim(seq)
            budget -= num
            curbed = plan.chunks[-1] if is_curbed else curbed
        if curbed is not None and budget > 0:
            self._lengthen(plan, curbed, budget)

    def _lengthen(self, plan: Plan, chunk: Chunk, budget: int) -> None:
        """Let a chunk that left tokens to those behind have the `budget` that they did not take."""
        seq = chunk.seq
        plan.chunks.remove(chunk)
        seq.num_planned = chunk.start
        want = self._whole_blocks(seq, min(chunk.num + budget, seq.remaining), alone=False)
        self._append(plan, seq, self._fit(seq, max(want, chunk.num)), None)
        self._blocks.publish(seq, plan.number)

    def _whole_blocks(self, seq: Sequence, num: int, *, alone: bool) -> int:
        """`num` cut to a block's end where that costs little: others can use whole blocks only."""
        if num >= seq.remaining:
            return num
        size = self._blocks.block_size
        whole = (seq.num_planned + num) // size * size - seq.num_planned
        worth = whole > 0 and (num - whole) * (8 if alone else 2) <= num
        return whole if worth else num

    def _leaves_to_others(self, seq: Sequence, num: int) -> bool:
        """`num` tokens do not fill the sequence's next block, and others on its path, one of whom
        was planned before it, are about to compute the same block."""
        fills = num >= min(seq.remaining, self._blocks.block_size)
        return not fills and self._blocks.is_shared(seq)

    def _fit(self, seq: Sequence, num: int) -> int:
        """`num` cut to the blocks there are, which are taken."""
        end = seq.num_planned + num
        if not self._reserve(seq, end):
            end = min(end, (len(seq.blocks) + self._blocks.num_free) * self._blocks.block_size)
            if end <= seq.num_planned or not self._reserve(seq, end):
                return 0
        return end - seq.num_planned

    def _claim(self, seq: Sequence) -> int:
        """Blocks that a running sequence will take before long."""
        if seq.remaining <= 1:
            return 1
        return self._missing(seq, len(seq.tokens))

    def _admit(self, plan: Plan, seq: Sequence, claimed: int) -> bool:
        """Give a waiting sequence a row if its tokens so far can be expected to fit beside the
        blocks that running ones have claimed."""
        if not self.queues.free_rows:
            return False
        if self.queues.running:
            free = self._blocks.num_free
            need = -(-len(seq.tokens) // self._blocks.block_size) + 1 + claimed
            if need > free and not seq.wants_prompt_logprobs:  # they share no blocks
                need -= self._blocks.held(seq)
            if need > free:
                return False
        self.queues.admit(seq)
        plan.admitted.append(seq)
        return True

    def _match(self, plan: Plan, seq: Sequence) -> None:
        """Share or copy what the prefix tree holds of the tokens to come."""
        before = seq.num_planned
        if not seq.wants_prompt_logprobs:
            self._blocks.extend(seq)
            copy = self._blocks.partial(seq)
            if copy is not None:
                plan.copies.append(copy)
        saved = seq.num_planned - before
        if seq.epoch:
            return  # what it finds again is its own
        if seq.num_cached < 0:
            seq.num_cached = 0
            self.queues.counters.prefix_queries += seq.num_prompt
            self.queues.counters.prompt_tokens += seq.num_prompt
        seq.num_cached += saved
        self.queues.counters.prefix_hits += saved
        self.queues.counters.prompt_tokens_cached += saved

    def probe(self, now: float) -> Plan | None:
        """An iteration of one token that nobody asked for, to see whether the device can run any;
        None if there is no room for it. Not to be committed: see `end_probe`."""
        if not self.queues.free_rows or not self._blocks.num_free:
            return None
        params = SamplingParams(max_tokens=1, temperature=0.0)
        request = Request(
            id="probe", prompt=(0,), params=params, max_tokens=1, end_tokens=frozenset(), seed=0
        )
        seq = Sequence(request, 0, now)
        self.queues.waiting.append(seq)
        self.queues.admit(seq)
        self._reserve(seq, 1)
        plan = Plan(self._number, [], [], self._blocks.taken_to_zero(), [seq])
        self._append(plan, seq, 1, None)
        seq.num_inflight, seq.finish = 1, "stop"
        self._number += 1
        return plan

    def end_probe(self, plan: Plan) -> None:
        """Take back what the probe held."""
        (chunk,) = plan.chunks
        chunk.seq.num_inflight = 0
        chunk.seq.poisoned = True
        self.queues.leave(chunk.seq)
