"""bench.compare: turns, disturbed runs made again, figures, tables; engines are scripts here."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer

from bench.compare import __main__ as compare
from bench.compare import machine, offline, online, peers, plan, render, report
from bench.compare.child import prompts
from bench.compare.offline import EngineFailed
from bench.compare.online import Load
from bench.compare.peers import ROOT, Engine
from tests.http.fake_engine import Call, FakeEngine, Item, paused, said
from xylite.http import make_app

CHILD = """
import sys, time
from bench.compare import child

class Model:
    vocab_size = 1000
    def prefill(self, prompt):
        print("noise of a library")
        assert all(300 <= t < 1000 for t in prompt)
        return 0.5
    def decode(self, prompts, new):
        if len(prompts) == 13:
            sys.exit("the model has fallen over")
        return float(len(prompts) * 1000 + len(prompts[0]) + new)

child.serve(lambda start: (Model(), {"toy": start.settings["version"]}))
"""

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def answer(self, body):
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
    def do_GET(self):
        self.answer({"data": [{"id": "toy"}]})
    def do_POST(self):
        self.answer({})
    def log_message(self, *args):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def sample(engine: str, repeat: int, tok_s: float, **fields: Any) -> dict[str, Any]:
    made = {"engine": engine, "workload": "decode 1", "repeat": repeat, "attempt": 0}
    return {**made, "figures": {"tok_s": tok_s}, "others": 0.0, "clean": True} | fields


def result(*samples: dict[str, Any], **fields: Any) -> dict[str, Any]:
    engines = [
        {"name": "xylite auto", "precision": "bf16", "is_ours": True},
        {"name": "slow", "precision": "bf16", "is_ours": False},
        {"name": "fast", "precision": "bf16", "is_ours": False},
        {"name": "small", "precision": "int4", "is_ours": False},
    ]
    found = {
        "engines": engines,
        "samples": list(samples),
        "machine": {"cpu": "A CPU", "cores": 2, "flags": ["avx2"]},
        "versions": {"slow": {"slow": "1.0"}},
        "date": "2026-01-02T03:04:05Z",
        "commit": "abc",
        "model": "m",
        "quick": False,
    }
    return found | fields


def three(engine: str, *values: float, **fields: Any) -> list[dict[str, Any]]:
    return [sample(engine, i, v, **fields) for i, v in enumerate(values)]


# Requests


def test_a_salt_keeps_equal_beginnings_equal_and_different_ones_different():
    items = read("agent", salt=0)
    salted = read("agent", salt=3)
    assert len({i.prompt[:300] for i in items}) == len({i.prompt[:300] for i in salted}) == 1
    assert len({i.prompt for i in salted}) == len({i.prompt for i in items})
    assert [i.prompt[4:] for i in salted] == [i.prompt[4:] for i in items]
    for other in (0, 1, 2):
        assert not {i.prompt[:4] for i in read("chat", other)} & {
            i.prompt[:4] for i in read("chat", 3)
        }
    assert all(0 <= t < 49152 for i in salted for t in i.prompt)


def read(trace: str, salt: int) -> list[Any]:
    return online.requests(Load(trace, 8, 64), salt, 49152)


def test_salted_ids_leave_control_tokens_alone():
    assert online.salted((1, 299, 300, 999, 500), 1, 1000)[:2] == (1, 299)
    seen = {online.salted((i,), 5, 1000)[0] for i in range(300, 1000)}
    assert seen == set(range(300, 1000))


def test_every_load_has_as_many_requests_as_it_names():
    for load in online.LOADS:
        assert len(online.requests(load, 1, 49152)) == load.limit
        assert load.limit >= load.concurrency


def test_prompts_differ_by_seed_and_repeat_with_it():
    assert prompts(1, 2, 5, 1000) == prompts(1, 2, 5, 1000)
    assert prompts(1, 2, 5, 1000) != prompts(2, 2, 5, 1000)


# Load on a server


@pytest.fixture
async def url():
    """A server that says one character per token."""

    def speaking(call: Call) -> list[Item]:
        count = 1 if call.prompt == [400] else call.params.max_tokens or 1
        return paused(said("a" * count, params=call.params, finish="length"))

    async with TestServer(make_app(FakeEngine(speaking)), host="127.0.0.1") as server:  # type: ignore
        yield str(server.make_url("")).rstrip("/")


async def test_a_load_gives_every_figure(url: str):
    items = [online.Item((65, 66), 5) for _ in range(6)]
    figures = await online.send_load(url, items, 2)
    assert set(figures) >= {"tok_s", "ttft_p50_ms", "tpot_p50_ms", "itl_p99_ms"}
    assert all(value > 0 for value in figures.values())


async def test_a_load_with_a_refused_request_fails(url: str):
    with pytest.raises(EngineFailed, match="1 of 2 requests failed: HTTP 400"):
        await online.send_load(url, [online.Item((65,), 2), online.Item((2**30,), 2)], 2)


async def test_an_answer_that_is_cut_short_fails(url: str):
    with pytest.raises(EngineFailed, match="7 tokens were asked for and 3 came"):
        await online.send_load(url, [online.Item((65,), 2), online.Item((400,), 5)], 2)


# Processes


def script(tmp_path: Path, code: str, name: str = "script.py") -> Path:
    path = tmp_path / name
    path.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}")
    return path


def toy(tmp_path: Path, **fields: Any) -> Engine:
    child = (sys.executable, str(script(tmp_path, CHILD)))
    made = {"name": "toy", "precision": "bf16", "child": child, "settings": {"version": "7"}}
    return Engine(**(made | fields))


def test_a_child_answers_cases_and_ends(tmp_path: Path):
    with offline.session(toy(tmp_path), tmp_path, 0, tmp_path / "log") as (measure, versions):
        prefill, decode = offline.cases([100], [3], 10)
        assert versions == {"toy": "7"}
        assert measure(prefill.asked) == 200.0
        assert measure(decode.asked) == 3000 + 128 + 11
        assert measure(decode.warm_up()) == 3000 + 128 + 4
    assert "noise of a library" in (tmp_path / "log").read_text()


def test_a_child_that_ends_is_a_failure_with_its_last_words(tmp_path: Path):
    with offline.session(toy(tmp_path), tmp_path, 0, tmp_path / "log") as (measure, _):
        with pytest.raises(EngineFailed, match="the model has fallen over"):
            measure({"decode": 13, "context": 1, "new": 1})


def test_llama_cpps_tools_are_asked_and_read(tmp_path: Path):
    tools = {
        "llama-server": 'import sys; print("version: 7 (abc)", file=sys.stderr)',
        "llama-bench": "import json, sys\n"
        "n = float(sys.argv[sys.argv.index('-p') + 1])\nprint(json.dumps([{'avg_ts': n / 2}]))",
        "llama-batched-bench": "import json, sys\n"
        "a = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "assert int(a['-c']) >= int(a['-npl']) * (int(a['-npp']) + int(a['-ntg']))\n"
        "print('main: log')\nprint(json.dumps({'speed_tg': float(a['-npl'] + a['-ntg'])}))",
    }
    for name, code in tools.items():
        path = tmp_path / name
        path.write_text(f"#!{sys.executable}\n{code}\n")
        path.chmod(0o755)
    (tmp_path / "w.gguf").touch()
    engine = peers.llama_cpp(tmp_path / "llama-server", tmp_path / "w.gguf", "Q8_0", 2, "-fa off")
    assert (engine.available(), engine.precision) == (None, "int8")
    prefill, decode = offline.cases([64], [8], 16)
    with offline.session(engine, tmp_path, 0, tmp_path / "log") as (measure, versions):
        assert versions == {"llama.cpp": "7 (abc)"}
        assert measure(prefill.asked) == 32.0
        assert measure(decode.asked) == 816.0


def test_a_server_is_timed_measured_and_ended(tmp_path: Path):
    command = (sys.executable, str(script(tmp_path, SERVER, "server.py")), "{port}")
    engine = toy(tmp_path, server=command)
    start = time.perf_counter()
    with online.server(engine, 0, tmp_path / "log") as server:
        assert 0 < server.first_token_s <= time.perf_counter() - start
        assert machine.rss_mib(server.process.pid) > 3
        port = int(server.url.rpartition(":")[2])
    assert server.process.returncode is not None
    with socket.socket() as s, pytest.raises(ConnectionRefusedError):
        s.connect(("127.0.0.1", port))


def test_a_server_that_ends_at_once_is_a_failure_with_its_last_words(tmp_path: Path):
    command = (sys.executable, "-c", "import sys; sys.exit('no such weights')")
    with pytest.raises(EngineFailed, match="no such weights"):
        online.Server(toy(tmp_path, server=command), 0, tmp_path / "log")


def test_measured_processes_inherit_no_thread_settings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    engine = Engine(name="e", precision="bf16", env={"A": "b"})
    free, two = engine.environment(0), engine.environment(2)
    assert not [name for name in free if name.startswith("OMP_")]
    assert free["A"] == "b"
    assert two["OMP_NUM_THREADS"] == "2"


def test_absent_peers_say_why(tmp_path: Path):
    nowhere = tmp_path / "nowhere"
    (tmp_path / "config.json").write_text(
        json.dumps({"num_attention_heads": 9, "hidden_size": 576, "num_hidden_layers": 30})
    )
    assert "does not exist" in str(peers.transformers(nowhere).available())
    assert "does not exist" in str(peers.vllm(nowhere, tmp_path, 0, ()).available())
    assert "does not exist" in str(peers.llama_cpp(nowhere, nowhere, "bf16", 0, "").available())
    python = Path(sys.executable)
    assert "has no module vllm" in str(peers.vllm(python, tmp_path, 0, ()).available())


def test_kv_memory_counts_kv_heads_only(tmp_path: Path):
    config = {"num_attention_heads": 9, "hidden_size": 576, "num_hidden_layers": 30}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 3}))
    assert peers.kv_bytes(tmp_path, 2) == 32768 * 30 * 2 * 3 * 64 * 2


# Noise


def test_own_work_is_not_others_work_and_others_work_is():
    burn = "import time\nt = time.process_time()\nwhile time.process_time() - t < 0.4: pass"
    before = machine._own_ticks()
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert machine._own_ticks() - before >= 0.35 * machine.HZ
    # A process whose parent has ended belongs to nobody here.
    orphan = subprocess.run(
        ["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"],
        capture_output=True,
        text=True,
        check=True,
    )
    pid = int(orphan.stdout)
    try:
        table = machine.processes()
        assert pid in table
        assert pid not in machine.tree(os.getpid(), table)
    finally:
        os.kill(pid, signal.SIGKILL)


def recorder(**fields: Any) -> plan.Recorder:
    return plan.Recorder(
        **({"noise": 0.1, "tries": 3, "patience_s": 0, "allow_noise": True} | fields)
    )


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Cores that others use during the runs to come; then none."""
    levels: list[float] = []

    class Watch:
        def others(self) -> float:
            return levels.pop(0) if levels else 0.0

    monkeypatch.setattr(machine, "Watch", Watch)
    monkeypatch.setattr(machine, "wait_quiet", lambda limit, patience_s: 0.0)
    return levels


def test_a_disturbed_run_is_made_again(noise: list[float]):
    noise += [0.5, 0.0]
    r = recorder()
    values = iter([1.0, 2.0, 3.0])
    r.take("e", "w", 0, lambda: {"tok_s": next(values)})
    assert [(s["figures"]["tok_s"], s["clean"]) for s in r.samples] == [(1.0, False), (2.0, True)]
    assert report.values(r.samples, "e", "w", "tok_s") == {0: 2.0}


def test_runs_that_stay_disturbed_end_and_are_marked(noise: list[float]):
    noise += [0.5] * 9
    r = recorder()
    r.take("e", "w", 0, lambda: {"tok_s": 1.0})
    assert [s["clean"] for s in r.samples] == [False] * 3


def test_a_busy_machine_is_refused_unless_noise_is_allowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(machine, "wait_quiet", lambda limit, patience_s: 1.5)
    monkeypatch.setattr(machine, "busiest", lambda: ["compiler: 1.5"])
    with pytest.raises(plan.Disturbed, match=r"1\.50 cores \(compiler: 1\.5\), the limit is 0\.1"):
        recorder(allow_noise=False).require_quiet()
    recorder().require_quiet()
    assert "compiler" in capsys.readouterr().err


def test_engines_take_turns_and_one_that_fails_does_not_stop_the_others(
    noise: list[float], tmp_path: Path
):
    broken = script(tmp_path, "sys.exit('broken')", "broken.py")
    engines = [
        toy(tmp_path, name="a"),
        toy(tmp_path, name="broken", child=(sys.executable, str(broken))),
        toy(tmp_path, name="b"),
    ]
    setting = plan.Setting(
        model=tmp_path, threads=0, logs=tmp_path, repeats=2, vocab_size=1000, recorder=recorder()
    )
    plan.run_offline(setting, engines, offline.cases([], [1, 2], 4))
    taken = [(s["engine"], s["repeat"]) for s in setting.recorder.samples]
    assert taken == [(e, r) for r in (0, 1) for e in ("a", "b") for _ in range(2)]
    assert len(setting.recorder.failures) == 2


# Figures


def test_ratios_pair_repeats_and_mark_the_best_peer_of_the_same_precision():
    found = report.ratios(
        result(
            *three("xylite auto", 20, 30, 22),
            *three("slow", 10, 10, 10),
            *three("fast", 20, 10, 20),
            *three("small", 90, 90, 90),
        )
    )
    assert [(r["peer"], r["best"]) for r in found] == [("slow", False), ("fast", True)]
    fast = found[1]
    assert (fast["ratio"], fast["low"], fast["high"]) == (1.1, 1.0, 3.0)


def test_the_best_peer_of_a_latency_is_the_lowest():
    figures = {"ttft_p50_ms": 5.0}
    found = report.ratios(
        result(
            sample("xylite auto", 0, 0, figures={"ttft_p50_ms": 4.0}),
            sample("slow", 0, 0, figures={"ttft_p50_ms": 8.0}),
            sample("fast", 0, 0, figures=figures),
        )
    )
    assert [(r["peer"], r["best"], r["ratio"]) for r in found] == [
        ("slow", False, 0.5),
        ("fast", True, 0.8),
    ]


def test_a_peer_without_the_figure_is_left_out():
    text = report.text(result(*three("xylite auto", 2, 2), *three("slow", 1, 1)))
    assert "xylite auto / slow = 2.00 (2.00 to 2.00)  <- best peer" in text
    assert "fast" not in text


def test_the_table_has_the_best_of_each_row_in_bold_and_a_dash_for_none():
    made = result(
        *three("xylite auto", 200, 210),
        *three("slow", 1, 2),
        sample("xylite auto", 0, 0, workload="start", figures={"first_token_s": 4.0}),
    )
    assert report.markdown(made) == textwrap.dedent(
        """\
        | | xylite auto | slow |
        |---|---:|---:|
        | decode 1: tok/s | **205** | 1.50 |
        | start: first token after, s | **4.00** | - |
        """
    )


def test_the_readme_gets_the_newest_full_result(tmp_path: Path):
    for name, date, quick in (
        ("a", "2026-02", False),
        ("b", "2026-01", False),
        ("c", "2026-03", True),
    ):
        made = result(*three("xylite auto", 5), date=date, quick=quick)
        (tmp_path / f"compare-{name}.json").write_text(json.dumps(made))
    assert render.newest(tmp_path) == tmp_path / "compare-a.json"
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- performance -->\nold\n<!-- /performance -->\nafter\n")
    words = ["--result", str(tmp_path / "compare-a.json"), "--readme", str(readme)]
    assert render.main(words) == 0
    once = readme.read_text()
    assert "| decode 1: tok/s | **5.00** |" in once
    assert "2 cores of A CPU" in once
    assert "old" not in once
    assert once.startswith("before\n") and once.endswith("<!-- /performance -->\nafter\n")
    assert render.main(words) == 0
    assert readme.read_text() == once


def test_a_readme_without_a_place_for_the_table_is_left_alone(tmp_path: Path):
    (tmp_path / "r.json").write_text(json.dumps(result(*three("xylite auto", 5))))
    readme = tmp_path / "README.md"
    readme.write_text("text\n")
    words = ["--result", str(tmp_path / "r.json"), "--readme", str(readme)]
    assert render.main(words) == 1
    assert readme.read_text() == "text\n"


def test_results_name_no_folders():
    assert compare._without_folder("/home/me/w.gguf") == "w.gguf"
    assert compare._without_folder("bf16=/home/me/w.gguf") == "bf16=w.gguf"
    assert compare._without_folder("--decode") == "--decode"


def test_this_machine_is_described():
    found = machine.describe()
    assert found["cpu"] and found["cores"] >= 1 and found["memory_gib"] > 0
