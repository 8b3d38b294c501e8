"""Strings that know which of their characters the chat template itself wrote.

A template's own text (its literals and the model's special tokens) becomes `Written`; everything
that comes from a client stays `str`. Both behave alike in every comparison and filter, so a
template renders as it always does, and afterwards a control token counts only where the template
wrote all of it. Whatever an operation below does not follow is `str` again: no operation can make a
client's text pass for the template's.
"""

import re
import string
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, SupportsIndex, cast

Span = tuple[int, int]


class Written(str):
    """Text with the half-open, ascending, disjoint `spans` that the template wrote."""

    __slots__ = ("_spans",)
    _spans: tuple[Span, ...]

    def __new__(cls, text: str, spans: tuple[Span, ...] = ()) -> "Written":
        self = super().__new__(cls, text)
        self._spans = spans
        return self

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> str:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> str:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        if wholly_written(self):
            return written(str.__mul__(self, times))
        return joined([self] * times.__index__())

    def __rmul__(self, times: SupportsIndex) -> str:
        return self * times

    def __mod__(self, values: Any) -> str:
        pieces = re.split(r"(%(?:\(\w*\))?s|%%)", self)
        if not wholly_written(self) or any("%" in p for p in pieces[::2]):
            return str.__mod__(self, values)
        positional = cast("tuple[Any, ...]", values if isinstance(values, tuple) else (values,))
        rest = iter(positional)
        out: list[str] = []
        for i, piece in enumerate(map(str, pieces)):
            if i % 2 == 0 or piece == "%%":
                out.append(written("%" if piece == "%%" else piece))
            elif piece == "%s":
                value = next(rest, rest)
                if value is rest:
                    raise TypeError("not enough arguments for format string")
                out.append(str(value))
            else:
                named = cast("Mapping[str, Any]", values)
                out.append(str(named[piece[2:-2]]))
        if next(rest, rest) is not rest and not isinstance(values, Mapping):
            raise TypeError("not all arguments converted during string formatting")
        return joined(out)

    def __getitem__(self, key: Any) -> str:
        text = str.__getitem__(self, key)
        if not isinstance(key, slice):
            start = key.__index__() % len(self)
            return self._cut(start, start + 1)
        start, stop, step = cast("slice[Any, Any, Any]", key).indices(len(self))
        return self._cut(start, max(start, stop)) if step == 1 else text

    def __iter__(self) -> Iterator[str]:
        return (self._cut(i, i + 1) for i in range(len(self)))

    def _cut(self, start: int, end: int) -> str:
        text = str.__getitem__(self, slice(start, end))
        first = max(bisect_left(self._spans, (start, start)) - 1, 0)
        near = self._spans[first : bisect_left(self._spans, (end, end))]
        spans = tuple(
            (max(a, start) - start, min(b, end) - start) for a, b in near if a < end and b > start
        )
        return Written(text, spans) if spans else text

    def _pieces(self, pieces: Iterable[str]) -> list[str]:
        """Substrings that follow each other in this text, with what was written of them."""
        out: list[str] = []
        at = 0
        for piece in pieces:
            at = self.index(piece, at)
            out.append(self._cut(at, at + len(piece)))
            at += len(piece)
        return out

    def strip(self, chars: str | None = None, /) -> str:
        return Written.rstrip(self, chars)[len(self) - len(str.lstrip(self, chars)) :]

    def lstrip(self, chars: str | None = None, /) -> str:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> str:
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(self) - len(suffix)] if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(str.split(self, sep, maxsplit))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(str.rsplit(self, sep, maxsplit))

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._pieces(str.splitlines(self, keepends))

    def join(self, iterable: Iterable[Any], /) -> str:
        out: list[str] = []
        for item in iterable:
            if not isinstance(item, str):
                raise TypeError(
                    f"sequence item: expected str instance, {type(item).__name__} found"
                )
            out += (self, item) if out else (item,)
        return joined(out)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return str.replace(self, old, new, count)
        return joined(_between(new, self.split(old, count)))

    def upper(self) -> str:
        return self._whole(str.upper(self))

    def lower(self) -> str:
        return self._whole(str.lower(self))

    def title(self) -> str:
        return self._whole(str.title(self))

    def capitalize(self) -> str:
        return self._whole(str.capitalize(self))

    def _whole(self, text: str) -> str:
        return written(text) if wholly_written(self) else text


def written(text: str) -> str:
    """Text that the template wrote."""
    return Written(text, ((0, len(text)),)) if text else text


def wholly_written(text: str) -> bool:
    return spans_of(text) == ((0, len(text)),)


def spans_of(text: str) -> tuple[Span, ...]:
    """Which parts of text the template wrote."""
    return getattr(text, "_spans", ())


def plain(text: str) -> str:
    """The same text as an ordinary string."""
    return str.__getitem__(text, slice(None))


def _between(separator: str, parts: list[str]) -> list[str]:
    out = [separator] * (2 * len(parts) - 1)
    out[::2] = parts
    return out


def joined(parts: Iterable[str]) -> str:
    """ "".join(parts), knowing of each part what was written."""
    parts = list(parts)
    text = "".join(parts)
    spans: list[Span] = []
    at = 0
    for part in parts:
        for a, b in spans_of(part):
            if spans and spans[-1][1] == at + a:
                spans[-1] = (spans[-1][0], at + b)
            else:
                spans.append((at + a, at + b))
        at += len(part)
    return Written(text, tuple(spans)) if spans else text


def format_written(formatter: string.Formatter, template: str, args: Any, kwargs: Any) -> str:
    """template.format(*args, **kwargs) by `formatter`, keeping what was written."""
    if not wholly_written(template):
        return formatter.vformat(template, args, kwargs)
    out: list[str] = []
    count = 0
    for literal, field, spec, conversion in formatter.parse(template):
        out.append(written(literal))
        if field is None:
            continue
        if field == "" or field[0] in ".[":
            field = f"{count}{field}"
            count += 1
        value = f"!{conversion}" if conversion else ""
        out.append(formatter.vformat(f"{{{field}{value}:{spec}}}", args, kwargs))
    return joined(out)
