"""What chat and text completions have in common: submit, deliver, account, answer."""

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from aiohttp import web

from xylite.errors import EngineError, RequestError, XyliteError
from xylite.http.service import REQUEST_ID, SERVICE, Service
from xylite.http.stream import (
    DONE,
    EVENT_STREAM,
    KEEP_ALIVE,
    Batch,
    Delivery,
    EventStream,
    TimeLimits,
    close_all,
    tick_s,
)
from xylite.runtime.request import SamplingParams
from xylite.text_engine import TextEvent, TextStream

_log = logging.getLogger("xylite.http")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to continue: text or token ids; and how the client names it, and the limit it set."""

    content: str | Sequence[int]
    name: str = "prompt"
    limit_name: str = "max_tokens"


@dataclass(frozen=True, slots=True)
class Answer:
    """What every object of one answer repeats."""

    id: str
    model: str
    created: int

    @staticmethod
    def new(prefix: str, model: str) -> "Answer":
        """A new one; the id is the server's own, whatever the client calls its request."""
        return Answer(f"{prefix}-{secrets.token_hex(16)}", model, int(time.time()))


@dataclass(slots=True)
class Usage:
    """Tokens taken and given, summed over prompts and sequences."""

    prompt_tokens: int
    _cached: dict[int, int] = field(default_factory=dict[int, int])
    _output: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])

    def count(self, prompt: int, event: TextEvent) -> None:
        """Take an event into account; events carry running totals."""
        if event.index == 0:  # the others find what this one has just computed
            self._cached[prompt] = event.num_cached
        self._output[prompt, event.index] = event.num_output

    @property
    def completion_tokens(self) -> int:
        """Tokens given so far."""
        return sum(self._output.values())

    def as_object(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        completion = self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


class Form(Protocol):
    """How an endpoint shows events."""

    usage: Usage

    async def chunks(self, batch: Batch) -> bytes:
        """The server-sent events that show a batch."""
        ...

    def end(self) -> bytes:
        """The events after the last batch, without [DONE]."""
        ...

    async def whole(self, batch: Batch) -> dict[str, Any]:
        """The object that shows a whole answer."""
        ...


async def submit(
    service: Service,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    answer: Answer,
    priority: int,
    cache_salt: str,
    add_special_tokens: bool,
) -> list[TextStream]:
    """Queue every prompt, or none."""
    streams: list[TextStream] = []
    try:
        for i, prompt in enumerate(prompts):
            try:
                stream = await service.engine.submit(
                    prompt.content,
                    params,
                    request_id=answer.id if len(prompts) == 1 else f"{answer.id}-{i}",
                    priority=priority,
                    cache_salt=cache_salt,
                    add_special_tokens=add_special_tokens,
                )
            except RequestError as e:
                if e.param == "max_tokens":
                    e.param = prompt.limit_name
                elif e.param == "prompt":
                    e.param = prompt.name
                    if len(prompts) > 1:
                        e.message = f"{prompt.name}: {e.message}"
                raise
            streams.append(stream)
    except BaseException:
        await service.finish(close_all(streams))
        raise
    return streams


async def answer_with(
    request: web.Request,
    form: Form,
    streams: Sequence[TextStream],
    *,
    n: int,
    streamed: bool,
    limits: TimeLimits,
) -> web.StreamResponse:
    """The whole HTTP answer; what still runs is stopped when this is left, however."""
    service = request.app[SERVICE]
    delivery = Delivery(
        request, streams, n, limits=limits, whole=not streamed, tick_s=tick_s(service)
    )
    started = asyncio.get_running_loop().time()
    outcome = "cut"
    try:
        if streamed:
            response = await _streamed(request, form, delivery)
        else:
            response = await _whole(form, delivery)
        outcome = "complete"
        return response
    except XyliteError as e:
        outcome = e.code or e.type
        raise
    finally:
        await service.finish(delivery.aclose())
        if service.config.enable_log_requests:
            _log.info(
                "request %s: %s, %d prompt tokens, %d output tokens, %.3f s",
                request[REQUEST_ID],
                outcome,
                form.usage.prompt_tokens,
                form.usage.completion_tokens,
                asyncio.get_running_loop().time() - started,
            )


async def _streamed(request: web.Request, form: Form, delivery: Delivery) -> web.StreamResponse:
    stream = request[EVENT_STREAM] = EventStream(request)
    # Comment lines go out a little early rather than one tick late.
    interval = request.app[SERVICE].config.sse_keep_alive_interval * 0.9
    async for batch in delivery.batches():
        data = await form.chunks(batch) if batch else b""
        if delivery.is_over:
            # The end travels with the last text: one write, one packet.
            await stream.send(data + form.end() + DONE)
        elif data or not interval or stream.silent_s < interval:
            await stream.send(data)
        else:  # whether nothing came or what came makes no text yet
            await stream.send(KEEP_ALIVE)
    return stream.response


async def _whole(form: Form, delivery: Delivery) -> web.Response:
    async for batch in delivery.batches():
        if batch:
            body = msgspec.json.encode(await form.whole(batch))
            return web.Response(body=body, content_type="application/json")
    raise EngineError("the engine gave no answer")
