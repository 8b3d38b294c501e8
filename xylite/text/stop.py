"""Stop strings in text that arrives in pieces."""

from collections import deque
from collections.abc import Sequence

from xylite.errors import RequestError

MAX_STOPS = 16
MAX_STOP_BYTES = 1024


def check_stops(stops: Sequence[str]) -> tuple[str, ...]:
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


class StopChecker:
    """Finds the first stop string in a text, and holds back what could become one.

    The first is the one whose last character comes first, so the answer is the same however the
    text is cut into pieces; of several that end there it is the longest, so none is left in part.
    One step per character, whatever the stop strings (Aho and Corasick, 1975).

    include  the stop string itself is part of the text
    raises   RequestError, see `check_stops`
    """

    __slots__ = ("_depth", "_fail", "_found", "_held", "_include", "_matched", "_next", "_state")

    def __init__(self, stops: Sequence[str], include: bool = False):
        self._include = include
        self._held = ""  # its last characters are the state's path
        self._matched: str | None = None
        self._state = 0
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]  # the longest stop that ends here
        for stop in check_stops(stops):
            self._insert(stop)
        self._fail = [0] * len(self._next)
        self._link()

    def _insert(self, stop: str) -> None:
        node = 0
        for character in stop:
            child = self._next[node].get(character)
            if child is None:
                child = len(self._next)
                self._next[node][character] = child
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._found.append(None)
            node = child
        self._found[node] = stop

    def _link(self) -> None:
        """Breadth first: each node's longest proper suffix that is a node, too."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._next[node].items():
                self._fail[child] = self._step(self._fail[node], character)
                queue.append(child)
            if self._found[node] is None:
                self._found[node] = self._found[self._fail[node]]

    def _step(self, state: int, character: str) -> int:
        while (following := self._next[state].get(character)) is None and state:
            state = self._fail[state]
        return 0 if following is None else following

    def add(self, text: str) -> tuple[str, str | None]:
        """What may be sent now, and the stop string if it has come; afterwards nothing more."""
        if self._matched is not None:
            return "", self._matched
        if not self._next[0]:
            return text, None
        for i, character in enumerate(text):
            self._state = self._step(self._state, character)
            stop = self._found[self._state]
            if stop is not None:
                self._matched = stop
                seen = self._held + text[: i + 1]
                self._held = ""
                return seen if self._include else seen[: len(seen) - len(stop)], stop
        seen = self._held + text
        sent = len(seen) - self._depth[self._state]
        self._held = seen[sent:]
        return seen[:sent], None

    def flush(self) -> str:
        """What was held back; call it when the text ends without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
