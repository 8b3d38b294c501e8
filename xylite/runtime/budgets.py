"""How many tokens run in an iteration, from what the device computes in a given time."""

from dataclasses import dataclass
from typing import Final

TARGET_STEP_S: Final = 0.1
# Of target_itl_ms: the rest goes to what decodes need besides their tokens (logits, long KV) and to
# the event loop, where it shares the cores.
MIXED_SHARE: Final = 0.65
MIN_BUDGET: Final = 64
MAX_BUDGET: Final = 8192
# So many iterations must have taken less than this share of their time. One alone says little: its
# end may have been noticed early, or the end of the one before it late.
WINDOW: Final = 8
CONTRADICTED: Final = 0.7


@dataclass(slots=True)
class Pace:
    """What an iteration takes: `fixed_s` and `per_token_s`, known from `shortest` tokens on."""

    fixed_s: float
    per_token_s: float
    shortest: int

    def seconds(self, num_tokens: int) -> float:
        """What an iteration of at least `shortest` tokens takes."""
        return self.fixed_s + num_tokens * self.per_token_s

    def tokens_in(self, seconds: float) -> int:
        """The tokens that an iteration computes in a time, within the bounds of a budget."""
        budget = min(max((seconds - self.fixed_s) / self.per_token_s, MIN_BUDGET), MAX_BUDGET)
        return int(budget) // 16 * 16


class Budgets:
    """The scheduler's budgets: what was set, or what the pace gives.

    The pace is measured before the first request. If the machine was busy with something else then,
    it came out too slow, and what iterations take afterwards says so. That some take longer says
    nothing: they may read long KV.

    budget         tokens of an iteration, as set; None = what the pace gives
    target_itl_ms  what an iteration that decodes share with prompts should take; 0 = any time
    pace           None: the cache is so small that it makes no difference
    """

    def __init__(self, budget: int | None, target_itl_ms: float, pace: Pace | None):
        self._budget = budget
        self._target_s = target_itl_ms / 1000
        self._pace = pace
        self._count = 0
        self._seconds = self._expected_s = 0.0

    @property
    def full(self) -> int:
        """Tokens of an iteration."""
        return self._budget or self._tokens_in(TARGET_STEP_S)

    @property
    def mixed(self) -> int | None:
        """Tokens of an iteration that decodes share with prompts; None = as many as ever."""
        return self._tokens_in(MIXED_SHARE * self._target_s) if self._target_s else None

    def _tokens_in(self, seconds: float) -> int:
        return MIN_BUDGET if self._pace is None else self._pace.tokens_in(seconds)

    def observe(self, num_tokens: int, seconds: float) -> bool:
        """An iteration took so long. Whether the budgets are others now."""
        pace = self._pace
        if pace is None or num_tokens < pace.shortest:
            return False
        self._count += 1
        self._seconds += seconds
        self._expected_s += pace.seconds(num_tokens)
        if self._count < WINDOW:
            return False
        share = self._seconds / self._expected_s
        self._count, self._seconds, self._expected_s = 0, 0.0, 0.0
        if share > CONTRADICTED:
            return False
        before = self.full, self.mixed
        pace.fixed_s *= share
        pace.per_token_s *= share
        return before != (self.full, self.mixed)
