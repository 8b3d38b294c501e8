"""Time: clients that leave or do not read, limits, failures in the middle, keep-alives."""

import asyncio
import logging
import random
from typing import Any

import pytest
from aiohttp import web

from tests.http.conftest import Connect
from tests.http.fake_engine import Call, FakeEngine, Item, engine_fault, paused, said
from tests.http.wire import CHAT, TEXT, USER, error_of, events_of
from xylite.errors import DeadlineExceeded, Overloaded
from xylite.http import make_app
from xylite.http.stream import TimeLimits
from xylite.text_engine import TextEvent

BODIES = [(CHAT, {"messages": USER}), (TEXT, {"prompt": "x"})]


def held(call: Call) -> list[Item]:
    """Nothing, for ever."""
    return [asyncio.Event()]


def begun(call: Call) -> list[Item]:
    """Some text, then nothing for ever."""
    return [*said("abc", finish=None), asyncio.Event()]


def failing(call: Call) -> list[Item]:
    """Some text, then an error."""
    error = TextEvent(index=0, finish_reason="error", error=engine_fault())
    return [*paused(said("abc", finish=None)), error]


def dying(call: Call) -> list[Item]:
    """Some text, then a bug."""
    return [*paused(said("abc", finish=None)), ZeroDivisionError("at 0xdeadbeef")]


async def is_idle(engine: FakeEngine) -> None:
    """Return when nothing runs; the test's time limit is the deadline."""
    async with asyncio.timeout(10):
        await engine.until(lambda: engine.num_running == 0)


@pytest.mark.parametrize("path, body", BODIES)
@pytest.mark.parametrize("script", [held, begun])
@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_stops_the_work(
    connect: Connect, path: str, body: dict[str, Any], script: Any, stream: bool
) -> None:
    engine = FakeEngine(script)
    client = await connect(engine)
    request = asyncio.ensure_future(client.post(path, json={**body, "n": 2, "stream": stream}))
    await engine.until(lambda: engine.num_running == 1)
    if stream and script is begun:
        (await request).close()
    else:
        request.cancel()
    await is_idle(engine)
    assert engine.calls[0].is_closed
    assert engine.finished == {"abort": 1}


async def test_client_that_leaves_while_it_waits_for_admission(connect: Connect) -> None:
    engine = FakeEngine()
    engine.hold_submit = asyncio.Event()
    client = await connect(engine)
    request = asyncio.ensure_future(client.post(TEXT, json={"prompt": "x"}))
    await engine.until(lambda: engine.num_held == 1)
    request.cancel()
    await engine.until(lambda: engine.num_held == 0)
    engine.hold_submit.set()
    assert (await client.post(TEXT, json={"prompt": "x"})).status == 200
    assert len(engine.calls) == 1


async def test_client_that_leaves_is_noticed_without_handler_cancellation() -> None:
    """In an application of someone else's."""
    engine = FakeEngine(held)
    runner = web.AppRunner(make_app(engine))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 14\r\n\r\n"
        b'{"prompt":"x"}'
    )
    await engine.until(lambda: engine.num_running == 1)
    writer.close()
    await is_idle(engine)
    assert engine.calls[0].is_closed
    assert engine.finished == {"abort": 1}
    await runner.cleanup()
    del reader


@pytest.mark.parametrize("path, body", BODIES)
@pytest.mark.parametrize(
    "script, code, message",
    [
        (failing, "nonfinite", "the numbers of this request were not finite"),
        (dying, None, "internal error (request r1)"),
    ],
)
async def test_failure_in_the_middle_is_told_and_ends_the_stream(
    connect: Connect,
    path: str,
    body: dict[str, Any],
    script: Any,
    code: str | None,
    message: str,
) -> None:
    engine = FakeEngine(script)
    client = await connect(engine)
    headers = {"X-Request-Id": "r1"}
    response = await client.post(path, json={**body, "stream": True}, headers=headers)
    assert response.status == 200
    events = events_of(await response.text())
    assert events[-1] == {
        "error": {"message": message, "type": "server_error", "param": None, "code": code}
    }
    texts = [c.get("text") or c["delta"].get("content") for e in events[:-1] for c in e["choices"]]
    assert "".join(t for t in texts if t) == "abc"
    response = await client.post(path, json=body, headers=headers)
    error = await error_of(response, 500, code)
    assert error["message"] == message
    assert response.headers["x-should-retry"] == "false"
    assert engine.num_running == 0
    engine.script = lambda call: said("ok")
    assert (await client.post(path, json=body)).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_ends_and_failures_are_told_at_once(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """And not when the request next looks up by itself."""
    monkeypatch.setattr("xylite.http.stream.TICK_S", 3600.0)
    body = {"prompt": "x", "stream": stream}
    for last in (TextEvent(index=0, finish_reason="stop"), failing(None)[-1], ValueError("bug")):
        more = asyncio.Event()
        engine = FakeEngine(lambda call, more=more, last=last: [more, last])
        client = await connect(engine, sse_keep_alive_interval=0)
        request = asyncio.ensure_future(client.post(TEXT, json=body))
        await engine.until(lambda engine=engine: engine.num_running == 1)
        more.set()
        async with asyncio.timeout(20):
            assert (await request).status == (
                200 if isinstance(last, TextEvent) and not last.error else 500
            )


async def test_failure_before_the_first_byte_is_a_status(connect: Connect) -> None:
    client = await connect(
        FakeEngine(lambda call: [TextEvent(index=0, finish_reason="error", error=engine_fault())])
    )
    response = await client.post(TEXT, json={"prompt": "x", "stream": True})
    error = await error_of(response, 500, "nonfinite")
    assert error["message"] == "the numbers of this request were not finite"


async def test_one_failed_prompt_stops_the_others(connect: Connect) -> None:
    engine = FakeEngine(lambda call: failing(call) if call.ids == (98,) else held(call))
    client = await connect(engine)
    body = {"prompt": ["a", "b", "c"], "stream": True}
    response = await client.post(TEXT, json=body)
    assert events_of(await response.text())[-1]["error"]["code"] == "nonfinite"
    await is_idle(engine)
    assert all(call.is_closed for call in engine.calls)


async def test_an_engine_that_forgets_the_end_is_an_error(connect: Connect) -> None:
    client = await connect(FakeEngine(lambda call: said("abc", finish=None)))
    response = await client.post(TEXT, json={"prompt": "x", "stream": True})
    assert events_of(await response.text())[-1]["error"]["type"] == "server_error"
    await error_of(await client.post(TEXT, json={"prompt": "x"}), 500)


@pytest.mark.parametrize("stream", [False, True])
async def test_overload_is_503_with_a_time_to_retry(connect: Connect, stream: bool) -> None:
    engine = FakeEngine()
    client = await connect(engine)
    for seconds, header, ms in [(2.4, "3", "2400"), (0, "1", "1"), (1e6, "60", "60000")]:
        engine.refuse = Overloaded("the queue is full (64 of 64)", retry_after_s=seconds)
        response = await client.post(TEXT, json={"prompt": "x", "stream": stream})
        error = await error_of(response, 503, "queue_full")
        assert error["message"] == "the queue is full (64 of 64)"
        assert response.headers["Retry-After"] == header
        assert response.headers["retry-after-ms"] == ms
        assert response.headers["x-should-retry"] == "true"
        assert "Connection" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "config, headers",
    [
        ({"request_timeout": 0.05}, {}),
        ({"max_queue_wait": 0.05}, {}),
        ({}, {"X-Request-Timeout-Ms": "50"}),
        ({"request_timeout": 60}, {"X-Request-Timeout-Ms": "50"}),
        ({"request_timeout": 0.05}, {"X-Request-Timeout-Ms": "60000"}),
    ],
)
async def test_time_limit_before_the_first_byte_is_504(
    connect: Connect, stream: bool, config: dict[str, Any], headers: dict[str, str]
) -> None:
    engine = FakeEngine(held)
    client = await connect(engine, **config)
    response = await client.post(TEXT, json={"prompt": "x", "stream": stream}, headers=headers)
    error = await error_of(response, 504, "deadline_exceeded")
    assert error["type"] == "timeout_error"
    assert engine.num_running == 0
    engine.hold_submit = asyncio.Event()
    response = await client.post(TEXT, json={"prompt": "x", "stream": stream}, headers=headers)
    await error_of(response, 504, "deadline_exceeded")


async def test_time_limit_in_the_middle_is_an_error_event(connect: Connect) -> None:
    engine = FakeEngine(begun)
    client = await connect(engine, request_timeout=0.2)
    response = await client.post(TEXT, json={"prompt": "x", "stream": True})
    assert response.status == 200
    events = events_of(await response.text())
    assert events[0]["choices"][0]["text"] == "abc"
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert engine.num_running == 0


async def test_queue_wait_ends_with_the_first_token(connect: Connect) -> None:
    second = asyncio.Event()
    engine = FakeEngine(lambda call: [*said("a", finish=None), second, *said("b")])
    client = await connect(engine, max_queue_wait=0.05)
    requests = [
        asyncio.ensure_future(client.post(TEXT, json={"prompt": "x", "stream": stream}))
        for stream in (False, True)
    ]
    await engine.until(lambda: engine.num_running == 2)
    streamed = await requests[1]
    reads = asyncio.ensure_future(streamed.text())
    done, _ = await asyncio.wait([requests[0], reads], timeout=0.15)
    assert not done
    second.set()
    whole = await requests[0]
    assert (await whole.json())["choices"][0]["text"] == "ab"
    assert len(events_of(await reads)) == 2


def test_time_limits_in_order() -> None:
    both = TimeLimits(first_token=5.0, end=9.0)
    assert both.first == 5.0
    late = TimeLimits(first_token=9.0, end=5.0)
    assert late.first == 5.0
    first = TimeLimits(first_token=5.0, end=None)
    assert first.first == 5.0
    assert TimeLimits(first_token=None, end=9.0).first == 9.0
    assert TimeLimits(first_token=None, end=None).first is None
    both.check(started=True, now=8.9)
    for started, now in ((False, 5.0), (True, 9.0)):
        with pytest.raises(DeadlineExceeded):
            both.check(started, now)


@pytest.mark.parametrize("value", ["0", "-5", "x", "1.5", "9" * 20, "", "٣"])
async def test_timeout_header_must_be_a_number(connect: Connect, value: str) -> None:
    client = await connect()
    response = await client.post(
        TEXT, json={"prompt": "x"}, headers={"X-Request-Timeout-Ms": value}
    )
    error = await error_of(response, 400)
    assert error["param"] == "X-Request-Timeout-Ms"


async def test_silent_streams_are_kept_alive_by_comments(connect: Connect) -> None:
    more = asyncio.Event()
    engine = FakeEngine(lambda call: [more, *said("ab")])
    client = await connect(engine, sse_keep_alive_interval=0.02)
    response = await client.post(TEXT, json={"prompt": "x", "stream": True})
    received = b""
    while received.count(b": keep-alive\n\n") < 3:
        received += await response.content.readany()
    assert b"data:" not in received
    more.set()
    text = (received + await response.read()).decode()
    assert events_of(text)[0]["choices"][0]["text"] == "ab"
    whole = await client.post(TEXT, json={"prompt": "x"})
    assert b"keep-alive" not in await whole.read()


@pytest.mark.parametrize("interval", [0, 30])
async def test_keep_alives_can_be_off(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, interval: float
) -> None:
    monkeypatch.setattr("xylite.http.stream.TICK_S", 0.01)
    more = asyncio.Event()
    engine = FakeEngine(lambda call: [*said("a", finish=None), more, *said("b")])
    client = await connect(engine, sse_keep_alive_interval=interval)
    response = await client.post(TEXT, json={"prompt": "x", "stream": True})
    await response.content.readany()
    rest = asyncio.ensure_future(response.read())
    done, _ = await asyncio.wait([rest], timeout=0.1)
    assert not done
    more.set()
    assert b"keep-alive" not in await rest


async def test_engine_that_died_is_told_to_every_stream(connect: Connect) -> None:
    engine = FakeEngine(begun)
    client = await connect(engine)
    streamed = await client.post(TEXT, json={"prompt": "x", "stream": True})
    await streamed.content.readany()
    whole = asyncio.ensure_future(client.post(TEXT, json={"prompt": "x"}))
    await engine.until(lambda: engine.num_running == 2)
    engine.die()
    text = (await streamed.read()).decode()
    assert '"code":"engine_dead"' in text and text.endswith("data: [DONE]\n\n")
    await error_of(await whole, 503, "engine_dead")
    assert (await client.get("/health")).status == 503


@pytest.mark.parametrize("size", [200, 100_000])
async def test_client_that_does_not_read_is_closed(connect: Connect, size: int) -> None:
    """The text of a stream that nobody reads is bounded, and then the client is given up."""
    more = asyncio.Event()

    def script(call: Call) -> Any:
        while True:
            yield TextEvent(index=0, text="x" * size, token_ids=(1,), num_output=1)
            yield more

    engine = FakeEngine(script)
    more.set()
    client = await connect(engine, app={"write_stall_s": 0.2})
    reader, writer = await asyncio.open_connection(client.host, client.port, limit=1024)
    writer.transport.pause_reading()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 28\r\n\r\n"
        b'{"prompt":"x","stream":true}'
    )
    await engine.until(lambda: engine.num_running == 1)
    await is_idle(engine)
    assert "xylite:slow_client_closed_total 1.0" in await (await client.get("/metrics")).text()
    writer.close()
    del reader


async def test_slow_client_gets_everything_in_fewer_pieces(connect: Connect) -> None:
    """What comes while a client does not read is merged, not lost, and not kept as events."""
    start = asyncio.Event()

    def script(call: Call) -> Any:
        yield start
        for i in range(20_000):
            text = f"{i}," + "." * 500
            yield TextEvent(index=0, text=text, token_ids=(1,), num_output=i + 1)
        yield TextEvent(index=0, finish_reason="stop", num_output=20_000)

    engine = FakeEngine(script)
    client = await connect(engine)
    request = asyncio.ensure_future(client.post(TEXT, json={"prompt": "x", "stream": True}))
    await engine.until(lambda: engine.num_running == 1)
    start.set()
    response = await request
    await is_idle(engine)
    events = events_of(await response.text())
    text = "".join(c["text"] for e in events for c in e["choices"])
    assert text.replace(".", "") == "".join(f"{i}," for i in range(20_000))
    assert len(events) < 1000


async def test_http_1_0_clients_get_streams_without_chunks(connect: Connect) -> None:
    client = await connect()
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(
        b"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: 28\r\n\r\n"
        b'{"prompt":"x","stream":true}'
    )
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert events_of(body.decode())[0]["choices"][0]["text"] == "Hi!"
    writer.close()


async def test_requests_can_be_logged_without_their_text(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "xylite.http")
    client = await connect(enable_log_requests=True)
    headers = {"X-Request-Id": "r1"}
    await client.post(TEXT, json={"prompt": "secret"}, headers=headers)
    (line,) = [r.getMessage() for r in caplog.records if "r1" in r.getMessage()]
    assert line.startswith("request r1: complete, 6 prompt tokens, 3 output tokens, ")
    assert "secret" not in caplog.text


async def test_many_streams_cut_at_random_leave_nothing(connect: Connect) -> None:
    rng = random.Random(7)
    step = asyncio.Event()

    def script(call: Call) -> list[Item]:
        return [step, *paused(said("abcdefghij"))]

    engine = FakeEngine(script)
    client = await connect(engine)

    async def one(cut: bool) -> str | None:
        response = await client.post(TEXT, json={"prompt": "x", "stream": True})
        received = b""
        at = rng.randrange(1, 1500)
        while chunk := await response.content.read(rng.randrange(1, 200)):
            received += chunk
            if cut and len(received) >= at:
                response.close()
                return None
        return "".join(e["choices"][0]["text"] for e in events_of(received.decode()))

    work = [asyncio.ensure_future(one(i % 4 == 0)) for i in range(60)]
    await engine.until(lambda: engine.num_running == 60)
    step.set()
    results = await asyncio.gather(*work)
    assert [r for r in results if r is not None] == ["abcdefghij"] * 45
    await is_idle(engine)
    assert all(call.is_closed for call in engine.calls)
    tasks = {t.get_coro().__qualname__ for t in asyncio.all_tasks()}
    assert not [t for t in tasks if "FakeStream" in t or "close" in t]
