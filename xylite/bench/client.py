"""One streamed request and its timings. Light, because it shares the machine with the server."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

from xylite.bench.data import Item

Backend = Literal["openai", "openai-chat"]
ENDPOINTS: Mapping[str, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


class _Delta(msgspec.Struct):
    content: str | None = None
    role: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def carries_token(self) -> bool:
        """False for the role chunk at the start and the bare finish at the end."""
        if self.delta is None:
            return bool(self.text) or self.finish_reason is None
        d = self.delta
        if d.content or d.reasoning or d.tool_calls:
            return True
        return d.role is None and self.finish_reason is None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass(slots=True)
class Outcome:
    """What became of one request; times in seconds.

    start    when it was sent, on the clock of time.perf_counter
    ttft     from start to the first token
    itls     gaps between chunks that carry tokens
    latency  from start to the last token
    error    "" if it succeeded
    """

    start: float
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list[float])
    latency: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        if self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where and how to send. `body` is merged into every request's body, last."""

    url: str
    backend: Backend
    model: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    keep_text: bool = False


def request_body(target: Target, item: Item) -> dict[str, Any]:
    """The JSON body of a request."""
    body: dict[str, Any] = {
        "model": target.model,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.backend == "openai":
        body |= {"prompt": item.prompt, "max_tokens": item.max_tokens}
    else:
        body |= {
            "messages": item.messages or [{"role": "user", "content": item.prompt}],
            "max_completion_tokens": item.max_tokens,
        }
    return body | dict(target.body)


async def send(session: aiohttp.ClientSession, target: Target, item: Item) -> Outcome:
    """Sends a request and reads its stream to the end; failures are in `error`."""
    body = msgspec.json.encode(request_body(target, item))
    headers = {"Content-Type": "application/json", **target.headers}
    out = Outcome(start=time.perf_counter())
    try:
        async with session.post(target.url, data=body, headers=headers) as response:
            if response.status != 200:
                text = (await response.text(errors="replace"))[:300]
                out.error = f"HTTP {response.status}: {text}"
                return out
            await _read(response, out, target.keep_text)
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError, ValueError) as e:
        # ValueError: a line without end, or a host that is none.
        out.error = f"{type(e).__name__}: {e}"
    return out


async def _read(response: aiohttp.ClientResponse, out: Outcome, keep_text: bool) -> None:
    decode = msgspec.json.Decoder(_Chunk).decode
    last, chunks, done = 0.0, 0, False
    texts: list[str] = []
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            break
        now = time.perf_counter()
        chunk = decode(data)
        if chunk.error is not None:
            out.error = str(chunk.error)[:300]
            return
        if chunk.usage is not None:
            out.input_tokens = chunk.usage.prompt_tokens
            out.output_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            out.cached_tokens = (details.cached_tokens or 0) if details else 0
        if not chunk.choices or not chunk.choices[0].carries_token():
            continue
        if chunks:
            out.itls.append(now - last)
        else:
            out.ttft = now - out.start
        chunks, last = chunks + 1, now
        if keep_text:
            choice = chunk.choices[0]
            texts.append((choice.delta.content if choice.delta else choice.text) or "")
    if not done:
        out.error = "the stream ended without [DONE]"
    elif not chunks:
        out.error = "no token came"
    out.latency = last - out.start if chunks else 0.0
    # A server without usage: one chunk is taken as one token.
    out.output_tokens = out.output_tokens or chunks
    out.text = "".join(texts)
