"""bench.compare: engines as processes, what they are asked and how they end."""

import json
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.compare import child, machine, offline, online, peers
from bench.compare.child import prompts
from bench.compare.offline import EngineFailed
from bench.compare.peers import Engine
from tests.bench.toy_engines import script, toy

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


def test_prompts_differ_by_seed_and_repeat_with_it():
    assert prompts(1, 2, 5, 1000) == prompts(1, 2, 5, 1000)
    assert prompts(1, 2, 5, 1000) != prompts(2, 2, 5, 1000)


def test_a_prefill_is_the_median_of_three_prompts():
    took = iter([9.0, 1.0, 4.0])
    asked: list[list[int]] = []

    def seconds(batch: list[list[int]], new: int) -> float:
        asked.extend(batch)
        return next(took)

    assert child.answer(child.Model(1000, seconds), {"prefill": 20}, 5) == {"tok_s": 5.0}
    assert [len(p) for p in asked] == [20, 20, 20]
    assert asked[0] != asked[1] != asked[2]


def test_a_child_answers_cases_and_ends(tmp_path: Path):
    with offline.session(toy(tmp_path), tmp_path, 0, tmp_path / "log") as (measure, versions):
        prefill, decode = offline.cases([100], [3], 10)
        assert versions == {"toy": "7"}
        assert measure(prefill.asked) == {"tok_s": 200.0}
        assert measure(decode.asked) == {"tok_s": 3 * 4.0}
        assert measure(decode.warm_up()) == {"tok_s": 3 * 4.0}
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
