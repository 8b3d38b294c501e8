"""What runs next: sequences and a token budget become the chunks of one iteration.

The rules are XY-Serve's (section 4.1): a fixed budget of tokens per iteration whatever their
origin, a reserve for decode and draft tokens so that the time between tokens is stable, priority
for prefill over the rest so that the first token comes soon, long prompts cut into chunks. Ours:
equal prompts that arrive together compute their common beginning once, drafts shrink first,
preemption by recomputation, ageing so that nothing starves, planning an iteration while another
runs.

No clock, no randomness, no I/O: `now` is passed in, so a run can be replayed exactly.
"""

from dataclasses import dataclass, field

from xylite.errors import EngineError, Overloaded, RequestError, XyliteError
from xylite.runtime.blocks import Copy, KVBlocks
from xylite.runtime.request import Draft, FinishReason, Request, TokenEvent, TokenLogprob
from xylite.runtime.sequence import Sequence
from xylite.runtime.step import LogprobRows, StepResult

AGEING_S = 10.0  # waiting this long is worth one level of priority
NO_PASSING_S = 5.0  # a request that waited this long for memory is not passed by others
MAX_TRIES = 8  # waiting requests that are tried for memory in one iteration
LONG_SHARE = 4  # a prompt longer than the budget leaves 1/LONG_SHARE of it to those behind


@dataclass(slots=True)
class Chunk:
    """The tokens of one sequence that run in one iteration: tokens [start, start + num), of which
    the last len(draft) are draft tokens. `samples`: the token after it is drawn in this step."""

    seq: Sequence
    start: int
    num: int
    draft: Draft | None
    samples: bool
    epoch: int

    @property
    def num_draft(self) -> int:
        return 0 if self.draft is None else len(self.draft)

    @property
    def num_prompt_rows(self) -> int:
        """Tokens of the chunk whose prediction is scored against the next prompt token."""
        if not self.seq.wants_prompt_logprobs:
            return 0
        return max(0, min(self.start + self.num, self.seq.num_prompt - 1) - self.start)


@dataclass(slots=True)
class Plan:
    """One iteration as decided: chunks in token-table order, and what happens to blocks first.

    admitted  sequences that got a row with this plan: their row state must be set up
    """

    number: int
    chunks: list[Chunk]
    copies: list[Copy]
    zero: list[int]
    admitted: list[Sequence]

    @property
    def num_tokens(self) -> int:
        return sum(c.num for c in self.chunks)

    @property
    def has_drafts(self) -> bool:
        return any(c.draft is not None for c in self.chunks)


@dataclass(slots=True)
class Counters:
    """What happened since the start. Tokens of prompts count once, when first computed or found."""

    num_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    spec_num_drafts: int = 0
    spec_num_draft_tokens: int = 0
    spec_num_accepted_tokens: int = 0
    spec_accepted_per_pos: list[int] = field(default_factory=list[int])
    corrupted: int = 0
    step_tokens: int = 0


Outcome = tuple[Sequence, TokenEvent]


class Scheduler:
    """Sequences that wait, those that run, and the plan of each iteration.

    budget        tokens per iteration
    max_num_seqs  sequences that run at once (rows)
    max_queued    sequences that may wait beyond them
    max_draft     longest draft, for the decode reserve
    """

    def __init__(
        self,
        blocks: KVBlocks,
        *,
        budget: int,
        max_num_seqs: int,
        max_queued: int,
        max_draft: int = 0,
    ):
        self.blocks = blocks
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self.max_queued = max_queued
        self.max_draft = max_draft
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.counters = Counters()
        self._rows = list(range(max_num_seqs - 1, -1, -1))
        self._number = 0
        self._serial = 0

    # Coming and going

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def require_room(self, n: int) -> None:
        """Overloaded unless n more sequences may run or wait; RequestError if they never may."""
        limit = self.max_num_seqs + self.max_queued
        if n > limit:
            raise RequestError(
                f"this request makes {n} sequences, this server takes at most {limit} at a time",
                param="n",
            )
        if n > limit - self.num_unfinished:
            raise Overloaded(
                f"the server is full: {self.num_unfinished} sequences are running or waiting, the "
                f"limit is {limit}, and this request needs {n}"
            )

    def add(self, request: Request, now: float) -> list[Sequence]:
        """Queue a request's sequences; Overloaded if they do not fit into the queue."""
        n = request.params.n
        self.require_room(n)
        new = [Sequence(request, i, now, self._serial + i) for i in range(n)]
        self._serial += n
        self.waiting += new
        return new

    def stop(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence now, whatever it is doing; its blocks come back when no step uses them."""
        if seq.finish is None:
            seq.finish = reason
            self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        """Let go of a finished sequence, unless a step in flight still holds its blocks."""
        if seq.row < 0:
            if seq in self.waiting:
                self.waiting.remove(seq)
        elif not seq.num_inflight:
            self._give_back(seq)
            self.running.remove(seq)

    def _give_back(self, seq: Sequence) -> None:
        """Blocks and row return; the sequence starts over when planned again."""
        self.blocks.release(seq)
        self._rows.append(seq.row)
        seq.row = -1
        seq.num_computed = seq.num_planned = seq.num_pending = 0
        seq.draft = None
        seq.epoch += 1

    def _requeue(self, seq: Sequence, *, poisoned: bool = False) -> None:
        """Start over later. poisoned: a step has written to its blocks what nobody may read."""
        seq.poisoned = poisoned
        self._give_back(seq)
        seq.poisoned = False
        self.running.remove(seq)
        self.waiting.append(seq)

    def _preempt(self, seq: Sequence) -> None:
        self._requeue(seq)
        seq.num_preemptions += 1
        self.counters.num_preemptions += 1

    # Planning

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
        while True:
            before = self.counters.num_preemptions
            plan = self._plan(now, ahead)
            # A sequence that gave way to none but itself leaves room for others.
            if plan is not None or self.counters.num_preemptions == before:
                return plan

    def _plan(self, now: float, ahead: bool) -> Plan | None:
        plan = Plan(self._number, [], [], [], [])
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for seq in self.running:
            left = seq.remaining
            if left <= 0 or seq.finish is not None:
                continue
            if left > 1:
                prefills.append(seq)
            elif not (seq.num_pending and seq.num_output + 1 >= seq.request.max_tokens):
                decodes.append(seq)
        if self._rows:
            prefills += self.waiting
        prefills.sort(key=lambda s: self._rank(s, now))
        share = self._decode_share(decodes, prefills)
        if len(decodes) > min(share, self.blocks.num_free):
            decodes.sort(key=lambda s: (s.last_step, self._rank(s, now)))
        used = self._plan_decodes(plan, decodes, share, now, ahead)
        if used is None:
            return None
        self._plan_prefills(plan, prefills, self.budget - used, now, ahead)
        if not plan.chunks and share == 0:  # prefill had its turn, and found no blocks
            used = self._plan_decodes(plan, decodes, self.budget, now, ahead)
        if used is None or not plan.chunks:
            return None
        for chunk in plan.chunks:
            seq = chunk.seq
            seq.num_inflight += 1
            seq.last_step = plan.number
            self.blocks.publish(seq, plan.number)
        plan.zero = self.blocks.taken_to_zero()
        self._number += 1
        self.counters.num_steps += 1
        self.counters.step_tokens += plan.num_tokens
        return plan

    def _decode_share(self, decodes: list[Sequence], prefills: list[Sequence]) -> int:
        """Tokens for decode and verify: the reserve at least, and what prefill leaves over."""
        demand = sum(1 + (len(s.draft) if s.draft else 0) for s in decodes)
        if self.budget == 1 and decodes and prefills:
            return self._number % 2  # no room for both: by turns
        reserve = min(self.max_num_seqs * (1 + self.max_draft), (self.budget + 1) // 2)
        prefill_demand = 0
        for seq in prefills:
            prefill_demand += seq.remaining
            if prefill_demand >= self.budget:
                break
        return min(demand, max(reserve, self.budget - prefill_demand))

    def _plan_decodes(
        self, plan: Plan, decodes: list[Sequence], share: int, now: float, ahead: bool
    ) -> int | None:
        """Chunks of one token and its draft; how many tokens that are. None: no blocks, not now."""
        turn = decodes[:share]
        spare = share - len(turn)
        used = 0
        for seq in turn:
            if seq.row < 0:  # preempted for one served before it
                continue
            draft = self._cut_draft(seq, spare)
            num = 1 + (len(draft) if draft else 0)
            if draft is not None and not self._reserve(seq, seq.num_planned + num):
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
        candidates = [s for s in self.running if id(s) not in planned and not s.num_inflight]
        victim = max(candidates, key=lambda s: self._rank(s, now), default=seq)
        if victim is not seq:
            self._preempt(victim)
            return True
        if len(self.running) > 1:
            self._preempt(seq)
        return False

    def _reserve(self, seq: Sequence, length: int) -> bool:
        """Blocks for `length` tokens; False if there are not enough."""
        missing = -(-length // self.blocks.block_size) - len(seq.blocks)
        if missing <= 0:
            return True
        taken = self.blocks.take(missing)
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
        claimed = sum(map(self._claim, self.running)) if self.waiting and self._rows else 0
        tries = MAX_TRIES
        for i, seq in enumerate(prefills):
            if budget <= 0:
                break
            if seq.finish is not None:
                continue
            if seq.row < 0:
                if tries <= 0 or not self._admit(plan, seq, claimed):
                    tries = 0 if now - seq.arrival > NO_PASSING_S else tries - 1
                    continue
                claimed += self._claim(seq)
            claimed -= self._claim(seq)
            num_copies = len(plan.copies)
            self._match(plan, seq)
            want = min(seq.remaining, budget)
            if budget == full and want < seq.remaining and i + 1 < len(prefills):
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
            self.blocks.publish(seq, plan.number)
            claimed += self._claim(seq)
            budget -= num

    def _whole_blocks(self, seq: Sequence, num: int, *, alone: bool) -> int:
        """`num` cut to a block's end where that costs little: others can use whole blocks only."""
        if num >= seq.remaining:
            return num
        size = self.blocks.block_size
        whole = (seq.num_planned + num) // size * size - seq.num_planned
        worth = whole > 0 and (num - whole) * (8 if alone else 2) <= num
        return whole if worth else num

    def _leaves_to_others(self, seq: Sequence, num: int) -> bool:
        """`num` tokens do not fill the sequence's next block, and others on its path, one of whom
        was planned before it, are about to compute the same block."""
        fills = num >= min(seq.remaining, self.blocks.block_size)
        return not fills and self.blocks.is_shared(seq)

    def _fit(self, seq: Sequence, num: int) -> int:
        """`num` cut to the blocks there are, which are taken."""
        end = seq.num_planned + num
        if not self._reserve(seq, end):
            end = min(end, (len(seq.blocks) + self.blocks.num_free) * self.blocks.block_size)
            if end <= seq.num_planned or not self._reserve(seq, end):
                return 0
        return end - seq.num_planned

    def _claim(self, seq: Sequence) -> int:
        """Blocks that a running sequence will take before long."""
        if seq.remaining <= 1:
            return 1
        return max(0, -(-len(seq.tokens) // self.blocks.block_size) - len(seq.blocks))

    def _admit(self, plan: Plan, seq: Sequence, claimed: int) -> bool:
        """Give a waiting sequence a row if its tokens so far can be expected to fit beside the
        blocks that running ones have claimed."""
        if not self._rows:
            return False
        if self.running:
            need = -(-len(seq.tokens) // self.blocks.block_size) + 1 + claimed
            if need > self.blocks.num_free and need - self.blocks.held(seq) > self.blocks.num_free:
                return False
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.row = self._rows.pop()
        self.blocks.attach(seq)
        plan.admitted.append(seq)
        return True

    def _match(self, plan: Plan, seq: Sequence) -> None:
        """Share or copy what the prefix tree holds of the tokens to come."""
        before = seq.num_planned
        if not seq.wants_prompt_logprobs:
            self.blocks.extend(seq)
            copy = self.blocks.partial(seq)
            if copy is not None:
                plan.copies.append(copy)
        saved = seq.num_planned - before
        if seq.epoch:
            return  # what it finds again is its own
        if seq.num_cached < 0:
            seq.num_cached = 0
            self.counters.prefix_queries += seq.num_prompt
            self.counters.prompt_tokens += seq.num_prompt
        seq.num_cached += saved
        self.counters.prefix_hits += saved
        self.counters.prompt_tokens_cached += saved

    # After an iteration

    def commit(self, plan: Plan, result: StepResult) -> list[Outcome]:
        """Enter what an iteration produced; the events for the clients, in chunk order."""
        outcomes: list[Outcome] = []
        for chunk, finite in zip(plan.chunks, result.finite.tolist(), strict=True):
            chunk.seq.num_inflight -= 1
            if not finite and chunk.epoch == chunk.seq.epoch:
                outcomes += self._fail_non_finite(plan, chunk)
        self.blocks.commit(plan.number)
        ids = result.ids.tolist()
        accepted = result.accepted.tolist()
        row = prompt_row = 0
        for chunk in plan.chunks:
            seq = chunk.seq
            end = row + 1 + chunk.num_draft if chunk.samples else row
            rows = [r for r in range(row, end) if accepted[r]]
            row = end
            if seq.epoch == chunk.epoch and seq.finish is None:
                if result.prompt_logprobs is not None and chunk.num_prompt_rows:
                    self._score_prompt(chunk, result.prompt_logprobs, prompt_row)
                event = self._advance(chunk, [ids[r] for r in rows], rows, result.logprobs)
                if event is not None:
                    outcomes.append((seq, event))
            prompt_row += chunk.num_prompt_rows
            if seq.finish is not None:
                self._leave(seq)
        return outcomes

    def _advance(
        self, chunk: Chunk, drawn: list[int], rows: list[int], logprobs: LogprobRows | None
    ) -> TokenEvent | None:
        """Append drawn tokens up to the first that ends the sequence."""
        seq = chunk.seq
        request = seq.request
        params = request.params
        new: list[int] = []
        stop_token: int | None = None
        error: EngineError | None = None
        for token in drawn:
            new.append(token)
            seq.tokens.append(token)
            ends = token in request.end_tokens or token in params.stop_token_ids
            if ends and seq.num_output > params.min_tokens:
                seq.finish, stop_token = "stop", token
                break
            if seq.num_output >= request.max_tokens:
                seq.finish = "length"
                break
        seq.num_computed = chunk.start + chunk.num - chunk.num_draft + max(len(new) - 1, 0)
        seq.num_planned = max(seq.num_planned, seq.num_computed)
        if seq.num_planned == seq.num_computed:
            seq.num_pending = 0
        if new:
            self._count_draft(chunk, min(len(drawn) - 1, len(new)))
            if seq.constraint is not None and seq.finish is None:
                error = _accepted(seq, new)
        elif request.max_tokens == 0 and seq.num_computed >= seq.num_prompt:
            seq.finish = "length"
        self.blocks.publish(seq, seq.last_step)
        if not new and seq.finish is None:
            return None
        first = seq.num_output == len(new)
        return TokenEvent(
            index=seq.index,
            tokens=tuple(new),
            logprobs=_logprobs(new, rows, logprobs, params.logprobs),
            prompt_logprobs=(
                tuple(seq.prompt_logprobs) if first and seq.wants_prompt_logprobs else None
            ),
            finish_reason=seq.finish,
            stop_token=stop_token,
            num_cached=max(seq.num_cached, 0),
            error=error,
        )

    def _count_draft(self, chunk: Chunk, num_accepted: int) -> None:
        counters = self.counters
        if chunk.draft is None:
            return
        counters.spec_num_drafts += 1
        counters.spec_num_draft_tokens += chunk.num_draft
        counters.spec_num_accepted_tokens += num_accepted
        per_pos = counters.spec_accepted_per_pos
        per_pos += [0] * (num_accepted - len(per_pos))
        for i in range(num_accepted):
            per_pos[i] += 1

    @staticmethod
    def _score_prompt(chunk: Chunk, rows: LogprobRows, first_row: int) -> None:
        """Add the log-probabilities of prompt tokens that are not known from an earlier run."""
        seq = chunk.seq
        top = seq.request.params.prompt_logprobs or 0
        for i in range(chunk.num_prompt_rows):
            position = chunk.start + i + 1
            if position == len(seq.prompt_logprobs):
                seq.prompt_logprobs.append(
                    _one_logprob(rows, first_row + i, seq.tokens[position], top)
                )

    def _fail_non_finite(self, plan: Plan, chunk: Chunk) -> list[Outcome]:
        """End a sequence whose numbers went bad, and let those start over who read its blocks.

        One that has ended meanwhile is told nothing, but its blocks go the same way.

        Its blocks return at once: whatever still runs writes to them before a later step clears
        them.
        """
        seq = chunk.seq
        has_ended = seq.finish is not None
        self.counters.corrupted += not has_ended
        nodes = self.blocks.filled_by(seq, plan.number, chunk.start)
        if seq.last_step != plan.number:
            nodes += self.blocks.filled_by(seq, seq.last_step, chunk.start)
        seq.finish = seq.finish or "error"
        seq.poisoned = True
        users = [s for s in self.blocks.users_of(nodes, self.running) if s is not seq]
        for user in users:
            if user.finish is None:
                self._requeue(user, poisoned=True)
            else:
                user.poisoned = True
                self._give_back(user)
                self.running.remove(user)
        self._give_back(seq)
        self.running.remove(seq)
        self.blocks.remove(nodes)
        if has_ended:
            return []
        error = EngineError("the model produced numbers that are not finite", code="non_finite")
        return [(seq, TokenEvent(index=seq.index, finish_reason="error", error=error))]

    def fail(self, plan: Plan, error: XyliteError, ahead: Plan | None = None) -> list[Outcome]:
        """An iteration raised: its sequences end with `error`; the rest of `ahead`, which builds on
        it and whose result is to be ignored, starts over."""
        outcomes: list[Outcome] = []
        plans = [plan] if ahead is None else [plan, ahead]
        for chunk in plan.chunks:
            seq = chunk.seq
            if seq.epoch == chunk.epoch and seq.finish is None:
                seq.finish = "error"
                seq.poisoned = True
                event = TokenEvent(index=seq.index, finish_reason="error", error=error)
                outcomes.append((seq, event))
        affected: dict[int, Sequence] = {}
        for p in plans:
            for chunk in p.chunks:
                chunk.seq.num_inflight -= 1
                if chunk.epoch == chunk.seq.epoch or chunk.seq.finish is not None:
                    affected[id(chunk.seq)] = chunk.seq
            for user in self.blocks.users_of(self.blocks.pending_of(p.number), self.running):
                affected[id(user)] = user
        for seq in affected.values():
            if seq.finish is not None:
                seq.poisoned = True
                self._leave(seq)
            elif seq.row >= 0:
                self._requeue(seq, poisoned=True)
        for p in reversed(plans):
            self.blocks.fail(p.number)
        return outcomes


def _accepted(seq: Sequence, new: list[int]) -> EngineError | None:
    """Advance the sequence's constraint; a fault of it ends this sequence only."""
    assert seq.constraint is not None
    try:
        seq.constraint.accept(new)
    except Exception:  # noqa: BLE001 - a plug-in's fault is not the other requests' fault
        seq.finish = "error"
        return EngineError("the request's constraint failed", code="constraint_failed")
    return None


def _one_logprob(rows: LogprobRows, row: int, token: int, top: int) -> TokenLogprob:
    alternatives = zip(rows.top_ids[row, :top].tolist(), rows.top[row, :top].tolist(), strict=True)
    return TokenLogprob(token, float(rows.chosen[row]), tuple(alternatives))


def _logprobs(
    tokens: list[int], rows: list[int], logprobs: LogprobRows | None, top: int | None
) -> tuple[TokenLogprob, ...] | None:
    if top is None or logprobs is None:
        return None
    pairs = zip(tokens, rows, strict=False)  # rows go on where the sequence ended
    return tuple(_one_logprob(logprobs, r, t, top) for t, r in pairs)
