"""Text of many tokens, made while the event loop goes on."""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from xylite.http.logprobs import joined
from xylite.runtime.turnstile import Turnstile
from xylite.text_engine import TextEngine

# Decoding this many tokens takes about a millisecond; more would hold up the streams.
DECODE_INLINE: Final = 2048
STRINGS_PER_TURN: Final = 1024  # about a millisecond, too

_encode = msgspec.json.Encoder().encode


async def text_of(engine: TextEngine, ids: Sequence[int]) -> str:
    """The tokens' text; RequestError if one is outside the vocabulary."""
    if len(ids) <= DECODE_INLINE:
        return engine.decode(ids)
    return await asyncio.to_thread(engine.decode, ids)


async def strings_of(engine: TextEngine, ids: Sequence[int], turns: Turnstile) -> bytes:
    """A JSON list of each token's own text, made in slices as long log-probabilities are."""
    parts: list[bytes] = []
    for start in range(0, len(ids), STRINGS_PER_TURN):
        await turns.wait()
        parts.append(_encode([engine.token_text(i) for i in ids[start : start + STRINGS_PER_TURN]]))
    return joined(parts) if parts else b"[]"
