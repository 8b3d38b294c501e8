"""serve(): listening, draining, dying."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import ClientConnectionError, ClientSession, UnixConnector

from tests.http.fake_engine import Call, FakeEngine, Item, said
from tests.http.serving import serving
from tests.http.wire import TEXT, error_of, events_of
from xylite.config import ServerConfig
from xylite.errors import ConfigError, XyliteError
from xylite.http.listen import Listener


def holding(release: asyncio.Event) -> Any:
    """A script: some text, the rest after `release`."""

    def script(call: Call) -> list[Item]:
        return [*said("ab", finish=None), release, *said("c")]

    return script


async def test_first_signal_drains() -> None:
    release = asyncio.Event()
    engine = FakeEngine(holding(release))
    async with serving(engine) as (url, task), ClientSession() as client:
        streamed = await client.post(url + TEXT, json={"prompt": "x", "stream": True})
        received = await streamed.content.readany()
        os.kill(os.getpid(), signal.SIGTERM)
        await engine.until(lambda: engine.state == "draining")
        response = await client.get(url + "/ready")
        assert response.status == 503
        response = await client.post(url + TEXT, json={"prompt": "x"})
        await error_of(response, 503, "draining")
        assert response.headers["Connection"] == "close"
        assert response.headers["x-should-retry"] == "true"
        assert int(response.headers["Retry-After"]) == 1
        assert (await client.get(url + "/health")).status == 200
        assert not task.done()
        release.set()
        text = (received + await streamed.read()).decode()
        pieces = [c["text"] for e in events_of(text) for c in e["choices"]]
        assert "".join(pieces) == "abc"
        assert await task == 0
        with pytest.raises(ClientConnectionError):
            await client.get(url + "/health")


async def test_drain_ends_with_an_error_for_what_is_left() -> None:
    engine = FakeEngine(holding(asyncio.Event()))
    async with serving(engine, shutdown_timeout=0.1) as (url, task), ClientSession() as client:
        streamed = await client.post(url + TEXT, json={"prompt": "x", "stream": True})
        whole = asyncio.ensure_future(client.post(url + TEXT, json={"prompt": "x"}))
        await engine.until(lambda: engine.num_running == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        events = events_of(await streamed.text())
        assert events[0]["choices"][0]["text"] == "ab"
        assert events[-1]["error"]["code"] == "draining"
        await error_of(await whole, 503, "draining")
        assert await task == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_second_signal_stops_at_once(number: signal.Signals) -> None:
    engine = FakeEngine(holding(asyncio.Event()))
    async with serving(engine) as (url, task), ClientSession() as client:
        streamed = await client.post(url + TEXT, json={"prompt": "x", "stream": True})
        os.kill(os.getpid(), signal.SIGTERM)
        await engine.until(lambda: engine.state == "draining")
        os.kill(os.getpid(), number)
        events = events_of(await streamed.text())
        assert events[-1]["error"]["code"] == "draining"
        assert await task == 128 + number


async def test_dead_engine_ends_the_server_after_its_streams_know() -> None:
    engine = FakeEngine(holding(asyncio.Event()))
    async with serving(engine) as (url, task), ClientSession() as client:
        streamed = await client.post(url + TEXT, json={"prompt": "x", "stream": True})
        engine.die()
        assert events_of(await streamed.text())[-1]["error"]["code"] == "engine_dead"
        assert await task == 1


async def test_engine_that_dies_while_draining_is_still_an_error() -> None:
    engine = FakeEngine(holding(asyncio.Event()))
    async with serving(engine) as (url, task), ClientSession() as client:
        streamed = await client.post(url + TEXT, json={"prompt": "x", "stream": True})
        os.kill(os.getpid(), signal.SIGTERM)
        await engine.until(lambda: engine.state == "draining")
        engine.die()
        assert events_of(await streamed.text())[-1]["error"]["code"] == "engine_dead"
        assert await task == 1


async def test_engine_that_is_dead_when_the_drain_ends_is_an_error() -> None:
    release = asyncio.Event()
    engine = FakeEngine(holding(release))
    async with serving(engine) as (url, task), ClientSession() as client:
        streamed = await client.post(url + TEXT, json={"prompt": "x", "stream": True})
        os.kill(os.getpid(), signal.SIGTERM)
        await engine.until(lambda: engine.state == "draining")
        engine.die()
        release.set()
        await streamed.read()
        assert await task == 1


async def test_idle_connections_do_not_hold_up_the_end() -> None:
    engine = FakeEngine()
    async with serving(engine) as (url, task), ClientSession() as client:
        assert (await client.get(url + "/health")).status == 200
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(3):
            assert await task == 0


async def test_signal_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    async with serving(FakeEngine()) as (_, task):
        assert signal.getsignal(signal.SIGTERM) is not before
        os.kill(os.getpid(), signal.SIGTERM)
        assert await task == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    async with serving(FakeEngine(), uds=path) as (url, _):
        assert url == f"unix://{path}"
        async with ClientSession(connector=UnixConnector(path)) as client:
            response = await client.get("http://anything/v1/models")
            assert response.status == 200
    assert not os.path.exists(path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    async with serving(FakeEngine(), uds=path) as (url, _):
        assert url, "a socket left behind is replaced"


async def test_unix_socket_of_a_running_server_is_not_taken_from_it(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    async with serving(FakeEngine(), uds=path):
        with pytest.raises(XyliteError, match="cannot listen on .*: Address already in use"):
            async with serving(FakeEngine(), uds=path):
                pass
        async with ClientSession(connector=UnixConnector(path)) as client:
            assert (await client.get("http://anything/health")).status == 200


@pytest.mark.parametrize("name", ["", "file", "folder"])
async def test_a_path_that_can_be_no_socket_is_refused_and_nothing_is_left_there(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="^uds "):
        await Listener(ServerConfig(uds=name and str(tmp_path / name))).bind()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("kind", ["port", "uds"])
def test_address_of_a_server_that_is_still_loading_is_not_taken(
    kind: str, loop: str, tmp_path: Path, unused_tcp_port: int
) -> None:
    where = {"port": unused_tcp_port} if kind == "port" else {"uds": str(tmp_path / "s")}

    async def two() -> None:
        loading = Listener(ServerConfig(**where))
        await loading.bind()
        with pytest.raises(XyliteError, match="cannot listen on .*: Address already in use"):
            await Listener(ServerConfig(**where)).bind()
        loading.close()
        next_one = Listener(ServerConfig(**where))
        await next_one.bind()
        next_one.close()

    (asyncio.run if loop == "asyncio" else uvloop.run)(two())
    assert not list(tmp_path.iterdir())


async def test_port_is_free_again_at_once_although_a_connection_was_cut(
    unused_tcp_port: int,
) -> None:
    for _ in range(2):
        async with (
            serving(FakeEngine(), port=unused_tcp_port) as (url, _),
            ClientSession() as client,
        ):
            # The server closes first, so the remains of the connection stay with it.
            answer = await client.get(f"{url}/health", headers={"Connection": "close"})
            assert answer.status == 200


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize(
    "where",
    [{"host": h} for h in ("a..b", "\u00e4" * 80, "a" * 64 + ".b")] + [{"uds": "a\0b"}],
    ids=str,
)
def test_what_can_be_no_address_is_a_clear_error(where: dict[str, str], loop: str) -> None:
    ((name, _),) = where.items()
    listener = Listener(ServerConfig(port=0, **where))
    with pytest.raises(ConfigError, match=f"^{name} .* cannot be an address") as wrong:
        (asyncio.run if loop == "asyncio" else uvloop.run)(listener.bind())
    assert wrong.value.param == name


async def test_address_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(XyliteError, match=rf"cannot listen on 127.0.0.1:{port}") as caught:
            async with serving(FakeEngine(), port=port):
                pass
        assert not isinstance(caught.value, ConfigError), "the settings are right"


@pytest.mark.parametrize(
    "config, warns",
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_key": ("k",)}, False),
        ({"host": "127.0.0.1"}, False),
    ],
)
async def test_open_server_without_a_key_warns(
    config: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(FakeEngine(), **config):
        pass
    assert ("no API key is set" in caplog.text) is warns


async def test_broken_http_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "xylite.http")
    async with serving(FakeEngine()) as (url, _):
        port = int(url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nA B: c\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.0 400 ")
        writer.close()
    (broken,) = [r for r in caplog.records if r.name == "xylite.http.protocol"]
    assert broken.levelno == logging.INFO  # anyone could fill the log with errors
    assert not any(r.exc_info for r in caplog.records)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GARBAGE\r\n\r\n", "Invalid method encountered"),
        (b"GET / HTTP/1.1\r\n\r\n", "Missing 'Host' header"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n", "Content-Length"),
    ],
)
async def test_what_is_no_http_gets_an_error_in_the_usual_form(sent: bytes, said: str) -> None:
    status, error = await refusal(sent)
    assert status == "HTTP/1.0 400 Bad Request"
    assert said in error.pop("message")
    assert error == {"type": "invalid_request_error", "param": None, "code": "bad_request"}


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"a" * 20_000), "8190 bytes"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: %s\r\n\r\n" % (b"a" * 20_000), "8190 bytes"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % (b"A: a\r\n" * 2000), "Too many headers"),
    ],
    ids=["line", "header", "headers"],
)
async def test_headers_that_are_too_large_are_431_and_not_sent_back(sent: bytes, said: str) -> None:
    status, error = await refusal(sent)
    assert status == "HTTP/1.0 431 Request Header Fields Too Large"
    message = error.pop("message")
    assert said in message and "aaa" not in message
    assert error == {"type": "invalid_request_error", "param": None, "code": "headers_too_large"}


@pytest.mark.parametrize(
    ("head", "answers"),
    [
        ("Expect: 100-continue\r\nAuthorization: Bearer k", ["100 Continue", "200 OK"]),
        ("Expect: 100-Continue\r\nAuthorization: Bearer wrong", ["401 Unauthorized"]),
        ("Expect: miracles\r\nAuthorization: Bearer k", ["200 OK"]),
    ],
)
async def test_a_body_is_asked_for_when_it_is_wanted(head: str, answers: list[str]) -> None:
    body = json.dumps({"prompt": "a"})
    lines = (
        f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{head}\r\n"
    )
    sent = f"{lines}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
    async with serving(FakeEngine(), api_key=("k",)) as (url, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(sent)
        got = (await reader.read()).decode()
        writer.close()
    assert re.findall(r"^HTTP/1\.1 (.*)\r$", got, re.MULTILINE) == answers
    assert json.loads(got.rpartition("\r\n\r\n")[2])


async def refusal(sent: bytes) -> tuple[str, dict[str, Any]]:
    """Status line and error of what is answered to a head that cannot be read."""
    async with serving(FakeEngine()) as (url, _):
        head, body = await exchange(url, sent)
    assert re.search(r"\nX-Request-Id: [0-9a-f]{32}\r\n", head)
    assert "\nServer: xylite\r\n" in head
    assert "aiohttp" not in head
    return head.partition("\r\n")[0], json.loads(body)["error"]


async def test_a_body_that_is_not_the_gzip_it_claims_is_415_and_no_error_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "xylite.http")
    async with serving(FakeEngine()) as (url, _):
        head, body = await exchange(
            url,
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Encoding: gzip\r\n"
            b'Content-Length: 14\r\n\r\n{"prompt":"x"}',
        )
    assert head.startswith("HTTP/1.1 415 ")
    assert "must not be compressed" in body
    assert not [r for r in caplog.records if r.name == "xylite.http.protocol"]


async def exchange(url: str, sent: bytes) -> tuple[str, str]:
    """Head and body of the answer to raw bytes, after which the server must close."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    writer.write(sent)
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return head, body


async def test_the_end_of_a_drain_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "xylite.http")
    async with serving(FakeEngine()) as (_, task):
        os.kill(os.getpid(), signal.SIGTERM)
        assert await task == 0
    assert [r.getMessage() for r in caplog.records if r.name == "xylite.http"] == [
        "stopping: running requests may take 30 s",
        "stopped",
    ]


async def test_access_log_can_be_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for off in (True, False):
        caplog.clear()
        async with serving(FakeEngine(), disable_access_log=off) as (url, _):
            async with ClientSession() as client:
                await client.get(url + "/version")
        lines = [r for r in caplog.records if r.name == "xylite.access"]
        assert len(lines) == (0 if off else 1)


def test_package_imports_without_torch() -> None:
    code = "import sys, xylite.http; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
