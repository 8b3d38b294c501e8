"""`python -m xylite serve` with the real model as an orchestrator sees it: start, stop, death."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.end_to_end.smollm2 import NUM, NUM_TEXT
from tests.end_to_end.variants import tiny
from tests.served import END_S, Served, servers

ENDLESS = {"prompt": NUM, "temperature": 0, "ignore_eos": True, "stream": True}

pytestmark = pytest.mark.model

# The command, with a device that fails or hangs as soon as the file named first exists.
FAULTY = """
import sys, pathlib, threading
from xylite import cli
from xylite.runtime.executor import Executor

switch, how = pathlib.Path(sys.argv[1]), sys.argv[2]
forward = Executor.forward

def faulty(self, step):
    if switch.exists():
        if how == "hangs":
            threading.Event().wait()
        raise RuntimeError("the device is gone")
    return forward(self, step)

Executor.forward = faulty
sys.exit(cli.main(sys.argv[3:]))
"""


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Any]]:
    """serve(words...) -> Served, listening; before=what to run instead of `-m xylite`."""
    async with servers() as made:

        async def start(*words: str, before: tuple[str, ...] = ("-m", "xylite")) -> Served:
            served = await made.start(
                *(sys.executable, "-W", "error", *before, "serve", *words),
                *("--port", "0", "--dtype", "float32", "--kv-cache-memory-bytes", "100Mi"),
            )
            served.url = (await served.until(r"URL +(http://127\.0\.0\.1:\d+)\n")).group(1)
            return served

        yield start


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


@pytest.fixture(scope="module")
def tiny_dir(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny(smollm2_dir, tmp_path_factory.mktemp("process") / "tiny"))


async def events_of(response: aiohttp.ClientResponse, num: int | None = None) -> list[Any]:
    """The stream's next `num` events, or all that are left; the last is "[DONE]"."""
    events: list[Any] = []
    while num is None or len(events) < num:
        line = await response.content.readline()
        if not line:
            break
        if line.startswith(b"data: "):
            data = line[6:].strip()
            events.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return events


def text_of(events: list[Any]) -> str:
    return "".join(c["text"] for e in events if isinstance(e, dict) for c in e["choices"])


async def test_sigterm_lets_streams_end_and_takes_no_new_ones(serve, session, smollm2_dir):
    server = await serve(str(smollm2_dir), "--max-num-batched-tokens", "128")
    body = {**ENDLESS, "max_tokens": 100}
    async with session.post(f"{server.url}/v1/completions", json=body) as response:
        events = await events_of(response, 5)
        async with session.get(f"{server.url}/health") as kept:
            await kept.read()
        server.process.send_signal(signal.SIGTERM)
        await server.until("stopping")
        try:
            async with session.post(f"{server.url}/v1/completions", json=body) as late:
                assert late.status == 503
                assert (await late.json())["error"]["code"] == "draining"
                assert int(late.headers["Retry-After"]) >= 1
        except aiohttp.ClientConnectionError:
            pass  # as good an answer
        events += await events_of(response)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert text_of(events).startswith(NUM_TEXT)
    assert await server.end() == 0
    assert "Traceback" not in server.log, server.log


async def test_second_sigterm_ends_at_once_and_tells_the_streams(serve, session, tiny_dir):
    server = await serve(tiny_dir, "--load-format", "dummy")
    body = {**ENDLESS, "max_tokens": 8000}
    async with session.post(f"{server.url}/v1/completions", json=body) as response:
        await events_of(response, 5)
        server.process.send_signal(signal.SIGTERM)
        await server.until("stopping")
        server.process.send_signal(signal.SIGTERM)
        events = await events_of(response)
    assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "draining"
    assert await server.end() == 128 + signal.SIGTERM
    assert "Traceback" not in server.log, server.log


async def test_streams_longer_than_the_shutdown_timeout_are_told(serve, session, tiny_dir):
    words = ("--load-format", "dummy", "--shutdown-timeout", "0.2")
    server = await serve(tiny_dir, *words)
    body = {**ENDLESS, "max_tokens": 8000}
    async with session.post(f"{server.url}/v1/completions", json=body) as response:
        await events_of(response, 5)
        server.process.send_signal(signal.SIGINT)
        events = await events_of(response)
    assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "draining"
    assert await server.end() == 0


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_lost_device_is_told_to_every_stream_and_ends_the_process(
    serve, session, tiny_dir, tmp_path, how
):
    switch = tmp_path / "switch"
    before = ("-c", FAULTY, str(switch), how)
    words = ("--load-format", "dummy", "--watchdog-timeout", "1", "--max-num-seqs", "4")
    server = await serve(tiny_dir, *words, before=before)
    body = {**ENDLESS, "max_tokens": 7000}

    async def stream():
        async with session.post(f"{server.url}/v1/completions", json=body) as response:
            events = await events_of(response, 3)
            switch.touch()
            return events + await events_of(response)

    async def status_of(method: str, path: str, **given) -> int:
        try:
            async with session.request(method, f"{server.url}{path}", **given) as response:
                return response.status
        except aiohttp.ClientConnectionError:
            return 503  # it has ended already

    streams = await asyncio.gather(*(stream() for _ in range(3)))
    for events in streams:
        assert events[-1] == "[DONE]" and "error" in events[-2]
        assert events[-2]["error"]["type"] == "server_error"
        assert "device is gone" not in events[-2]["error"]["message"]
    async with asyncio.timeout(END_S):
        while (health := await status_of("GET", "/health")) == 200:
            # A device that fails every iteration is given up after a few of them.
            assert await status_of("POST", "/v1/completions", json={"prompt": "x"}) in (500, 503)
        assert health == 503
    assert await server.end() == 1
    assert "the engine died" in server.log
