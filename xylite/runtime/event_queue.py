"""Where the engine puts what it has for a request, and the queue a reader takes it from."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from xylite.errors import XyliteError
from xylite.runtime.request import FinishReason, TokenEvent

E = TypeVar("E")


class Sink(Protocol):
    """Where the events of one request go, on the event loop, as they happen."""

    def put(self, event: TokenEvent) -> tuple[int, FinishReason | None]:
        """Take an event: how many of its tokens count, and whether the sequence ends with it.

        A sink that needs no more tokens of a sequence (a stop string was found) gives a reason
        though the event has none; what comes after is not delivered.
        """
        ...

    def abandon(self, error: XyliteError) -> None:
        """Nothing more comes: `put` raised."""
        ...


class EventQueue(Generic[E]):
    """Events of one request in order, for one reader: ends after `num_open` last events.

    The reader iterates; or it is called when there is something to `take`, see `watch`.

    wake_by     is given what wakes the reader, and calls it when it is this reader's turn; None =
                at once
    is_patient  the reader is woken by last events only: it wants nothing before
    """

    def __init__(self, num_open: int, wake_by: Callable[[Callable[[], None]], None] | None = None):
        self._events: deque[E] = deque()
        self._open = num_open
        self._error: XyliteError | None = None
        self._wake_by = wake_by
        self._waiter: asyncio.Future[None] | None = None
        self._watcher: Callable[[], None] | None = None
        self.is_patient = False

    def add(self, event: E, *, is_last: bool) -> None:
        """Append an event; is_last: no more come of its sequence."""
        self._events.append(event)
        self._open -= is_last
        # Else the reader is awake, or will be woken.
        if is_last if self.is_patient else len(self._events) == 1:
            self._wake()

    def abandon(self, error: XyliteError) -> None:
        """No more events come; the reader gets the error after those that are there."""
        self._error = error
        self._wake()

    def close(self) -> None:
        """No more events come: the reader gets those that are there, and then the end."""
        self._open = 0
        self._ready()
        self._watcher = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to read, nor will come."""
        return not self._events and self._open <= 0

    def watch(self, ready: Callable[[], None]) -> None:
        """Call `ready` when there is something to take, or the end has come, until the end.

        For readers that need no task of their own.
        """
        self._watcher = ready
        if self._events or self._error is not None or self._open <= 0:
            self._wake()

    def take(self) -> list[E]:
        """All that is there; the error, if there is one, once nothing else is."""
        if not self._events and self._error is not None and self._open > 0:
            self._open = 0
            raise self._error
        events = list(self._events)
        self._events.clear()
        return events

    def _wake(self) -> None:
        if self._wake_by is None:
            self._ready()
        elif self._waiter is not None or self._watcher is not None:
            self._wake_by(self._ready)

    def _ready(self) -> None:
        if self._watcher is not None:
            self._watcher()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> "EventQueue[E]":
        return self

    async def __anext__(self) -> E:
        while not self._events:
            if self._open <= 0:
                raise StopAsyncIteration
            if self._error is not None:
                self._open = 0
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._events.popleft()


class TokenQueue(EventQueue[TokenEvent]):
    """A sink that keeps token events for one reader."""

    def put(self, event: TokenEvent) -> tuple[int, FinishReason | None]:
        self.add(event, is_last=event.finish_reason is not None)
        return len(event.tokens), event.finish_reason
