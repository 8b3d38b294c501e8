"""`xylite bench serve`: load on a running server. Flags and output follow vLLM's."""

import asyncio
import json
import math
import random
import re
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec import Meta
from tqdm import tqdm

from xylite import console
from xylite.bench import drafts
from xylite.bench.client import ENDPOINTS, Outcome, Target, send
from xylite.bench.data import (
    Item,
    arrivals,
    as_text,
    backwards,
    cut,
    random_items,
    read_trace,
    read_workload,
)
from xylite.bench.report import METRICS, errors, measure, table
from xylite.config import Natural, Positive, about
from xylite.errors import ConfigError, EngineError
from xylite.flags import Command

INF = float("inf")


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one run."""

    backend: Annotated[
        Literal["openai", "openai-chat"],
        about("openai sends completions with token ids, openai-chat sends chats.", "server"),
    ] = "openai"
    base_url: Annotated[
        str | None, about("Server URL without /v1; wins over host and port.", "server")
    ] = None
    host: Annotated[str, about("Address of the server.", "server")] = "127.0.0.1"
    port: Annotated[int, about("Port of the server.", "server", ge=1, le=65535)] = 8000
    endpoint: Annotated[str | None, about("Path; auto is the backend's own.", "server")] = None
    model: Annotated[str | None, about("Model to ask for; auto is the first one.", "server")] = None
    api_key: Annotated[str | None, about("Key to send.", "server")] = None
    header: Annotated[tuple[str, ...], about("Header to send, as NAME=VALUE.", "server")] = ()
    extra_body: Annotated[
        dict[str, Any], about("JSON object that is merged into each request.", "server")
    ] = {}
    ready_check_timeout_sec: Annotated[
        float, about("Seconds to wait for the server to answer.", "server", ge=0)
    ] = 60.0
    request_timeout_sec: Annotated[
        float, about("Seconds of silence after which a request failed.", "server", gt=0)
    ] = 600.0
    dataset_name: Annotated[
        Literal["random", "custom", "trace"],
        about("What to send: random prompts, a workload file, or a recorded trace.", "data"),
    ] = "random"
    dataset_path: Annotated[
        str | None,
        about("The file: JSON Lines of requests, or a trace as CSV or JSON Lines.", "data"),
    ] = None
    num_prompts: Annotated[
        Positive | None, about("Requests to send; auto is 100, or the whole file.", "data")
    ] = None
    random_input_len: Annotated[Positive, about("Prompt tokens of random requests.", "data")] = 1024
    random_output_len: Annotated[Positive, about("Output tokens of random requests.", "data")] = 128
    random_range_ratio: Annotated[
        float, about("Lengths vary by this share up and down.", "data", ge=0, le=1)
    ] = 0.0
    random_prefix_len: Annotated[Natural, about("Prompt tokens that all share.", "data")] = 0
    random_vocab_size: Annotated[int, about("Random token ids are below this.", "data", ge=2)] = (
        32000
    )
    max_input_len: Annotated[
        Positive | None, about("Cut longer prompts of token ids to this.", "data")
    ] = None
    max_output_len: Annotated[Positive | None, about("Ask for at most this.", "data")] = None
    temperature: Annotated[float, about("Sent with each request.", "data", ge=0, le=2)] = 0.0
    ignore_eos: Annotated[
        bool, about("Go on past end tokens, so that lengths are exact.", "data")
    ] = False
    seed: Annotated[int, about("Seed of prompts and arrivals.", "data", ge=0)] = 0
    request_rate: Annotated[
        float,
        about(
            "Requests per second; inf sends all at once. Recorded arrival times are stretched to "
            "this rate, others are drawn.",
            "load",
            gt=0,
        ),
    ] = INF
    burstiness: Annotated[
        float,
        about("Shape of drawn gaps: 1 = Poisson, less = burstier.", "load", gt=0, le=1e6),
    ] = 1.0
    trace_speed: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        about(
            "Replay recorded arrival times, this many times as fast; auto is 1 for a trace "
            "without --request-rate.",
            "load",
        ),
    ] = None
    max_concurrency: Annotated[Positive | None, about("Most requests at a time.", "load")] = None
    num_warmups: Annotated[
        Natural,
        about(
            "Requests sent one by one before the clock starts: the first of the data with prompts "
            "read backwards, so that those of the data are in no cache.",
            "load",
        ),
    ] = 0
    percentile_metrics: Annotated[
        tuple[Literal["ttft", "tpot", "itl", "e2el"], ...], about("Latencies to report.", "result")
    ] = ("ttft", "tpot", "itl", "e2el")
    metric_percentiles: Annotated[
        tuple[Annotated[float, Meta(ge=0, le=100)], ...],
        about("Percentiles to report.", "result"),
    ] = (50, 90, 99)
    goodput: Annotated[
        tuple[str, ...],
        about("Limits in ms that a good request keeps, as ttft:500 tpot:50 e2el:9000.", "result"),
    ] = ()
    label: Annotated[str | None, about("Name of the run in the result.", "result")] = None
    metadata: Annotated[tuple[str, ...], about("KEY=VALUE to note in the result.", "result")] = ()
    save_result: Annotated[bool, about("Write the result as JSON.", "result")] = False
    save_detailed: Annotated[
        bool, about("Write every request's timings and text too.", "result")
    ] = False
    result_dir: Annotated[str, about("Folder of the result.", "result")] = "."
    result_filename: Annotated[
        str | None, about("File of the result; auto names backend, rate, model, time.", "result")
    ] = None


BENCH_SERVE: Final = Command(
    "bench serve",
    "Sends load to a running server and reports latencies and throughput.",
    (BenchConfig,),
    environment=("api_key", "host", "port"),
)


async def run(config: BenchConfig) -> int:
    """Runs the benchmark and prints the table; 1 if no request succeeded."""
    headers = pairs(config.header, "=", "header")
    if config.api_key:
        headers.setdefault("Authorization", f"Bearer {config.api_key}")
    for name, value in headers.items():
        if not f"{name}{value}".isprintable():
            raise ConfigError(f"--header: {name!r} holds a line break or the like")
    limits = goodput_limits(config.goodput)
    notes = pairs(config.metadata, "=", "metadata")
    items, times = load(config)
    base, path = base_of(config), path_of(config)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=config.request_timeout_sec)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, read_bufsize=1 << 18
    ) as session:
        first = await _first_model(session, base, headers, config.ready_check_timeout_sec)
        body: dict[str, Any] = {"temperature": config.temperature}
        if config.ignore_eos:
            body["ignore_eos"] = True
        target = Target(
            url=base + path,
            backend=config.backend,
            model=config.model or first,
            headers=headers,
            body=body | config.extra_body,
            keep_text=config.save_detailed,
        )
        for item in islice(cycle(items), config.num_warmups):
            await send(session, target, backwards(item))
        before = await drafts.fetch(session, base, headers)
        started = time.perf_counter()
        outcomes = await _send_all(session, target, items, times, config.max_concurrency)
        duration = time.perf_counter() - started
        after = before and await drafts.fetch(session, base, headers)
    result = (
        _settings(config, target.model, len(items))
        | notes
        | measure(
            outcomes,
            duration,
            metrics=config.percentile_metrics,
            percentiles=config.metric_percentiles,
            goodput=limits,
        )
    )
    result |= drafts.figures(before, after)
    text = table(result, metrics=config.percentile_metrics, percentiles=config.metric_percentiles)
    console.say(text + "\n")
    failures = errors(outcomes)
    if failures:
        console.complain(failures)
    # Last, so that a file that cannot be written takes no numbers with it.
    if config.save_result or config.save_detailed or config.result_filename:
        _save(config, result, outcomes)
    return 0 if result["completed"] else 1


def load(config: BenchConfig) -> tuple[list[Item], list[float]]:
    """What to send and when, in seconds from the start."""
    rng = random.Random(config.seed)
    if config.dataset_name == "random":
        items = random_items(
            config.num_prompts or 100,
            rng,
            input_len=config.random_input_len,
            output_len=config.random_output_len,
            range_ratio=config.random_range_ratio,
            prefix_len=config.random_prefix_len,
            vocab_size=config.random_vocab_size,
        )
    elif config.dataset_path is None:
        raise ConfigError(f"--dataset-name {config.dataset_name} needs --dataset-path")
    elif config.dataset_name == "custom":
        items = read_workload(Path(config.dataset_path))
    else:
        path = Path(config.dataset_path)
        items = read_trace(path, rng, config.random_vocab_size, config.num_prompts)
    items = cut(items[: config.num_prompts], config.max_input_len, config.max_output_len)
    if config.backend == "openai-chat":
        items = [as_text(item, rng) for item in items]
    speed = config.trace_speed
    if speed is None and config.dataset_name == "trace" and config.request_rate == INF:
        speed = 1.0
    times = arrivals(
        items, rng, rate=config.request_rate, burstiness=config.burstiness, speed=speed
    )
    return items, times


def base_of(config: BenchConfig) -> str:
    """Where paths are appended to; clients of OpenAI are given it with /v1, so that is cut off."""
    base = config.base_url or f"http://{config.host}:{config.port}"
    if not re.match(r"https?://[^/\s]", base):
        raise ConfigError(
            f"--base-url must begin with http:// or https:// and a host, got {base!r}"
        )
    try:
        urlsplit(base).port  # noqa: B018 - reading it is the check
    except ValueError as e:
        raise ConfigError(f"--base-url: {base!r} is no URL: {e}") from None
    return base.rstrip("/").removesuffix("/v1").rstrip("/")


def path_of(config: BenchConfig) -> str:
    """Where requests go, below the base."""
    path = config.endpoint or ENDPOINTS[config.backend]
    if not path.startswith("/"):
        raise ConfigError(f"--endpoint must begin with /, got {path!r}")
    return path


def goodput_limits(words: Sequence[str]) -> dict[str, float]:
    """Limits in ms by metric, from "ttft:500" and the like."""
    limits: dict[str, float] = {}
    for name, value in pairs(words, ":", "goodput").items():
        if name not in METRICS or name == "itl":
            raise ConfigError(f"--goodput: {name!r} is not one of ttft, tpot, e2el")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if not 0 < limits[name] < INF:
            raise ConfigError(f"--goodput: {name} needs a number of ms above 0, got {value!r}")
    return limits


def pairs(words: Sequence[str], sign: str, flag: str) -> dict[str, str]:
    """NAME to VALUE, from words of NAME, sign and VALUE."""
    found: dict[str, str] = {}
    for word in words:
        name, there, value = word.partition(sign)
        if not there or not name:
            raise ConfigError(f"--{flag}: expected NAME{sign}VALUE, got {word!r}")
        found[name] = value
    return found


async def _first_model(
    session: aiohttp.ClientSession, base: str, headers: Mapping[str, str], timeout_s: float
) -> str:
    """The first model the server lists, as soon as it does; EngineError if it does not in time."""
    deadline = time.monotonic() + timeout_s
    told = False
    while True:
        try:
            async with session.get(f"{base}/v1/models", headers=headers) as response:
                if response.status == 200:
                    return (await response.json())["data"][0]["id"]
                said = await response.text(errors="replace")
                problem = f"HTTP {response.status}: {said[:200]}"
                if response.status in (401, 403, 404):
                    raise EngineError(f"{base}/v1/models: {problem}")
        except (aiohttp.ClientError, TimeoutError, OSError, UnicodeError) as e:
            problem = f"{type(e).__name__}: {e}"
        except (KeyError, IndexError, ValueError, TypeError):
            problem = "the answer lists no model"
        if time.monotonic() >= deadline:
            raise EngineError(f"no answer from {base}/v1/models in {timeout_s:g} s: {problem}")
        if not told:
            console.complain(f"waiting up to {timeout_s:g} s for {base}: {problem}")
            told = True
        await asyncio.sleep(0.5)


async def _send_all(
    session: aiohttp.ClientSession,
    target: Target,
    items: Sequence[Item],
    times: Sequence[float],
    max_concurrency: int | None,
) -> list[Outcome]:
    """Sends each item at its time; beyond max_concurrency requests wait for one to end."""
    gate = asyncio.Semaphore(max_concurrency or len(items))
    start = time.perf_counter()
    # disable=None: a bar only where there is a terminal.
    with tqdm(total=len(items), disable=None, file=sys.stderr, unit="req") as bar:

        async def one(item: Item) -> Outcome:
            async with gate:
                outcome = await send(session, target, item)
            bar.update()
            return outcome

        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[Outcome]] = []
            for at, item in sorted(zip(times, items, strict=True), key=lambda pair: pair[0]):
                wait = start + at - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(one(item)))
    return [task.result() for task in tasks]


def _settings(config: BenchConfig, model: str, count: int) -> dict[str, Any]:
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": config.backend,
        "label": config.label,
        "model_id": model,
        "tokenizer_id": model,
        "dataset_name": config.dataset_name,
        "dataset_path": config.dataset_path,
        "num_prompts": count,
        "seed": config.seed,
        "request_rate": "inf" if config.request_rate == INF else config.request_rate,
        "burstiness": config.burstiness,
        "trace_speed": config.trace_speed,
        "max_concurrency": config.max_concurrency,
    }


def _save(config: BenchConfig, result: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    if config.save_detailed:
        result |= {
            "input_lens": [o.input_tokens for o in outcomes],
            "output_lens": [o.output_tokens for o in outcomes],
            "ttfts": [o.ttft for o in outcomes],
            "itls": [o.itls for o in outcomes],
            "latencies": [o.latency for o in outcomes],
            "start_times": [o.start for o in outcomes],
            "generated_texts": [o.text for o in outcomes],
            "errors": [o.error for o in outcomes],
        }
    name = config.result_filename
    if name is None:
        limit = f"-concurrency{config.max_concurrency}" if config.max_concurrency else ""
        model = result["model_id"].rsplit("/", 1)[-1]
        run = f"{config.label or config.backend}-{result['request_rate']}qps{limit}"
        name = f"{run}-{model}-{result['date']}.json"
    path = Path(config.result_dir) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result) + "\n")
    except OSError as e:
        raise EngineError(f"cannot write {path}: {e.strerror}") from None
    console.complain(f"result written to {path}")
