"""A server process, its start, and load on it with the client of `xylite bench serve`."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from bench.compare import machine
from bench.compare.offline import EngineFailed, tail
from bench.compare.peers import ROOT, Engine
from xylite.bench.client import ENDPOINTS, Outcome, Target, send
from xylite.bench.data import FIRST_ID, Item, read_workload
from xylite.bench.report import measure

TRACES: Final = ROOT / "bench" / "traces"
SALTED: Final = 4  # ids at a prompt's beginning that a salt changes
START_LIMIT_S: Final = 600.0
SETTLE_S: Final = 3.0


@dataclass(frozen=True)
class Load:
    """One online workload: the first `limit` requests of a trace, `concurrency` at a time."""

    trace: str
    concurrency: int
    limit: int

    @property
    def name(self) -> str:
        return f"{self.trace} {self.concurrency}"


LOADS: Final = (Load("chat", 1, 8), Load("chat", 8, 40), Load("rag", 4, 12), Load("agent", 8, 64))


def requests(load: Load, salt: int, vocab_size: int, max_output: int | None = None) -> list[Item]:
    """The load's requests. A salt changes their first ids, equal ones equally and different ones
    differently: a repeat finds nothing in a prefix cache, but what shares a beginning keeps it."""
    items = read_workload(TRACES / f"{load.trace}.jsonl")[: load.limit]
    return [
        replace(
            item,
            prompt=salted(item.prompt, salt, vocab_size),
            max_tokens=min(item.max_tokens, max_output or item.max_tokens),
        )
        for item in items
        if not isinstance(item.prompt, str)
    ]


def salted(ids: tuple[int, ...], salt: int, vocab_size: int) -> tuple[int, ...]:
    """The ids with the first few shifted around the vocabulary; control tokens stay."""
    span = vocab_size - FIRST_ID

    def shifted(i: int) -> int:
        return i if i < FIRST_ID else FIRST_ID + (i - FIRST_ID + 7919 * salt) % span

    return (*map(shifted, ids[:SALTED]), *ids[SALTED:])


async def send_load(url: str, items: Sequence[Item], concurrency: int) -> dict[str, float]:
    """Figures of a closed loop; EngineFailed if a request fails or is cut short."""
    target = Target(
        url=url + ENDPOINTS["openai"],
        backend="openai",
        model=await _model(url),
        headers={},
        body={"temperature": 0, "ignore_eos": True},
    )
    gate = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=300.0)
    # Some servers close a connection after a stream: each request makes its own.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, read_bufsize=1 << 18
    ) as session:

        async def one(item: Item) -> Outcome:
            async with gate:
                return await send(session, target, item)

        start = time.perf_counter()
        outcomes = await asyncio.gather(*map(one, items))
        duration = time.perf_counter() - start
    failed = [o.error for o in outcomes if o.error]
    if failed:
        raise EngineFailed(f"{len(failed)} of {len(items)} requests failed: {failed[0]}")
    asked = sum(item.max_tokens for item in items)
    got = sum(o.output_tokens for o in outcomes)
    if got != asked:
        raise EngineFailed(f"{asked} tokens were asked for and {got} came")
    result = measure(
        outcomes,
        duration,
        metrics=("ttft", "tpot", "itl"),
        percentiles=(50, 99),
        goodput={},
    )
    return {
        "tok_s": result["output_throughput"],
        "ttft_p50_ms": result["p50_ttft_ms"],
        "ttft_p99_ms": result["p99_ttft_ms"],
        "tpot_p50_ms": result["p50_tpot_ms"],
        "itl_p50_ms": result["p50_itl_ms"],
        "itl_p99_ms": result["p99_itl_ms"],
    }


async def _model(url: str) -> str:
    """The first model the server lists."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/v1/models") as response:
            return (await response.json(content_type=None))["data"][0]["id"]


class Server:
    """A running server and the seconds from its command to its first token."""

    def __init__(self, engine: Engine, threads: int, log: Path):
        self.engine = engine
        self._log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        assert engine.server is not None
        command = [word.replace("{port}", str(port)) for word in engine.server]
        start = time.perf_counter()
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env=engine.environment(threads),
                start_new_session=True,
            )
        try:
            asyncio.run(self._first_token(start + START_LIMIT_S))
        except BaseException:
            self.stop()
            raise
        self.first_token_s = time.perf_counter() - start

    async def _first_token(self, deadline: float) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                if self.process.poll() is not None:
                    raise EngineFailed(f"{self.engine.name} ended:\n{tail(self._log)}")
                try:
                    model = await _model(self.url)
                    body = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
                    async with session.post(self.url + "/v1/completions", json=body) as response:
                        if response.status == 200:
                            await response.read()
                            return
                except (aiohttp.ClientError, OSError, KeyError, IndexError, ValueError):
                    pass
                if time.perf_counter() > deadline:
                    raise EngineFailed(
                        f"{self.engine.name} gave no token in {START_LIMIT_S:g} s:\n"
                        f"{tail(self._log)}"
                    )
                await asyncio.sleep(0.05)

    def idle_rss_mib(self) -> float:
        """Memory some seconds after the start."""
        time.sleep(SETTLE_S)
        return machine.rss_mib(self.process.pid)

    def load(self, items: Sequence[Item], concurrency: int) -> dict[str, float]:
        return asyncio.run(send_load(self.url, items, concurrency))

    def stop(self) -> None:
        """End the processes of this server, and nothing else: it leads a group of its own."""
        for number, patience_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                pass
            try:
                self.process.wait(patience_s)
                return
            except subprocess.TimeoutExpired:
                continue
        raise EngineFailed(f"{self.engine.name} does not end")


@contextmanager
def server(engine: Engine, threads: int, log: Path) -> Iterator[Server]:
    """A server that ends with the block."""
    running = Server(engine, threads, log)
    try:
        yield running
    finally:
        running.stop()


def version(url: str) -> Mapping[str, Any]:
    """What /version says; {} if there is none."""

    async def ask() -> Mapping[str, Any]:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/version") as response:
                return msgspec.json.decode(await response.read()) if response.status == 200 else {}

    return asyncio.run(ask())
