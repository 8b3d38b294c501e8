"""One iteration as decided: which tokens of which sequences run in it."""

from dataclasses import dataclass

from xylite.runtime.blocks import Copy
from xylite.runtime.request import Draft
from xylite.runtime.sequence import Sequence


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
