"""Drafters: who proposes tokens. A drafter is a module of this package that offers `make(options)`.

A drafter says how much it expects to propose and proposes when asked. How many tokens to ask for,
and whether to ask at all, is decided in runtime/speculation.py, alike for every drafter.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from xylite.runtime.request import Draft
from xylite.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """What drafters can be told; each reads what concerns it, and must be told that.

    num_tokens             longest draft, in tokens
    lookup_min, lookup_max ngram: shortest and longest end of the text that is looked up
    max_cached_requests    suffix: ended sequences to learn from
    max_spec_factor        suffix: draft tokens per token of the text's end that was found
    min_token_prob         suffix: least estimated probability of a draft token, its path included
    parts                  draft_model: what it runs on
    """

    num_tokens: int
    lookup_min: int = 0
    lookup_max: int = 0
    max_cached_requests: int = 0
    max_spec_factor: float = 0.0
    min_token_prob: float = 0.0
    parts: Any = None


class Proposer(Protocol):
    """What `make` returns.

    on_device  `propose` computes on the device: it is called on the device thread. Everything else
               is called on the event loop: all calls of one iteration together may learn for a few
               milliseconds.
    """

    on_device: bool

    def begin_iteration(self) -> None:
        """Another iteration was committed: what was put off may be learnt, within limits."""
        ...

    def expects(self, seq: Sequence) -> int:
        """How many tokens it could propose for the sequence as it is; 0: nothing."""
        ...

    def match(self, seq: Sequence) -> int:
        """Tokens of the text's end that what it could propose continues: the more, the likelier it
        is right. 0: it does not look for such."""
        ...

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft | None]:
        """A draft of at most so many tokens for each sequence."""
        ...

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        ...
