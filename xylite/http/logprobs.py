"""Log-probabilities in the two forms that OpenAI's endpoints have for them, as JSON.

Thousands of tokens with 20 alternatives each are a second of work. So long lists are made in
slices, and all requests of a server share one turnstile: at most one slice in a turn of the loop.
"""

import codecs
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, TypeVar

import msgspec

from xylite.runtime.turnstile import Turnstile
from xylite.text_engine import TextLogprob

SLICE: Final = 256  # log-probabilities, alternatives included: 1 to 2 ms

E = TypeVar("E", TextLogprob, TextLogprob | None)

_Utf8 = codecs.getincrementaldecoder("utf-8")
_encode = msgspec.json.Encoder().encode

# JSON has no -inf; OpenAI writes this number for "impossible".
FLOOR = -9999.0


def finite(logprob: float) -> float:
    """The number as JSON can hold it; written so that NaN becomes the floor too."""
    return logprob if FLOOR < logprob < math.inf else FLOOR


def shown(entry: TextLogprob, as_id: bool) -> str:
    """The token's text, or its id for clients that ask for ids."""
    return f"token_id:{entry.token_id}" if as_id else entry.token


def _chat_token(entry: TextLogprob, as_id: bool) -> dict[str, Any]:
    return {
        "token": shown(entry, as_id),
        "logprob": finite(entry.logprob),
        "bytes": list(entry.bytes),
    }


async def slices(entries: Sequence[E], turns: Turnstile) -> AsyncIterator[Sequence[E]]:
    """The entries, SLICE log-probabilities at a time and each time in its turn."""
    num = SLICE // (1 + max((len(e.top) for e in entries[:2] if e is not None), default=0)) or 1
    if len(entries) <= num:
        yield entries
        return
    for start in range(0, len(entries), num):
        await turns.wait()
        yield entries[start : start + num]


def joined(parts: Sequence[bytes]) -> bytes:
    """One JSON list of several, which are not empty."""
    return parts[0] if len(parts) == 1 else b"[" + b",".join(p[1:-1] for p in parts) + b"]"


async def chat_entries(entries: Sequence[TextLogprob], as_id: bool, turns: Turnstile) -> bytes:
    """The `logprobs` object of a chat choice."""
    parts = [
        _encode(
            [
                {
                    **_chat_token(entry, as_id),
                    "top_logprobs": [_chat_token(top, as_id) for top in entry.top],
                }
                for entry in part
            ]
        )
        async for part in slices(entries, turns)
    ]
    return b'{"content":' + joined(parts) + b"}"


async def prompt_entries(entries: Sequence[TextLogprob | None], turns: Turnstile) -> bytes:
    """vLLM's `prompt_logprobs`: per token a map from token id to its log-probability."""
    return joined([_encode([*map(_prompt_row, p)]) async for p in slices(entries, turns)])


def _prompt_row(entry: TextLogprob | None) -> dict[str, dict[str, Any]] | None:
    if entry is None:
        return None
    row: dict[str, dict[str, Any]] = {str(entry.token_id): _prompt_token(entry, entry.rank)}
    for rank, top in enumerate(entry.top, 1):
        row[str(top.token_id)] = _prompt_token(top, rank)
    return row


def _prompt_token(entry: TextLogprob, rank: int | None) -> dict[str, Any]:
    return {"logprob": finite(entry.logprob), "rank": rank, "decoded_token": entry.token}


class CompletionLogprobs:
    """The `logprobs` object of a text completion's choice, piece by piece.

    `text_offset` counts characters of the choice's text, so the object remembers how far it is. A
    character of several tokens counts with its last: all of them begin where it does.
    """

    __slots__ = ("_as_id", "_offset", "_turns", "_utf8")

    def __init__(self, as_id: bool, turns: Turnstile):
        self._as_id = as_id
        self._turns = turns
        self._offset = 0
        self._utf8 = _Utf8("replace")

    async def encoded(
        self,
        *runs: Sequence[TextLogprob] | Sequence[TextLogprob | None],
        first_token: tuple[int, str] = (0, ""),
    ) -> bytes:
        """The next tokens; None stands for a token without a log-probability: `first_token`, its
        id and text."""
        parts: dict[str, list[bytes]] = {}
        for run in runs:
            async for part in slices(run, self._turns):
                for key, values in self._entries(part, first_token).items():
                    if values:
                        parts.setdefault(key, []).append(_encode(values))
        if not parts:
            return _encode(self._entries((), first_token))
        return b"{%s}" % b",".join(b'"%s":' % k.encode() + joined(v) for k, v in parts.items())

    def _entries(
        self, entries: Sequence[TextLogprob | None], first_token: tuple[int, str]
    ) -> dict[str, list[Any]]:
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for entry in entries:
            offsets.append(self._offset)
            if entry is None:
                token_id, text = first_token
                tokens.append(f"token_id:{token_id}" if self._as_id else text)
                logprobs.append(None)
                tops.append(None)
                self._offset += len(self._utf8.decode(text.encode()))
                continue
            token = shown(entry, self._as_id)
            top = {shown(t, self._as_id): finite(t.logprob) for t in entry.top}
            # The chosen token is always among them, with the very same number.
            top[token] = finite(entry.logprob)
            tokens.append(token)
            logprobs.append(finite(entry.logprob))
            tops.append(top)
            self._offset += len(self._utf8.decode(entry.bytes))
        return {
            "text_offset": offsets,
            "token_logprobs": logprobs,
            "tokens": tokens,
            "top_logprobs": tops,
        }
