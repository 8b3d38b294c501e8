"""The emulated cores of one block, and the flags between them."""

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .memory import Bytes, Fault


class Flags:
    """Cross-core flags of one block: the cube core to each vector core, both of these to it."""

    def __init__(self, num_cores: int):
        self._changed = threading.Condition()
        self._live = num_cores
        self._waiting: dict[int, list[Any]] = {}
        self._stopped = False
        self.counts: Counter[Any] = Counter()

    def set(self, key: Any) -> None:
        with self._changed:
            self.counts[key] += 1
            self._changed.notify_all()

    def _ready(self, keys: list[Any]) -> bool:
        return all(self.counts[k] > 0 for k in keys)

    def _stop_if_stuck(self) -> None:
        stuck = not any(self._ready(k) for k in self._waiting.values())
        if self._live and len(self._waiting) >= self._live and stuck:
            self._stopped = True
            self._changed.notify_all()

    def wait(self, keys: list[Any]) -> None:
        """Take one of each key; Fault when no core can ever set them."""
        me = threading.get_ident()
        with self._changed:
            if not self._ready(keys):
                self._waiting[me] = keys
                self._stop_if_stuck()
                while not self._ready(keys) and not self._stopped:
                    self._changed.wait()
                del self._waiting[me]
                if not self._ready(keys):
                    raise Fault(f"DEADLOCK waiting for {keys}")
            for k in keys:
                self.counts[k] -= 1

    def core_ended(self, failed: bool) -> None:
        with self._changed:
            self._live -= 1
            if failed:
                self._stopped = True
                self._changed.notify_all()
            self._stop_if_stuck()


@dataclass(slots=True, eq=False)
class Core:
    """One cube or vector core of a block."""

    kind: str  # "aic" or "aiv"
    sub_block: int
    block: int
    spaces: dict[str, Bytes]
    flags: Flags
    events: Counter[Any] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
