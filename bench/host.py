"""What the host adds: planning, tables, event loop, streams. Run it alone on the machine.

    python -m bench.host [--output FILE]

plan and tabulate   time per iteration at 64 and 256 decoding sequences, and the ratio
loop gap            longest time the event loop could not run, while 200 streams flow over HTTP; of
                    all rounds
step ratio          time of an iteration while 200 streams flow over HTTP, to that of the same
                    iterations whose tokens go nowhere

The device computes with one thread here, so that loop and client have a core of their own, as they
have beside an accelerator. The model is small and random.
"""

import argparse
import asyncio
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import uvloop
from aiohttp import web

from xylite.checkpoint import open_checkpoint
from xylite.cli import settle
from xylite.config import EngineConfig, ServerConfig
from xylite.http import make_app
from xylite.runtime.blocks import KVBlocks
from xylite.runtime.commit import commit
from xylite.runtime.decomposition import Decomposition
from xylite.runtime.queues import Queues
from xylite.runtime.request import Limits, SamplingParams, make_request
from xylite.runtime.scheduler import Scheduler
from xylite.runtime.step import StepResult
from xylite.runtime.token_table import Tabulator
from xylite.text.gguf_tokenizer import from_gguf
from xylite.text_engine import TextEngine

STREAMS = 200
TOKENS = 60


def host_seconds(num_seqs: int, iterations: int = 200) -> float:
    """Median seconds to plan and tabulate an iteration of `num_seqs` decodes, task table included:
    8 KV heads of group 4, 24 cores, contexts of 50 to 1500 tokens."""
    rng = random.Random(0)
    limits = Limits(vocab_size=1000, max_model_len=8192, max_kv_tokens=8192)
    queues = Queues(KVBlocks(num_seqs * 70, 64), max_num_seqs=num_seqs, max_queued=num_seqs)
    scheduler = Scheduler(queues, budget=512)
    tasks = Decomposition(num_kv_heads=8, group=4, tile_classes=(16, 128), kv_tile=64, num_cores=24)
    tabulator = Tabulator(num_seqs, 128, 64, lambda table: (tasks(table),))
    for i in range(num_seqs):
        prompt = [rng.randrange(1000) for _ in range(rng.randint(50, 1500))]
        params = SamplingParams(max_tokens=3000, temperature=0.0)
        request = make_request(
            f"{i}", prompt, params, limits=limits, end_tokens=frozenset(), default_seed=0
        )
        queues.add(request, 0.0)
    seconds: list[float] = []
    while len(seconds) < iterations:
        start = time.perf_counter()
        plan = scheduler.plan(0.0)
        assert plan is not None
        step = tabulator.build(plan)
        took = time.perf_counter() - start
        if len(plan.chunks) == num_seqs and plan.num_tokens == num_seqs:
            seconds.append(took)
        rows = len(step.table.logit_rows)
        result = StepResult(
            np.ones(rows, np.int32),
            np.ones(rows, np.bool_),
            np.ones(len(plan.chunks), np.bool_),
            None,
            None,
        )
        commit(queues, plan, result)
    return statistics.median(seconds)


def write_small_model(path: Path) -> None:
    """config.json of a small Llama, and the demo model's tokenizer; weights are random."""
    config = {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 49152,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    metadata = open_checkpoint("demo").gguf_metadata
    assert metadata is not None
    from_gguf(metadata).save(str(path / "tokenizer.json"))


def small_engine(path: Path) -> TextEngine:
    return TextEngine(
        EngineConfig(
            model=str(path),
            load_format="dummy",
            num_threads=1,
            max_num_seqs=STREAMS,
            max_num_batched_tokens=512,
            kv_cache_memory_bytes=2**30,
            enable_prefix_caching=False,
        )
    )


def _prompt(i: int) -> list[int]:
    return [100 + (7 * i + k) % 1000 for k in range(16)]


async def _measured(engine: TextEngine) -> tuple[int, float]:
    now = engine.snapshot()
    return int(now["num_steps"]), float(now["step_seconds"])


async def step_seconds_alone(engine: TextEngine) -> float:
    """Seconds per iteration with 200 sequences whose tokens are read in this process only at the
    end."""
    steps, seconds = await _measured(engine)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
    streams = [await engine.submit(_prompt(i), params) for i in range(STREAMS)]
    while engine.snapshot()["num_running"] + engine.snapshot()["num_waiting"]:
        await asyncio.sleep(0.05)
    for stream in streams:
        await stream.aclose()
    after = await _measured(engine)
    return (after[1] - seconds) / (after[0] - steps)


async def step_seconds_streaming(engine: TextEngine, url: str) -> tuple[float, float]:
    """Seconds per iteration, and the longest gap of the event loop, while 200 streams flow."""
    gaps: list[float] = []

    async def probe() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last - 0.001)
            last = now

    steps, seconds = await _measured(engine)
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.host", "--client", url, stdout=subprocess.PIPE
    )
    watching = asyncio.create_task(probe())
    out, _ = await client.communicate()
    watching.cancel()
    got = json.loads(out)
    assert got["events"] >= STREAMS * TOKENS, got
    after = await _measured(engine)
    return (after[1] - seconds) / (after[0] - steps), max(gaps)


async def streams(rounds: int) -> dict[str, Any]:
    """Loop gap and step ratio; the two kinds of round alternate."""
    with tempfile.TemporaryDirectory() as directory:
        write_small_model(Path(directory))
        async with small_engine(Path(directory)) as engine:
            runner = web.AppRunner(make_app(engine, ServerConfig()), access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            url = f"http://127.0.0.1:{port}/v1/completions"
            await step_seconds_alone(engine)
            settle()  # as the server does
            alone: list[float] = []
            flowing: list[float] = []
            gaps: list[float] = []
            for _ in range(rounds):
                alone.append(await step_seconds_alone(engine))
                step, gap = await step_seconds_streaming(engine, url)
                flowing.append(step)
                gaps.append(gap)
            await runner.cleanup()
    return {
        "step_alone_ms": statistics.median(alone) * 1e3,
        "step_streaming_ms": statistics.median(flowing) * 1e3,
        "step_ratio": statistics.median(f / a for f, a in zip(flowing, alone, strict=True)),
        "loop_gap_ms": max(gaps) * 1e3,
    }


async def drain_streams(url: str) -> int:
    """The client: read 200 streams to their end; how many events came."""

    async def one(session: aiohttp.ClientSession, i: int) -> int:
        body = {
            "prompt": _prompt(i),
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        count = 0
        async with session.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            async for data, _ in response.content.iter_chunks():
                count += data.count(b"data: ")
        return count

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        return sum(await asyncio.gather(*(one(session, i) for i in range(STREAMS))))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="pairs of rounds (default 3)")
    parser.add_argument("--output", type=Path, help="also write the numbers there, as JSON")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.client:
        print(json.dumps({"events": asyncio.run(drain_streams(args.client))}))
        return
    sys.setswitchinterval(0.0005)  # as the server does
    few, many = host_seconds(64), host_seconds(256)
    numbers = {
        "machine": platform.processor() or platform.machine(),
        "plan_64_ms": few * 1e3,
        "plan_256_ms": many * 1e3,
        "plan_ratio": many / few,
        **uvloop.run(streams(args.rounds)),
    }
    for name, value in numbers.items():
        print(f"{name:<20} {value:.3f}" if isinstance(value, float) else f"{name:<20} {value}")
    if args.output:
        args.output.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
