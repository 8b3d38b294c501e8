"""bench.compare: turns, disturbed runs made again, figures, tables; engines are scripts here."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer

from bench.compare import __main__ as compare
from bench.compare import child_speculation, machine, offline, online, peers, plan, report
from bench.compare.child import Start, prompts
from bench.compare.offline import EngineFailed
from bench.compare.online import Load
from bench.compare.peers import ROOT, Engine
from tests.http.fake_engine import Call, FakeEngine, Item, paused, said
from xylite.http import make_app
from xylite.runtime.speculation import StepCosts

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
        assert measure(prefill.asked) == {"tok_s": 200.0}
        assert measure(decode.asked) == {"tok_s": 3000 + 128 + 11}
        assert measure(decode.warm_up()) == {"tok_s": 3000 + 128 + 4}
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
        assert measure(prefill.asked) == {"tok_s": 32.0}
        assert measure(decode.asked) == {"tok_s": 816.0}


CT2 = """
import json
__version__ = "9.1"

class Result:
    def __init__(self, ids):
        self.sequences_ids = [ids]

class Generator:
    def __init__(self, path, **settings):
        assert json.load(open(path + "/vocabulary.json"))[700] == "t700"
        assert settings["compute_type"] == "int8_float32" and settings["intra_threads"] == 2
    def generate_batch(self, prompts, *, max_length, **settings):
        assert all(t in {f"t{i}" for i in range(1000)} for p in prompts for t in p)
        assert settings["min_length"] == max_length and settings["end_token"] == []
        return [Result([1] * max_length) for _ in prompts]
"""


def test_ctranslate2_is_asked_in_its_tokens(tmp_path: Path):
    model = tmp_path / "converted"
    model.mkdir()
    (model / "vocabulary.json").write_text(json.dumps([f"t{i}" for i in range(1000)]))
    (tmp_path / "ctranslate2.py").write_text(CT2)
    engine = peers.ctranslate2(Path(sys.executable), model, "int8_float32")
    assert "no module ctranslate2" in str(engine.available())
    assert (engine.name, engine.precision) == ("CTranslate2 int8", "int8")
    engine = replace(engine, env={"PYTHONPATH": str(tmp_path)})
    prefill, decode = offline.cases([64], [3], 5)
    with offline.session(engine, tmp_path, 2, tmp_path / "log") as (measure, versions):
        assert versions == {"ctranslate2": "9.1"}
        assert measure(prefill.asked)["tok_s"] > 0
        assert measure(decode.asked)["tok_s"] != 0
    absent = peers.ctranslate2(Path(sys.executable), tmp_path / "nowhere", "float32")
    assert "not a directory" in str(absent.available())


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


DRAFTING_CHILD = """
from bench.compare import child

def answer(model, case, seed):
    made.append((case["workload"], case["concurrency"], case["drafts"]))
    figures = {"tok_s": 1000.0 * len(made) + seed, "tpot_mean_ms": 2.0}
    return figures | ({"accepted": 50.0, "per_verify": 2.5} if case["drafts"] else {})

made = []
child.serve(lambda start: (None, {"toy": start.settings["version"]}), answer)
"""


def test_drafts_and_none_take_turns_in_one_process_after_a_warm_up(
    noise: list[float], tmp_path: Path
):
    noise += [0.0, 0.5]  # the second measurement is disturbed
    plain = toy(tmp_path, name="xylite auto")
    drafting = replace(
        peers.drafting(plain, {"method": "suffix", "num_speculative_tokens": 6}),
        child=(sys.executable, str(script(tmp_path, DRAFTING_CHILD, "drafting.py"))),
    )
    assert (drafting.name, drafting.baseline) == ("xylite auto suffix 6", "xylite auto")
    assert drafting.settings["speculative_config"]["method"] == "suffix"
    setting = plan.Setting(
        model=tmp_path, threads=0, logs=tmp_path, repeats=2, vocab_size=1000, recorder=recorder()
    )
    assert plan.check_child(setting, drafting) is None
    cases = plan.speculation_cases(["edit", "random"], [1, 8], 32)
    assert [c.name for c in cases][:3] == [
        "edit, 1 at once",
        "random, 1 at once",
        "edit, 8 at once",
    ]
    assert [c.asked["number"] for c in cases] == [8, 8, 16, 16]
    versions = plan.run_speculation(setting, plain, drafting, cases[:1])
    assert versions == {"toy": "7"}
    taken = [(s["engine"], s["repeat"], s["clean"]) for s in setting.recorder.samples]
    assert taken == [
        ("xylite auto", 0, True),
        ("xylite auto suffix 6", 0, False),
        ("xylite auto suffix 6", 0, True),
        ("xylite auto suffix 6", 1, True),
        ("xylite auto", 1, True),
    ]
    # Two calls came before, and each has a number of its own.
    figures = [s["figures"]["tok_s"] for s in setting.recorder.samples]
    assert figures == [3002, 4003, 5004, 6005, 7006]


@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_two_engines_answer_alike_and_one_of_them_drafts(
    monkeypatch: pytest.MonkeyPatch,
):
    # Draft tokens cost nothing: so they are made however busy this machine is.
    monkeypatch.setattr(StepCosts, "knows", lambda self, num_tokens: True)
    monkeypatch.setattr(StepCosts, "seconds", lambda self, sizes: [1.0] * len(sizes))
    monkeypatch.setattr(StepCosts, "largest_trial", 10**6)
    settings = {"num_blocks": 160, "max_model_len": 2048, "dtype": "float32"}
    config = {"method": "ngram", "num_speculative_tokens": 4}
    engines, versions = child_speculation.load(
        Start("demo", settings | {"speculative_config": config}, 0)
    )
    try:
        assert "torch" in versions
        for workload in plan.WORKLOADS:
            (case,) = plan.speculation_cases([workload], [2], 12, 2)
            plain, drafting = (
                child_speculation.answer(engines, {**case.asked, "drafts": drafts}, drafts)
                for drafts in (0, 1)
            )
            assert set(plain) == {"tok_s", "tpot_mean_ms"}
            assert set(drafting) == {*plain, "accepted", "per_verify"}
            assert min(*plain.values(), drafting["tok_s"]) > 0
            if workload == "quote":
                assert drafting["accepted"] > 30 and drafting["per_verify"] > 1.3
    finally:
        engines.close()


# The whole


def test_results_name_no_folders():
    assert compare._without_folder("/home/me/w.gguf") == "w.gguf"
    assert compare._without_folder("bf16=/home/me/w.gguf") == "bf16=w.gguf"
    assert compare._without_folder("--decode") == "--decode"


def test_this_machine_is_described():
    found = machine.describe()
    assert found["cpu"] and found["cores"] >= 1 and found["memory_gib"] > 0
