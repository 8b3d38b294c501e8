"""`bench serve` against xylite's own HTTP API, with an engine that tests script."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.http.fake_engine import Call, FakeEngine, Item, paused, said
from xylite.bench.serve import BenchConfig, goodput_limits, load, pairs, run
from xylite.config import ServerConfig
from xylite.errors import ConfigError, EngineError, Overloaded
from xylite.http import make_app

Start = Callable[..., Awaitable[int]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """start(application) -> port of a server on 127.0.0.1."""
    servers: list[TestServer] = []

    async def make(app: web.Application) -> int:
        server = TestServer(app, host="127.0.0.1")
        await server.start_server()
        servers.append(server)
        assert server.port is not None
        return server.port

    yield make
    for server in servers:
        await server.close()


def speaking(call: Call) -> list[Item]:
    """One character per token, up to max_tokens, each sent by itself."""
    return paused(said("a" * (call.params.max_tokens or 1), params=call.params, finish="length"))


def app(engine: FakeEngine, **config: Any) -> web.Application:
    return make_app(engine, ServerConfig(**config))


async def test_random_completions_are_counted_exactly(start: Start, tmp_path: Path, capsys: Any):
    engine = FakeEngine(speaking)
    config = BenchConfig(
        port=await start(app(engine)),
        num_prompts=20,
        random_input_len=30,
        random_output_len=7,
        ignore_eos=True,
        max_concurrency=4,
        num_warmups=2,
        save_detailed=True,
        metadata=("machine=here",),
        result_dir=str(tmp_path),
        result_filename="out.json",
    )
    assert await run(config) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["completed"], result["failed"]) == (20, 0)
    assert result["total_input_tokens"] == 20 * 30
    assert result["total_output_tokens"] == 20 * 7
    assert result["input_lens"] == [30] * 20
    assert {len(gaps) for gaps in result["itls"]} == {6}
    assert result["generated_texts"] == ["a" * 7] * 20
    assert (result["machine"], result["model_id"]) == ("here", "fake")
    assert result["max_concurrent_requests"] <= 4
    assert len(engine.calls) == 22
    assert all(c.params.ignore_eos and c.params.temperature == 0 for c in engine.calls)
    assert "Successful requests:                     20" in capsys.readouterr().out


async def test_chats_are_sent_as_text_and_the_role_chunk_is_no_token(start: Start, tmp_path: Path):
    engine = FakeEngine(speaking)
    config = BenchConfig(
        port=await start(app(engine)),
        backend="openai-chat",
        num_prompts=3,
        random_input_len=5,
        random_output_len=4,
        save_detailed=True,
        result_dir=str(tmp_path),
        result_filename="out.json",
    )
    assert await run(config) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["output_lens"] == [4, 4, 4]
    assert [len(gaps) for gaps in result["itls"]] == [3, 3, 3]
    assert len(engine.renders[0]["messages"][0]["content"].split()) == 5


async def test_no_more_requests_run_at_a_time_than_asked_for(start: Start):
    most = 0

    def watching(call: Call) -> list[Item]:
        nonlocal most
        most = max(most, engine.num_running)
        return speaking(call)

    engine = FakeEngine(watching)
    port = await start(app(engine))
    common = {"random_input_len": 5, "random_output_len": 5}
    assert await run(BenchConfig(port=port, num_prompts=12, max_concurrency=3, **common)) == 0
    assert most == 3


async def test_failures_are_counted_shown_and_decide_the_exit_code(start: Start, capsys: Any):
    engine = FakeEngine(speaking)
    port = await start(app(engine))
    engine.refuse = Overloaded("the queue is full")
    assert await run(BenchConfig(port=port, num_prompts=3, random_input_len=5)) == 1
    out = capsys.readouterr()
    assert "Failed requests:                         3" in out.out
    assert "3 x HTTP 503" in out.err


async def test_an_error_in_the_middle_of_a_stream_is_a_failure(start: Start, capsys: Any):
    def failing(call: Call) -> list[Item]:
        return [*paused(said("ab", finish=None)), EngineError("it broke")]

    port = await start(app(FakeEngine(failing)))
    assert await run(BenchConfig(port=port, num_prompts=2, random_input_len=5)) == 1
    assert "it broke" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
async def test_as_many_warmups_are_sent_as_asked_for_with_prompts_that_are_not_measured(
    start: Start, backend: str
):
    engine = FakeEngine(speaking)
    config = BenchConfig(
        port=await start(app(engine)),
        backend=backend,
        num_prompts=2,
        random_input_len=20,
        random_prefix_len=20,
        random_output_len=2,
        num_warmups=5,
    )
    assert await run(config) == 0
    prompts: list[Any] = [call.ids for call in engine.calls]
    if backend == "openai-chat":
        prompts = [asked["messages"][0]["content"] for asked in engine.renders]
    assert len(prompts) == 5 + 2
    warm, measured = prompts[:5], prompts[5:]
    assert {len(p) for p in warm} == {len(p) for p in measured}
    assert {p[0] for p in warm}.isdisjoint(p[0] for p in measured)


async def test_numbers_are_shown_although_the_result_cannot_be_written(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("")
    config = BenchConfig(
        port=await start(app(FakeEngine(speaking))),
        num_prompts=2,
        random_input_len=5,
        random_output_len=2,
        result_dir=str(tmp_path / "file"),
        save_result=True,
    )
    with pytest.raises(EngineError, match="cannot write"):
        await run(config)
    assert "Successful requests:                     2" in capsys.readouterr().out


async def test_an_error_page_in_another_encoding_is_a_failure_like_others(
    start: Start, capsys: pytest.CaptureFixture[str]
):
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def page(_: web.Request) -> web.Response:
        return web.Response(status=502, body="\u00fc".encode("latin-1"), content_type="text/html")

    other = web.Application()
    other.add_routes([web.get("/v1/models", models), web.post("/v1/completions", page)])
    config = BenchConfig(port=await start(other), num_prompts=2, random_input_len=5)
    assert await run(config) == 1
    assert "2 x HTTP 502" in capsys.readouterr().err


async def test_key_and_headers_and_extra_body_are_sent(start: Start):
    engine = FakeEngine(speaking)
    port = await start(app(engine, api_key=("secret",)))
    common = {"port": port, "num_prompts": 1, "random_input_len": 5, "random_output_len": 2}
    with pytest.raises(EngineError, match="HTTP 401"):
        await run(BenchConfig(**common))
    extra = {"cache_salt": "s", "temperature": 0.5}
    assert await run(BenchConfig(**common, api_key="secret", extra_body=extra)) == 0
    assert await run(BenchConfig(**common, header=("Authorization=Bearer secret",))) == 0
    assert engine.calls[0].cache_salt == "s"
    assert engine.calls[0].params.temperature == 0.5


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
async def test_a_base_url_may_be_the_one_that_clients_of_openai_get(start: Start, end: str):
    port = await start(app(FakeEngine(speaking)))
    config = BenchConfig(
        base_url=f"http://127.0.0.1:{port}{end}",
        num_prompts=1,
        random_input_len=5,
        random_output_len=2,
    )
    assert await run(config) == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"base_url": "127.0.0.1:8000"}, "--base-url must begin with http:// or https://"),
        ({"base_url": "ftp://host"}, "--base-url must begin with"),
        ({"base_url": "http://"}, "--base-url must begin with"),
        ({"header": ("a=b\nc",)}, "--header: 'a' holds a line break"),
        ({"api_key": "secret\n"}, "--header: 'Authorization' holds a line break"),
        ({"base_url": "http://127.0.0.1:99999"}, "--base-url: .* is no URL: Port out of range"),
        ({"base_url": "http://[::1"}, "--base-url: .* is no URL"),
        ({"endpoint": "v1/completions"}, "--endpoint must begin with /"),
        ({"goodput": ("ttft:-1",)}, "--goodput: ttft needs a number of ms above 0, got '-1'"),
        ({"metadata": ("machine",)}, "--metadata: expected NAME=VALUE, got 'machine'"),
    ],
)
async def test_what_can_never_be_sent_is_refused_at_once(wrong: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        await run(BenchConfig(**wrong))


async def test_a_server_that_does_not_answer_is_an_error_in_time(unused_tcp_port: int):
    config = BenchConfig(port=unused_tcp_port, ready_check_timeout_sec=0)
    async with asyncio.timeout(10):
        with pytest.raises(EngineError, match="no answer"):
            await run(config)


async def test_who_waits_for_a_server_is_told_so_once(
    unused_tcp_port: int, capsys: pytest.CaptureFixture[str]
):
    config = BenchConfig(port=unused_tcp_port, ready_check_timeout_sec=0.6)
    with pytest.raises(EngineError, match="no answer"):
        await run(config)
    assert capsys.readouterr().err.count("waiting up to 0.6 s for http://127.0.0.1:") == 1


async def test_requests_are_sent_when_they_are_due(start: Start, tmp_path: Path):
    rows = [{"prompt": [400], "max_tokens": 2, "arrival": t} for t in (0.0, 1.0, 2.0)]
    (tmp_path / "w.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = BenchConfig(
        port=await start(app(FakeEngine(speaking))),
        dataset_name="custom",
        dataset_path=str(tmp_path / "w.jsonl"),
        trace_speed=10.0,
        save_detailed=True,
        result_dir=str(tmp_path),
        result_filename="out.json",
    )
    assert await run(config) == 0
    starts = json.loads((tmp_path / "out.json").read_text())["start_times"]
    assert starts[1] - starts[0] >= 0.09
    assert starts[2] - starts[0] >= 0.19


def test_a_trace_without_a_rate_is_replayed_as_recorded():
    path = Path(__file__).parent.parent.parent / "bench" / "traces" / "azure2023_code_400.csv"
    config = BenchConfig(dataset_name="trace", dataset_path=str(path), num_prompts=20)
    _, times = load(config)
    assert times[-1] > 0
    assert times == [item.arrival_s for item in load(config)[0]]


def test_a_data_set_in_a_file_needs_the_file():
    with pytest.raises(ConfigError, match="--dataset-name custom needs --dataset-path"):
        load(BenchConfig(dataset_name="custom"))


def test_limits_and_pairs_say_what_is_wrong_with_them():
    assert goodput_limits(["ttft:500", "tpot:50.5"]) == {"ttft": 500, "tpot": 50.5}
    assert pairs(["a=b=c", "d="], "=", "header") == {"a": "b=c", "d": ""}
    number = "--goodput: ttft needs a number of ms above 0, got "
    wrong = [
        ([f"ttft:{x}"], f"^{number}'{x}'$") for x in ("x", "", "nan", "inf", "-5", "0", "1e999")
    ]
    for words, said_ in (*wrong, (["itl:3"], "'itl'"), (["ttft"], "NAME:VALUE")):
        with pytest.raises(ConfigError, match=said_):
            goodput_limits(words)
