"""The `xylite` command: exit codes, what it prints and where, start and stop of the server."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import xylite
from tests.http.fake_engine import FakeEngine
from tests.served import servers
from xylite import cli, console
from xylite.config import DRAFT_TOKENS, EngineConfig, ServerConfig
from xylite.errors import RequestError
from xylite.flags import settings
from xylite.runtime.request import Limits, SamplingParams, check_params

ROOT = Path(__file__).parent.parent

# The command with a scripted engine in place of the model.
FAKE = """
import asyncio
import sys
import threading
from tests.http.fake_engine import FakeEngine
from xylite import cli, text_engine
from xylite.errors import ConfigError, RequestError
from xylite.text.stop import check_stops

class Engine(FakeEngine):
    def __init__(self, config):
        if config.model == "broken":
            raise ConfigError("model.safetensors: tensor lm_head.weight is missing")
        super().__init__()
        self.config = config
    async def __aenter__(self):
        if self.config.model == "slow":
            print("loading", file=sys.stderr)
            await asyncio.to_thread(threading.Event().wait)
        return self
    async def __aexit__(self, *exc):
        print("engine closed", file=sys.stderr)
    async def generate(self, prompt, params):
        check_stops(params.stop)
        if params.max_tokens == 2000:
            raise RequestError("max_tokens is for another model", param="max_tokens")
        async for event in await self.submit(prompt, params):
            yield event
    async def render(self, messages, **options):
        if self.config.model == "picky":
            raise RequestError("this model has no chat template", param="messages")
        print("rendered", messages, file=sys.stderr)
        return [ord(c) for message in messages for c in message["content"]]
    def snapshot(self):
        return {**super().snapshot(), "prefix_queries": 10, "prefix_hits": 5}

text_engine.TextEngine = Engine
cli.STATS_PERIOD_S = 0.05
sys.exit(cli.main(sys.argv[1:]))
"""

Run = Callable[..., "tuple[int, str, str]"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """run(words...) -> exit code, stdout, stderr; in this process, without XYLITE_ variables."""

    def command(*words: str, **environment: str) -> tuple[int, str, str]:
        monkeypatch.setattr(cli, "environment", lambda: environment)
        code = cli.main(words)
        out = capsys.readouterr()
        return code, out.out, out.err

    return command


def fake(*words: str) -> list[str]:
    return [sys.executable, "-c", FAKE, *words]


def test_version_and_help_go_to_stdout(run: Run):
    assert run("--version") == (0, f"xylite {xylite.__version__}\n", "")
    for words in ([], ["--help"], ["-h"], ["bench"]):
        code, out, err = run(*words)
        assert (code, err) == (0, "")
        assert "xylite" in out and "bench serve" in out
    for command in ("serve", "complete", "tune", "bench serve"):
        code, out, err = run(*command.split(), "--help")
        assert (code, err) == (0, "")
        assert out.startswith(f"usage: xylite {command}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sevre"], "xylite: error: no command 'sevre'; did you mean serve?\n"),
        (["x"], "xylite: error: no command 'x'; there are serve, complete, tune, bench serve\n"),
        (["bench", "latency"], "xylite: error: no command 'bench latency'; "),
        (
            ["serve", "--max-num-seqs", "0"],
            "xylite serve: error: --max-num-seqs: expected a whole number from 1 to 65536, got '0'",
        ),
        (["serve", "--port", "http"], "--port: expected a whole number from 0 to 65535, got 'h"),
        (["serve", "--port", "65536"], "--port: expected a whole number from 0 to 65535, got '6"),
        (["serve", "--trust-remote-code"], "never runs code that comes with a model"),
        (["serve", "--max-model-length", "3"], "did you mean --max-model-len?"),
        (["bench", "serve", "--goodput", "x"], "xylite bench serve: error: --goodput"),
        (["bench", "serve", "--goodput", "ttft:nan"], "error: --goodput: ttft needs a number of"),
        (["bench", "serve", "--temperature", "inf"], "--temperature: expected a number from 0 to"),
        (
            ["complete", "m", "x", "--temperature", "5"],
            "xylite complete: error: --temperature: expected a number from 0 to 2, got '5'\n",
        ),
        (["complete", "m", "x", "--temperature", "inf"], "a number from 0 to 2, got 'inf'"),
        (["complete", "m", "x", "--temperature=-1"], "a number from 0 to 2, got '-1'"),
        (["complete", "m", "x", "--top-p", "2"], "a number above 0, at most 1, got '2'"),
        (
            ["complete", "m", "x", "--max-tokens", "0"],
            "--max-tokens: expected a whole number from 1 to 2147483647, got '0'",
        ),
        (["complete", "m", "x", "--max-tokens", "9" * 30], "from 1 to 2147483647, got '999"),
        (["complete", "m", "x", "--top-k=-2"], "from -1 to 2147483647, got '-2'"),
        (["complete", "m", "x", "--top-k", "4G"], "from -1 to 2147483647, got '4G'"),
    ],
)
def test_wrong_usage_is_one_line_on_stderr_and_code_2(run: Run, words: list[str], said: str):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_complete_takes_what_a_request_may_hold():
    """What is beyond is refused before the model is loaded, not after."""
    limits = Limits(vocab_size=9, max_model_len=9, max_kv_tokens=9)
    for name, field in settings(cli.CompleteConfig).items():
        if field.kind not in ("int", "float"):
            continue
        bounds = [bound.split() for bound in field.limits.split(" and ")]
        assert [sign[0] for sign, _ in bounds] == [">", "<"], f"{name} has a limit on both sides"
        for sign, limit in bounds:
            at, beyond = float(limit), float(limit) + (1 if sign[0] == "<" else -1)
            if field.kind == "int":
                at, beyond = int(at), int(beyond)
            if "=" in sign:
                check_params(SamplingParams(**{name: at}), limits)
            if (name, sign) != ("max_tokens", ">="):  # no tokens are for whoever scores a prompt
                with pytest.raises(RequestError, match=f"^{name} must be in"):
                    check_params(SamplingParams(**{name: beyond}), limits)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["x" * 1001], "PROMPT: This model's maximum context length is 1000 tokens."),
        (["x", "--max-tokens", "2000"], "--max-tokens: max_tokens is for another model"),
        (["x", "--stop", "a" * 2000], "--stop: stop[0] has 2000 bytes, the limit is 1024"),
        (["x", "--chat"], "--chat: this model has no chat template"),
    ],
)
def test_what_the_model_refuses_is_wrong_usage_too(words: list[str], said: str):
    child = subprocess.run(
        fake("complete", "picky", *words), capture_output=True, text=True, cwd=ROOT
    )
    assert (child.returncode, child.stdout) == (2, "")
    assert f"xylite complete: error: {said}" in child.stderr


def test_wrong_environment_is_wrong_usage(run: Run):
    code, _, err = run("serve", max_num_seqs="none")
    assert code == 2
    assert "XYLITE_MAX_NUM_SEQS" in err


@pytest.mark.parametrize("words", [["serve"], ["complete"], ["complete", "m", "text"]])
def test_a_model_that_is_not_there_is_one_line_and_code_2(words: list[str], tmp_path: Path):
    if words[-1] == "text":
        words = ["complete", str(tmp_path / "none"), "text"]
    else:
        words = [*words, str(tmp_path / "none")]
    child = subprocess.run(
        [sys.executable, "-m", "xylite", *words],
        input="x",
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert child.returncode == 2, child.stderr
    assert child.stdout == ""
    assert child.stderr.count("\n") == 1
    assert str(tmp_path / "none") in child.stderr


def test_help_loads_neither_torch_nor_the_server():
    script = (
        "import sys; from xylite.cli import main; main(['serve', '--help'])\n"
        "heavy = {'torch', 'numpy', 'aiohttp', 'tokenizers', 'uvloop'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert child.returncode == 0, child.stderr


@pytest.mark.alone
def test_help_takes_no_longer_than_ten_bare_interpreters():
    """65 ms against 15 ms where this was written; with torch it would be a second and more."""

    def seconds(*arguments: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=-3, cwd=ROOT)
        return time.perf_counter() - start

    ratios = [seconds("-m", "xylite", "--help") / seconds("-c", "pass") for _ in range(7)]
    assert sorted(ratios)[3] < 10


@pytest.fixture
async def served() -> AsyncIterator[Callable[..., Any]]:
    """served(words...) -> Served."""
    async with servers() as made:
        yield lambda *words: made.start(*fake("serve", *words))


async def test_serve_says_what_runs_where_and_its_curl_line_works(served: Callable[..., Any]):
    server = await served("my/model", "--port", "0", "--max-num-seqs", "5")
    url = (await server.until(r"URL +(http://127\.0\.0\.1:\d+)\n")).group(1)
    curl = (await server.until(r"try +curl (\S+) -H .* -d '(.*)'\n")).groups()
    assert "fake (my/model)" in server.log
    assert "64 blocks of 16 = 1024 tokens" in server.log
    assert "at most 5 sequences" in server.log
    assert curl[0] == f"{url}/v1/chat/completions"
    async with aiohttp.ClientSession() as session:
        async with session.post(curl[0], json=json.loads(curl[1])) as response:
            assert response.status == 200
            assert (await response.json())["choices"][0]["message"]["content"] == "Hi!"
    await server.until(r"generation \d+\.\d tok/s, running 0, waiting 3, KV use 25.0%")
    server.process.send_signal(signal.SIGTERM)
    assert await server.end() == 0
    assert "engine closed" in server.log
    assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_the_process_while_it_loads(
    served: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, number: int
):
    socket = tmp_path_factory.mktemp("uds") / "s"  # a socket's path must be short
    server = await served("slow", "--uds", str(socket))
    await server.until("loading\n")
    assert socket.is_socket()
    server.process.send_signal(number)
    assert await server.end() == 128 + number
    assert server.log.endswith(" INFO xylite: stopped while loading\n")
    assert list(socket.parent.iterdir()) == []


def test_a_signal_that_is_ignored_is_ignored_while_it_loads_too():
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with console.signals_end_loading():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_complete_that_loads_is_left_at_once():
    child = subprocess.Popen(
        fake("complete", "slow", "text"), stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    with child:
        assert child.stderr is not None and child.stderr.readline() == "loading\n"
        child.send_signal(signal.SIGINT)
        try:
            assert child.wait(timeout=60) == 130
        finally:
            child.kill()


def test_complete_wants_a_prompt_before_it_loads():
    for words, said in (([], "standard input is empty"), ([""], "PROMPT is empty")):
        child = subprocess.run(
            fake("complete", "slow", *words), input="", capture_output=True, text=True, cwd=ROOT
        )
        assert (child.returncode, child.stdout) == (2, "")
        assert child.stderr.startswith(f"xylite complete: error: {said}")


async def test_a_port_in_use_is_found_before_the_model_is_loaded(served: Callable[..., Any]):
    first = await served("--port", "0", "--disable-log-stats")
    port = (await first.until(r"URL +http://127\.0\.0\.1:(\d+)")).group(1)
    second = await served("broken", "--port", port)  # loading this would say so
    assert await second.end() == 1
    assert second.log == (
        f"xylite serve: error: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    )
    assert "tok/s" not in first.log


async def test_a_model_that_cannot_be_loaded_is_one_line_and_code_2(served: Callable[..., Any]):
    server = await served("broken")
    assert await server.end() == 2
    assert server.log == (
        "xylite serve: error: model.safetensors: tensor lm_head.weight is missing\n"
    )


def test_a_socket_in_the_file_system_has_a_curl_line_too():
    line = cli.example(FakeEngine(), "unix:///run/x y.sock", ServerConfig())
    assert line.startswith("curl --unix-socket '/run/x y.sock' http://localhost/v1/chat")


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("http://0.0.0.0:8000", "http://127.0.0.1:8000"),
        ("http://[::]:8000", "http://[::1]:8000"),
        ("http://:8000", "http://127.0.0.1:8000"),
        ("https://10.0.0.0:8000", "https://10.0.0.0:8000"),
    ],
)
def test_the_curl_line_names_an_address_one_can_connect_to(url: str, where: str):
    line = cli.example(FakeEngine(), url, ServerConfig())
    assert line.startswith(f"curl {where}/v1/chat/completions -H 'Content-Type")


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
async def test_the_curl_line_works_with_a_key_and_does_not_show_it(served: Callable[..., Any]):
    server = await served("--port", "0", "--api-key", "s3cret")
    line = (await server.until(r"try +(curl .*)\n")).group(1)
    assert "s3cret" not in server.log
    child = await asyncio.create_subprocess_shell(
        line, stdout=-1, stderr=-3, env={**os.environ, "XYLITE_API_KEY": "s3cret"}
    )
    out, _ = await child.communicate()
    assert child.returncode == 0
    assert json.loads(out)["choices"][0]["message"]["content"] == "Hi!"


def test_the_summary_says_quantisation_drafts_and_what_cut_the_context():
    engine = FakeEngine(max_model_len=1024)
    engine.config = EngineConfig(
        model="m", quantization="int8", speculative_config={"method": "ngram"}
    )
    text = cli.summary(engine, "http://127.0.0.1:1", ServerConfig())
    assert "weights  int8\n" in text
    assert f"drafts   ngram, up to {DRAFT_TOKENS['ngram']} tokens\n" in text
    assert "context  1024 tokens (all that KV holds), at most 128 sequences\n" in text
    assert "64 blocks of 16" in text
    plain = FakeEngine()
    plain.snapshot = lambda: {**FakeEngine.snapshot(plain), "num_blocks": 1}
    text = cli.summary(plain, "http://127.0.0.1:1", ServerConfig())
    assert "1 block of 16 = 16 tokens" in text
    assert "context  1000 tokens, at most" in text
    assert "weights" not in text and "drafts" not in text


def test_unknown_variables_warn_and_other_commands_settings_do_not(run: Run):
    code, _, err = run("complete", "/nowhere", "x", max_num_sesq="1", port="1", prompt="x")
    assert code == 2
    assert err.startswith(
        "xylite complete: warning: XYLITE_MAX_NUM_SESQ is not a setting; did you mean "
        "XYLITE_MAX_NUM_SEQS?\nxylite complete: error: "
    )


def test_bench_reads_and_names_three_variables(run: Run):
    code, _, err = run("bench", "serve", "--dataset-name", "custom", model="x", config="/nowhere")
    assert (code, err) == (
        2,
        "xylite bench serve: error: --dataset-name custom needs --dataset-path\n",
    )
    code, _, err = run("bench", "serve", port="x")
    assert (code, "XYLITE_PORT: expected a whole number from 1 to 65535" in err) == (2, True)
    _, out, _ = run("bench", "serve", "--help")
    assert "only XYLITE_API_KEY, XYLITE_HOST and XYLITE_PORT are read" in " ".join(out.split())
    assert "XYLITE_CONFIG" not in out
    _, out, _ = run("bench", "serve", "--help=all")
    assert set(re.findall(r"XYLITE_\w+", out)) == {"XYLITE_API_KEY", "XYLITE_HOST", "XYLITE_PORT"}


def snapshot(**changes: float) -> Mapping[str, Any]:
    base = {"prompt_tokens": 0, "generation_tokens": 0, "prefix_queries": 0, "prefix_hits": 0}
    return {**base, "num_running": 0, "num_waiting": 0, "kv_usage": 0.0, **changes}


def test_stats_are_rates_since_the_last_line():
    before = snapshot(prompt_tokens=100, generation_tokens=10, prefix_queries=50, prefix_hits=50)
    now = snapshot(
        prompt_tokens=300,
        generation_tokens=60,
        prefix_queries=150,
        prefix_hits=75,
        num_running=2,
        num_waiting=1,
        kv_usage=0.123,
    )
    assert cli.stats_line(before, now, 10.0) == (
        "prompt 20.0 tok/s, generation 5.0 tok/s, running 2, waiting 1, "
        "KV use 12.3%, prefix hits 25.0%"
    )


def test_no_stats_without_work():
    assert cli.stats_line(snapshot(), snapshot(kv_usage=0.5), 10.0) is None
    assert cli.stats_line(snapshot(), snapshot(num_waiting=1), 10.0) is not None


@pytest.mark.parametrize(
    ("words", "stdin"),
    [(["m", "text"], ""), (["m", "-p", "text"], ""), (["m"], "text"), (["m", "--chat"], "text")],
)
def test_complete_prints_the_text_only(words: Sequence[str], stdin: str):
    child = subprocess.run(
        fake("complete", *words), input=stdin, capture_output=True, text=True, cwd=ROOT
    )
    assert (child.returncode, child.stdout) == (0, "Hi!\n"), child.stderr
    rendered = "rendered [{'role': 'user', 'content': 'text'}]" in child.stderr
    assert rendered == ("--chat" in words)
