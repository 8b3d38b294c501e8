"""Limits and signs of life of streams, while tokens come and while their client does not read."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.http.conftest import Connect
from tests.http.fake_engine import Call, FakeEngine, Item, paused, said
from tests.http.wire import TEXT, events_of
from xylite.text_engine import TextEvent

BODY = b'{"prompt":"x","stream":true}'


@asynccontextmanager
async def reading_nothing(
    client: Any,
) -> AsyncIterator[tuple[asyncio.StreamReader, Callable[[], None]]]:
    """A connection that has sent a request and reads nothing of the answer, and what resumes it."""
    reader, writer = await asyncio.open_connection(client.host, client.port, limit=1024)
    writer.transport.pause_reading()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    writer.write((head % len(BODY)).encode() + BODY)
    yield reader, writer.transport.resume_reading
    writer.transport.abort()


def endless(size: int) -> Any:
    """A script of texts of `size` characters that never ends."""

    def script(call: Call) -> Any:
        more = asyncio.Event()
        more.set()
        for i in range(10**9):
            yield TextEvent(index=0, text="x" * size, token_ids=(1,), num_output=i + 1)
            yield more

    return script


async def test_the_time_limit_counts_while_the_client_does_not_read(connect: Connect) -> None:
    engine = FakeEngine(endless(100_000))
    client = await connect(engine, request_timeout=0.2)
    async with reading_nothing(client) as (reader, resume), asyncio.timeout(10):
        await engine.until(lambda: engine.num_running == 1)
        await engine.until(lambda: engine.num_running == 0)
        resume()
        received = b""
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            received = (received + await reader.read(1 << 20))[-1000:]
    assert b'"code":"deadline_exceeded"' in received
    assert "slow_client_closed_total 0.0" in await (await client.get("/metrics")).text()


async def test_what_is_whole_is_given_although_its_time_has_passed(connect: Connect) -> None:
    """The limit is on the work: text that waits for its client is delivered."""

    def script(call: Call) -> Any:
        yield TextEvent(index=0, text="x" * 10_000_000, token_ids=(1,), num_output=1)
        yield from paused(said("end"))

    engine = FakeEngine(script)
    client = await connect(engine, request_timeout=0.2)
    async with reading_nothing(client) as (reader, resume), asyncio.timeout(10):
        await engine.until(lambda: len(engine.calls) == 1)
        await engine.until(lambda: engine.num_running == 0)
        passed = asyncio.Event()
        asyncio.get_running_loop().call_later(0.25, passed.set)
        await passed.wait()
        resume()
        received = b""
        while b"[DONE]" not in received:
            received = (received + await reader.read(1 << 20))[-1000:]
    assert b"deadline" not in received and b'"finish_reason":"stop"' in received


@pytest.mark.parametrize("interval", [0.02, 0.0])
async def test_streams_are_kept_alive_while_tokens_make_no_text(
    connect: Connect, interval: float
) -> None:
    more = asyncio.Event()

    def script(call: Call) -> Any:
        now = asyncio.Event()
        now.set()
        for i in range(10**9):
            yield TextEvent(index=0, token_ids=(1,), num_output=i + 1)
            yield now
            if more.is_set():
                break
        yield from said("ab")

    engine = FakeEngine(script)
    client = await connect(engine, sse_keep_alive_interval=interval)
    async with asyncio.timeout(10):
        request = asyncio.ensure_future(client.post(TEXT, json={"prompt": "x", "stream": True}))
        received = b""
        if interval:
            response = await request
            while received.count(b": keep-alive\n\n") < 3:
                received += await response.content.readany()
            assert b"data:" not in received
        else:
            await engine.until(lambda: engine.num_running == 1)
            await asyncio.wait([request], timeout=0.05)
            assert not request.done()
        more.set()
        text = (received + await (await request).read()).decode()
    assert events_of(text)[0]["choices"][0]["text"] == "ab"
    assert bool(interval) == ("keep-alive" in text)


async def test_cached_tokens_are_those_that_the_first_sequence_found(connect: Connect) -> None:
    """Its siblings share the prompt that it has just computed: no cache saved anything there."""

    def script(call: Call) -> list[Item]:
        return paused([*said("a", num_cached=3), *said("b", index=1, num_cached=16)])

    client = await connect(FakeEngine(script))
    for stream in (False, True):
        body: dict[str, Any] = {"prompt": ["x", "y"], "n": 2, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        response = await client.post(TEXT, json=body)
        last = events_of(await response.text())[-1] if stream else await response.json()
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}
