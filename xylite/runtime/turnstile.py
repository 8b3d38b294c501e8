"""Keeps any one turn of the event loop short, however much becomes ready in it."""

import asyncio
from collections import deque
from collections.abc import Callable


class Turnstile:
    """Lets at most `limit` callbacks through in one turn of the event loop, in order of arrival.

    Two hundred streams whose tokens come with one iteration, or two hundred requests that arrive
    together, would otherwise be served in a single turn, in which nobody else gets to run.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._passed = 0  # in this turn
        self._waiting: deque[Callable[[], object]] = deque()

    def call(self, callback: Callable[[], object]) -> None:
        """Call it now if this turn has room, else in a later one."""
        if self._passed < self._limit and not self._waiting:
            self._count()
            callback()
        else:
            self._waiting.append(callback)

    async def wait(self) -> None:
        """Return when it is the caller's turn."""
        if self._passed < self._limit and not self._waiting:
            self._count()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(lambda: turn.done() or turn.set_result(None))
        await turn

    def _count(self) -> None:
        self._passed += 1
        if self._passed == 1:
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._passed = 0
        while self._waiting and self._passed < self._limit:
            self._count()
            self._waiting.popleft()()
