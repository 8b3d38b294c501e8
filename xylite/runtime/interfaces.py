"""What the engine asks of those that work for it: who runs Steps, and who proposes drafts."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import numpy as np

from xylite.runtime.plan import Plan
from xylite.runtime.sequence import Sequence
from xylite.runtime.step import Step, StepResult


class Runner(Protocol):
    """What the engine needs of an executor; called on the device thread only."""

    def run(self, step: Step, mask: np.ndarray | None = None) -> StepResult: ...

    def forward(self, step: Step) -> Any: ...

    def sample(self, forwarded: Any, mask: np.ndarray | None = None) -> StepResult: ...


OnDevice = Callable[[Callable[[], Any]], Awaitable[Any]]  # runs a function on the device thread


class Drafter(Protocol):
    """Proposes drafts. `propose` runs between iterations and may return at once with nothing."""

    async def propose(self, sequences: list[Sequence], on_device: OnDevice) -> None:
        """Set `draft` of those sequences it has a proposal for."""
        ...

    def observe(self, plan: Plan, seconds: float, gap: float) -> None:
        """Learn from a committed iteration: what was accepted, the seconds the device took, and
        those it waited because the iteration could not be planned ahead."""
        ...

    def wants_to_draft(self) -> bool:
        """Some sequence may want a draft: the next iteration cannot be planned ahead."""
        ...

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        ...
