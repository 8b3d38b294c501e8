"""Log-probabilities in the two forms that OpenAI's endpoints have for them."""

import math
from collections.abc import Sequence
from typing import Any

from xylite.text_engine import TextLogprob

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


def chat_entries(entries: Sequence[TextLogprob], as_id: bool) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""
    return {
        "content": [
            {
                **_chat_token(entry, as_id),
                "top_logprobs": [_chat_token(top, as_id) for top in entry.top],
            }
            for entry in entries
        ]
    }


def prompt_entries(
    entries: Sequence[TextLogprob | None],
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: per token a map from token id to its log-probability."""
    rows: list[dict[str, dict[str, Any]] | None] = []
    for entry in entries:
        if entry is None:
            rows.append(None)
            continue
        row: dict[str, dict[str, Any]] = {
            str(entry.token_id): _prompt_token(entry, None),
        }
        for rank, top in enumerate(entry.top, 1):
            row[str(top.token_id)] = _prompt_token(top, rank)
        rows.append(row)
    return rows


def _prompt_token(entry: TextLogprob, rank: int | None) -> dict[str, Any]:
    return {"logprob": finite(entry.logprob), "rank": rank, "decoded_token": entry.token}


class CompletionLogprobs:
    """The `logprobs` object of a text completion's choice, piece by piece.

    `text_offset` counts characters of the choice's text, so the object remembers how far it is.
    """

    __slots__ = ("_as_id", "_offset")

    def __init__(self, as_id: bool):
        self._as_id = as_id
        self._offset = 0

    def entries(
        self, entries: Sequence[TextLogprob | None], first_token: str = ""
    ) -> dict[str, list[Any]]:
        """The next tokens; None stands for a token without a log-probability, `first_token`."""
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for entry in entries:
            offsets.append(self._offset)
            if entry is None:
                tokens.append(first_token)
                logprobs.append(None)
                tops.append(None)
                self._offset += len(first_token)
                continue
            token = shown(entry, self._as_id)
            top = {shown(t, self._as_id): finite(t.logprob) for t in entry.top}
            # The chosen token is always among them, with the very same number.
            top[token] = finite(entry.logprob)
            tokens.append(token)
            logprobs.append(finite(entry.logprob))
            tops.append(top)
            self._offset += len(entry.token)
        return {
            "text_offset": offsets,
            "token_logprobs": logprobs,
            "tokens": tokens,
            "top_logprobs": tops,
        }
