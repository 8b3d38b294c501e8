"""How likely draft tokens are to be accepted (acceptance rates), learnt from those that were.

A token that continues a long match is accepted more often than one that continues a short one, and
with each accepted token the match has grown. So chances are kept by the length of the match that a
token continues: for each sequence, and for all together, which is what is known of a new sequence.
"""

from collections.abc import Sequence as SequenceOf
from typing import Final

import numpy as np

from xylite.runtime.sequence import Sequence

LEAST_MATCH: Final = (0, 1, 2, 3, 4, 5, 7, 10, 15)  # shortest match of each level; 0: unknown
FIRST_GUESS: Final = (0.6, 0.3, 0.5, 0.65, 0.75, 0.85, 0.9, 0.9, 0.95)  # chances, by level
NUM_LEVELS: Final = len(LEAST_MATCH)

MEMORY: Final = 0.95  # weight of what was known when a draft token was verified
FADING: Final = 0.98  # the same for an iteration without one: after a while it is tried again
PRIOR_WEIGHT: Final = 4.0  # draft tokens of its own from which a sequence counts as much as all
COMMON_WEIGHT: Final = 10.0  # draft tokens that the first guess counts as
COMMON_MEMORY: Final = 0.98
LEAST_SHARE: Final = 0.5  # all together are never trusted less than this share of the first guess
MOST: Final = 0.95


def levels(matches: np.ndarray, depth: int) -> np.ndarray:
    """[S, depth] the level of each draft token of chains that continue `matches` [S] tokens."""
    lengths = matches[:, None] + np.where(matches[:, None] > 0, np.arange(depth), 0)
    return np.searchsorted(LEAST_MATCH, lengths, side="right") - 1


class Chances:
    """Chances of draft tokens of sequences, given that the tokens before them are accepted."""

    def __init__(self) -> None:
        self._rows: dict[Sequence, int] = {}
        self._free: list[int] = []
        self._accepted = np.zeros((0, NUM_LEVELS))
        self._tried = np.zeros((0, NUM_LEVELS))
        self._iteration = 0
        self._faded = np.zeros(0, np.int64)  # by row, the iterations it has faded for
        self._common_accepted = COMMON_WEIGHT * np.array(FIRST_GUESS)
        self._least = LEAST_SHARE * np.array(FIRST_GUESS)
        self._common_tried = np.full(NUM_LEVELS, COMMON_WEIGHT)

    def __len__(self) -> int:
        return len(self._rows)

    def _row(self, seq: Sequence) -> int:
        row = self._rows.get(seq)
        if row is None:
            if not self._free:
                have = len(self._tried)
                more = np.zeros((max(have, 8), NUM_LEVELS))
                self._accepted = np.concatenate([self._accepted, more])
                self._tried = np.concatenate([self._tried, more])
                self._faded = np.concatenate([self._faded, np.zeros(len(more), np.int64)])
                self._free = list(range(have, len(self._tried)))
            row = self._rows[seq] = self._free.pop()
            self._accepted[row] = self._tried[row] = 0.0
        return row

    def _rows_of(self, sequences: SequenceOf[Sequence]) -> list[int]:
        """Their rows, faded for all iterations up to now."""
        rows = [self._row(s) for s in sequences]
        fading = FADING ** (self._iteration - self._faded[rows])[:, None]
        self._accepted[rows] *= fading
        self._tried[rows] *= fading
        self._faded[rows] = self._iteration
        return rows

    def forget(self, seq: Sequence) -> None:
        row = self._rows.pop(seq, None)
        if row is not None:
            self._free.append(row)

    def of(self, sequences: SequenceOf[Sequence], matches: np.ndarray, depth: int) -> np.ndarray:
        """[S, depth] the chance that the draft token at each depth and all before it are accepted,
        of drafts that continue matches of `matches` [S] tokens."""
        common = (self._common_accepted / self._common_tried).clip(self._least, MOST)
        rows = self._rows_of(sequences)
        known = (self._accepted[rows] + PRIOR_WEIGHT * common) / (self._tried[rows] + PRIOR_WEIGHT)
        return np.take_along_axis(known, levels(matches, depth), axis=1).cumprod(axis=1)

    def verified(
        self,
        sequences: SequenceOf[Sequence],
        matches: np.ndarray,
        num_accepted: np.ndarray,
        num_tried: np.ndarray,
    ) -> None:
        """Drafts were verified, each of another sequence, that continued matches of `matches` [S]
        tokens: `num_tried` [S] of their tokens, at most the last of which was not accepted."""
        num, depth = len(sequences), int(num_tried.max())
        rows = self._rows_of(sequences)
        place = levels(matches, depth) + NUM_LEVELS * np.arange(num)[:, None]

        def count(ends: np.ndarray) -> np.ndarray:
            """[S, levels] draft tokens below these depths."""
            found = place[np.arange(depth) < ends[:, None]]
            return np.bincount(found, minlength=num * NUM_LEVELS).reshape(num, NUM_LEVELS)

        good, tried = count(num_accepted), count(num_tried)
        self._faded[rows] += 1  # not for the one that verified them
        memory = MEMORY ** (tried > 0)
        self._accepted[rows] = memory * self._accepted[rows] + good
        self._tried[rows] = memory * self._tried[rows] + tried
        memory = COMMON_MEMORY ** (tried > 0).sum(axis=0)
        self._common_accepted = memory * self._common_accepted + good.sum(axis=0)
        self._common_tried = memory * self._common_tried + tried.sum(axis=0)

    def end_iteration(self) -> None:
        """What is known of sequences that no draft was verified of since the last time fades."""
        self._iteration += 1
