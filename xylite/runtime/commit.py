"""After an iteration: what it produced enters the sequences, or they end with its failure."""

from collections.abc import Sequence as Ids

from xylite.errors import EngineError, XyliteError
from xylite.runtime.logprobs import token_logprob
from xylite.runtime.plan import Chunk, Plan
from xylite.runtime.queues import Counters, Queues
from xylite.runtime.request import TokenEvent, TokenLogprob
from xylite.runtime.sequence import Sequence
from xylite.runtime.step import LogprobRows, StepResult

Outcome = tuple[Sequence, TokenEvent]
Rows = Ids[int]  # of the step's result, those of one chunk that count


def commit(queues: Queues, plan: Plan, result: StepResult) -> list[Outcome]:
    """Enter what an iteration produced; the events for the clients, in chunk order."""
    outcomes: list[Outcome] = []
    for chunk, finite in zip(plan.chunks, result.finite.tolist(), strict=True):
        chunk.seq.num_inflight -= 1
        if not finite and chunk.epoch == chunk.seq.epoch:
            outcomes += _fail_non_finite(queues, plan, chunk)
    queues.blocks.commit(plan.number)
    ids = result.ids.tolist()
    accepted = result.accepted.tolist()
    scores = result.prompt_logprobs
    row = prompt_row = 0
    for chunk in plan.chunks:
        seq = chunk.seq
        rows: Rows = ()
        if chunk.samples:
            end = row + 1 + chunk.num_draft
            rows = (row,) if chunk.draft is None else [r for r in range(row, end) if accepted[r]]
            row = end
        is_current = seq.epoch == chunk.epoch and seq.finish is None
        if scores is not None:
            num = chunk.num_prompt_rows
            if is_current and num:
                seq.prompt_logprobs.add(chunk.start + 1, scores, prompt_row, num)
            prompt_row += num
        if is_current:
            event = _advance(queues, chunk, [ids[r] for r in rows], rows, result.logprobs)
            if event is not None:
                outcomes.append((seq, event))
        if seq.finish is not None:
            queues.leave(seq)
    return outcomes


def _advance(
    queues: Queues, chunk: Chunk, drawn: list[int], rows: Rows, logprobs: LogprobRows | None
) -> TokenEvent | None:
    """Append drawn tokens up to the first that ends the sequence."""
    seq = chunk.seq
    request = seq.request
    params = request.params
    stop_token: int | None = None
    error: EngineError | None = None
    before = num = seq.num_output
    for token in drawn:
        seq.append(token)
        num += 1
        ends = token in request.end_tokens or token in params.stop_token_ids
        if ends and num > params.min_tokens:
            seq.finish, stop_token = "stop", token
            break
        if num >= request.max_tokens:
            seq.finish = "length"
            break
    new = drawn if len(drawn) == num - before else drawn[: num - before]
    seq.num_computed = chunk.start + chunk.num - chunk.num_draft + max(len(new) - 1, 0)
    seq.num_planned = max(seq.num_planned, seq.num_computed)
    if seq.num_planned == seq.num_computed:
        seq.num_pending = 0
    if new:
        if chunk.draft is not None:
            _count_draft(queues.counters, chunk, min(len(drawn) - 1, len(new)))
        if seq.constraint is not None and seq.finish is None:
            error = _accepted(seq, new)
    elif request.max_tokens == 0 and seq.num_computed >= seq.num_prompt:
        seq.finish = "length"
    queues.blocks.publish(seq, seq.last_step)
    if not new and seq.finish is None:
        return None
    scored = before == 0 and seq.wants_prompt_logprobs
    return TokenEvent(
        index=seq.index,
        tokens=tuple(new),
        logprobs=_logprobs(new, rows, logprobs, params.logprobs),
        prompt_logprobs=seq.prompt_logprobs if scored else None,
        finish_reason=seq.finish,
        stop_token=stop_token,
        num_cached=max(seq.num_cached, 0),
        error=error,
    )


def _count_draft(counters: Counters, chunk: Chunk, num_accepted: int) -> None:
    counters.spec_num_drafts += 1
    counters.spec_num_draft_tokens += chunk.num_draft
    counters.spec_num_accepted_tokens += num_accepted
    per_pos = counters.spec_accepted_per_pos
    per_pos += [0] * (num_accepted - len(per_pos))
    for i in range(num_accepted):
        per_pos[i] += 1


def _fail_non_finite(queues: Queues, plan: Plan, chunk: Chunk) -> list[Outcome]:
    """End a sequence whose numbers went bad, and let those start over who read its blocks.

    One that has ended meanwhile is told nothing, but its blocks go the same way.

    Its blocks return at once: whatever still runs writes to them before a later step clears
    them.
    """
    seq = chunk.seq
    has_ended = seq.finish is not None
    queues.counters.corrupted += not has_ended
    nodes = queues.blocks.filled_by(seq, plan.number, chunk.start)
    if seq.last_step != plan.number:
        nodes += queues.blocks.filled_by(seq, seq.last_step, chunk.start)
    seq.finish = seq.finish or "error"
    seq.poisoned = True
    users = [s for s in queues.blocks.users_of(nodes, queues.running) if s is not seq]
    for user in users:
        if user.finish is None:
            queues.requeue(user, poisoned=True)
        else:
            user.poisoned = True
            queues.give_back(user)
            queues.running.remove(user)
    queues.give_back(seq)
    queues.running.remove(seq)
    queues.blocks.remove(nodes)
    if has_ended:
        return []
    error = EngineError("the model produced numbers that are not finite", code="non_finite")
    return [(seq, TokenEvent(index=seq.index, finish_reason="error", error=error))]


def fail(
    queues: Queues, plan: Plan, error: XyliteError, ahead: Plan | None = None
) -> list[Outcome]:
    """An iteration raised: a sequence that was alone in it ends with `error`, several are put on
    trial and start over, as does the rest of `ahead`, which builds on it and whose result is to be
    ignored."""
    outcomes: list[Outcome] = []
    plans = [plan] if ahead is None else [plan, ahead]
    members = [c.seq for c in plan.chunks if c.epoch == c.seq.epoch and c.seq.finish is None]
    for seq in queues.trials.accuse(members, alone=len(plan.chunks) == 1):
        seq.finish = "error"
        event = TokenEvent(index=seq.index, finish_reason="error", error=error)
        outcomes.append((seq, event))
    affected: dict[int, Sequence] = {}
    for p in plans:
        for chunk in p.chunks:
            chunk.seq.num_inflight -= 1
            if chunk.epoch == chunk.seq.epoch or chunk.seq.finish is not None:
                affected[id(chunk.seq)] = chunk.seq
        for user in queues.blocks.users_of(queues.blocks.pending_of(p.number), queues.running):
            affected[id(user)] = user
        # Who got a row but no chunk: the device may not have set the row up.
        affected.update((id(seq), seq) for seq in p.admitted)
    for seq in affected.values():
        if seq.finish is not None:
            seq.poisoned = True
            queues.leave(seq)
        elif seq.row >= 0:
            queues.requeue(seq, poisoned=True)
    for p in reversed(plans):
        queues.blocks.fail(p.number)
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


def _logprobs(
    tokens: list[int], rows: Rows, logprobs: LogprobRows | None, top: int | None
) -> tuple[TokenLogprob, ...] | None:
    if top is None or logprobs is None:
        return None
    pairs = zip(tokens, rows, strict=False)  # rows go on where the sequence ended
    return tuple(token_logprob(logprobs, r, t, top) for t, r in pairs)
