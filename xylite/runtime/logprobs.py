"""Log-probabilities of tokens, from an iteration's arrays to what a reader gets."""

from bisect import bisect_right
from collections.abc import Sequence as Reads
from typing import overload

from xylite.runtime.request import TokenLogprob
from xylite.runtime.step import LogprobRows


def token_logprob(rows: LogprobRows, row: int, token: int, top: int) -> TokenLogprob:
    """The entry of `token`, whose row it is, and of the `top` most likely."""
    alternatives = zip(rows.top_ids[row, :top].tolist(), rows.top[row, :top].tolist(), strict=True)
    return TokenLogprob(
        token, float(rows.chosen[row]), tuple(alternatives), rank=int(rows.rank[row])
    )


class PromptLogprobs(Reads[TokenLogprob | None]):
    """Entries of a prompt's tokens, the first None; made when they are read, from the arrays.

    A prompt of thousands of tokens with 20 alternatives each is a second of work, so who reads it
    on an event loop does so in slices.
    """

    __slots__ = ("_end", "_firsts", "_parts", "_tokens", "_top")

    def __init__(self, tokens: Reads[int], top: int):
        self._tokens = tokens
        self._top = top
        self._parts: list[LogprobRows] = []
        self._firsts: list[int] = []  # position of each part's first row
        self._end = 1

    def add(self, position: int, rows: LogprobRows, start: int, num: int) -> None:
        """Take `num` rows from `start` on, which belong to the tokens from `position` on; those
        that are known from an earlier run are left out."""
        known = self._end - position
        if not 0 <= known < num:
            return
        cut = slice(start + known, start + num)
        part = LogprobRows(rows.chosen[cut], rows.top_ids[cut], rows.top[cut], rows.rank[cut])
        self._parts.append(part)
        self._firsts.append(self._end)
        self._end += num - known

    def __len__(self) -> int:
        return self._end

    @overload
    def __getitem__(self, index: int) -> TokenLogprob | None: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TokenLogprob | None, ...]: ...
    def __getitem__(self, index: int | slice):
        if isinstance(index, slice):
            return tuple(self._entry(i) for i in range(*index.indices(self._end)))
        if not -self._end <= index < self._end:
            raise IndexError(index)
        return self._entry(index % self._end)

    def _entry(self, position: int) -> TokenLogprob | None:
        part = bisect_right(self._firsts, position) - 1
        if part < 0:
            return None
        row = position - self._firsts[part]
        return token_logprob(self._parts[part], row, self._tokens[position], self._top)
