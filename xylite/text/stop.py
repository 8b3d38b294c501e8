"""Stop strings in text that arrives in pieces."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from xylite.errors import RequestError

MAX_STOPS = 16
MAX_STOP_BYTES = 1024


def check_stops(stops: Sequence[Any]) -> tuple[str, ...]:
    """The stop strings, each once; RequestError if one is empty, too long, or they are too many."""
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} entries, the limit is {MAX_STOPS}", param="stop")
    for i, stop in enumerate(stops):
        if not isinstance(stop, str) or not stop:
            raise RequestError(f"stop[{i}] must be a string that is not empty", param="stop")
        size = len(stop.encode("utf-8", "replace"))
        if size > MAX_STOP_BYTES:
            raise RequestError(
                f"stop[{i}] has {size} bytes, the limit is {MAX_STOP_BYTES}", param="stop"
            )
    return tuple(dict.fromkeys(stops))


class StopStrings:
    """The stop strings of a request, prepared once for all its sequences (Aho and Corasick, 1975).

    raises  RequestError, see `check_stops`
    """

    __slots__ = ("depth", "fail", "following", "found")

    def __init__(self, stops: Sequence[str]):
        # By state; a state is a beginning of a stop string, and state 0 is the empty one.
        self.following: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.found: list[str | None] = [None]  # the longest stop string that ends here
        for stop in check_stops(stops):
            self._insert(stop)
        self.fail = [0] * len(self.depth)  # its longest proper suffix that is a state, too
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            child = self.following[state].get(character)
            if child is None:
                child = len(self.depth)
                self.following[state][character] = child
                self.following.append({})
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = child
        self.found[state] = stop

    def _link(self) -> None:
        queue = deque(self.following[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self.following[state].items():
                self.fail[child] = self.step(self.fail[state], character)
                queue.append(child)
            if self.found[state] is None:
                self.found[state] = self.found[self.fail[state]]

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while (child := self.following[state].get(character)) is None and state:
            state = self.fail[state]
        return 0 if child is None else child


class StopChecker:
    """Finds the first stop string in a text, and holds back what could become one.

    The first is the one whose last character comes first, so the answer is the same however the
    text is cut into pieces; of several that end there it is the longest, so none is left in part.
    The cost of a character does not depend on the stop strings.

    include  the stop string itself is part of the text
    raises   RequestError, see `check_stops`
    """

    __slots__ = ("_held", "_include", "_matched", "_state", "_stops")

    def __init__(self, stops: Sequence[str] | StopStrings, include: bool = False):
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._include = include
        self._held = ""  # the characters that led to the state
        self._matched: str | None = None
        self._state = 0

    def add(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """What may be sent now, and the stop string if it has come; afterwards nothing more.

        armed  False: a stop string that ends in this text does not count, but the beginning of one
               that ends later does
        """
        stops = self._stops
        if self._matched is not None:
            return "", self._matched
        if not stops.following[0]:
            return text, None
        for i, character in enumerate(text):
            self._state = stops.step(self._state, character)
            stop = stops.found[self._state]
            if stop is not None and armed:
                self._matched = stop
                seen = self._held + text[: i + 1]
                self._held = ""
                return seen if self._include else seen[: len(seen) - len(stop)], stop
        seen = self._held + text
        sent = len(seen) - stops.depth[self._state]
        self._held = seen[sent:]
        return seen[:sent], None

    def flush(self) -> str:
        """What was held back; call it when the text ends without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
