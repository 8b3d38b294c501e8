"""The requests that an engine has taken: what their readers are told, and how they end.

Every sequence ends in one place here, whether the scheduler, its sink, its reader or a fault ended
it, so that its request is recorded once and nobody waits for what no longer comes.
"""

import logging
from collections.abc import Callable, Iterable

from xylite.errors import EngineError, XyliteError
from xylite.runtime.commit import Outcome
from xylite.runtime.event_queue import Sink
from xylite.runtime.plan import Plan
from xylite.runtime.queues import Queues
from xylite.runtime.request import FinishReason, Request, TokenEvent
from xylite.runtime.sequence import Sequence
from xylite.runtime.stats import Observer, RequestRecord, Tallies

_log = logging.getLogger(__name__)


class Ticket:
    """One accepted request.

    left  its sequences that have not ended
    """

    def __init__(
        self,
        tickets: "Tickets",
        request: Request,
        sequences: list[Sequence],
        sink: Sink,
        now: float,
    ):
        self.request = request
        self.left = list(sequences)
        self.sink = sink
        self.record = RequestRecord(
            request_id=request.id,
            num_prompt=len(request.prompt),
            max_tokens=request.max_tokens,
            n=request.params.n,
            arrival=now,
        )
        self._tickets = tickets

    def cancel(self) -> None:
        """Nobody listens any more: free what the request holds. Does nothing if it has ended."""
        self._tickets.cancel(self)


class Tickets:
    """Those of the requests that have not ended.

    observers  told about every ended request
    forget     called with every ended sequence
    wake       called when the engine may have something to do
    """

    def __init__(
        self,
        queues: Queues,
        tallies: Tallies,
        observers: list[Observer],
        *,
        forget: Callable[[Sequence], None],
        wake: Callable[[], None],
        clock: Callable[[], float],
    ):
        self.observers = observers
        self._queues = queues
        self._tallies = tallies
        self._forget = forget
        self._wake = wake
        self._clock = clock
        self._by_id: dict[str, Ticket] = {}
        self._last_delivery: dict[Sequence, float] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, request: Request, sink: Sink) -> Ticket:
        """Queue a request; Overloaded if there is no room for it."""
        assert request.id not in self._by_id, f"request id {request.id} is in use"
        now = self._clock()
        ticket = Ticket(self, request, self._queues.add(request, now), sink, now)
        self._by_id[request.id] = ticket
        self._wake()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End what is left of a request as aborted; its sink is told nothing more."""
        for seq in list(ticket.left):
            self._end(ticket, seq, "abort")
        self._wake()

    def note_scheduled(self, plan: Plan, now: float) -> None:
        """Record when requests are first admitted."""
        for seq in plan.admitted:
            ticket = self._find(seq)
            if ticket is not None and ticket.record.scheduled is None:
                ticket.record.scheduled = now

    def deliver(self, outcomes: Iterable[Outcome]) -> None:
        """Hand an iteration's events to the sinks; end the sequences that end with them."""
        now = self._clock()
        for seq, event in outcomes:
            ticket = self._find(seq)
            if ticket is None:
                continue
            taken = self._put(ticket, event)
            if taken is None:
                for one in list(ticket.left):
                    self._end(ticket, one, "error")
                continue
            num, finish = taken
            if num:
                self._note_tokens(ticket.record, seq, num, now)
            if finish is not None:
                self._end(ticket, seq, finish)

    def fail(self, seq: Sequence, error: XyliteError) -> None:
        """End a sequence with an error, unless it has ended."""
        ticket = self._find(seq)
        if ticket is not None:
            self._fail(ticket, seq, error)

    def fail_all(self, error: XyliteError) -> None:
        """End every sequence with an error, whatever else goes wrong."""
        for ticket in list(self._by_id.values()):
            for seq in list(ticket.left):
                try:
                    self._fail(ticket, seq, error)
                except Exception:  # noqa: BLE001 - the edge: the others are told all the same
                    _log.exception("request %s did not end in order", ticket.request.id)

    def _find(self, seq: Sequence) -> Ticket | None:
        ticket = self._by_id.get(seq.request.id)
        return ticket if ticket is not None and seq in ticket.left else None

    def _put(self, ticket: Ticket, event: TokenEvent) -> tuple[int, FinishReason | None] | None:
        """Hand an event to the request's sink. None: it cannot take it, and its reader gets an
        error instead."""
        try:
            return ticket.sink.put(event)
        except Exception:  # noqa: BLE001 - a sink's fault ends its request, not the engine
            _log.exception("request %s: its events cannot be delivered", ticket.request.id)
            ticket.sink.abandon(EngineError("the answer could not be put into words"))
            return None

    def _fail(self, ticket: Ticket, seq: Sequence, error: XyliteError) -> None:
        """The reader is told first, since the books of blocks may be what is wrong."""
        self._put(ticket, TokenEvent(index=seq.index, finish_reason="error", error=error))
        self._end(ticket, seq, "abort" if error.code == "shutdown" else "error")

    def _end(self, ticket: Ticket, seq: Sequence, reason: FinishReason) -> None:
        """A sequence ends, if the scheduler has not ended it; so does its request with the last."""
        ticket.left.remove(seq)
        try:
            if seq.finish is None:
                self._queues.stop(seq, reason)
        finally:
            record = ticket.record
            record.worst(reason)
            record.num_cached += max(seq.num_cached, 0) if seq.index == 0 else 0
            record.num_preemptions += seq.num_preemptions
            self._last_delivery.pop(seq, None)
            self._forget(seq)
            if not ticket.left:
                self._close(ticket)

    def _note_tokens(self, record: RequestRecord, seq: Sequence, num: int, now: float) -> None:
        if record.first_token is None:
            record.first_token = now
        before = self._last_delivery.get(seq)
        if before is not None:
            record.itl_s.append(now - before)
        self._last_delivery[seq] = now
        record.last_token = now
        record.num_output += num
        self._tallies.generation_tokens += num

    def _close(self, ticket: Ticket) -> None:
        del self._by_id[ticket.request.id]
        record = ticket.record
        record.ended = self._clock()
        self._tallies.finished[record.finish_reason] += 1
        for observer in self.observers:
            try:
                observer.on_finished(record)
            except Exception:  # noqa: BLE001 - who only looks on must not stop the work
                _log.exception("an observer of requests failed")
        if not self._by_id:
            self._wake()
