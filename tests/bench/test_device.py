"""bench.device: one run to its end on the stand-in, and what it says when something is wrong."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import device
from bench.device_summary import summary

# What a machine without network may lack; kernels need none of it.
ABSENT = (
    "msgspec", "aiohttp", "uvloop", "tokenizers", "gguf", "jinja2", "prometheus_client", "yaml",
    "tqdm",
)  # fmt: skip
CHECK_WITHOUT = f"""
import sys
for name in {ABSENT}:
    sys.modules[name] = None
from bench import device
code = device.main(sys.argv[1:])
import bench.ops.__main__, bench.device_summary
sys.exit(code)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess, Any]:
    path = tmp_path_factory.mktemp("device") / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.device", "--stand-in", "--out", str(path)],
        cwd=device.ROOT, capture_output=True, text=True,
    )  # fmt: skip
    return done, json.loads(path.read_text())


def test_a_run_on_the_stand_in_finds_every_part_right(ran):
    done, result = ran
    assert done.returncode == 0, done.stdout + done.stderr
    assert result["failed"] == [] and result["total_seconds"] > 0
    errors = result["checks"]["errors"]
    assert len(errors) > 50 and max(errors.values()) <= 1
    assert len({row["op"] for row in result["ops"]["rows"]}) == 7
    decode = result["decode"]
    assert decode["same_ids"] and decode["model"] == "tiny"
    for way in ("graphs", "launches"):
        assert decode[way]["prefill"]["20"] > 0 and decode[way]["decode"]["4"] > 0


def test_the_summary_fits_a_screen_and_names_every_op(ran):
    done, result = ran
    text = summary(result)
    assert text in done.stdout and len(text.splitlines()) < 40
    for word in (*(row["op"] for row in result["ops"]["rows"]), "graphs", "decode 4"):
        assert word in text
    assert done.stdout.rstrip().splitlines()[-1].startswith("ok after")


def test_checks_run_with_nothing_but_torch_triton_and_numpy(tmp_path: Path):
    path = tmp_path / "checks.json"
    words = ["--stand-in", "--part", "checks", "--share", "1/9", "--out", str(path)]
    done = subprocess.run(
        [sys.executable, "-c", CHECK_WITHOUT, *words],
        cwd=device.ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    errors = json.loads(path.read_text())["errors"]
    assert errors and max(errors.values()) <= 1


@pytest.mark.parametrize(
    "result, said",
    [
        ({"checks": {"errors": {"a": 0.5, "b": 1.5}}}, ["check b: 1.5 times the error that is "]),
        ({"checks": {"errors": {"a": float("nan")}}}, ["check a: nan times"]),
        ({"checks": {"errors": {"a": "the process died"}}}, ["check a: the process died"]),
        ({"ops": {"error": "its process ended with -9"}}, ["ops: its process ended with -9"]),
        ({"ops": {"rows": [{"op": "linear", "model": "m", "name": "qkv", "error": "no"}]}},
         ["op linear m qkv: no"]),
        ({"decode": {"same_ids": False}}, ["decode: ids with graphs differ"]),
        ({"checks": {"errors": {"a": 1.0}}, "ops": {"rows": [{}]}}, []),
    ],
)  # fmt: skip
def test_everything_that_went_wrong_is_named(result, said):
    found = device.failures(result)
    assert len(found) == len(said)
    assert all(text.startswith(begin) for text, begin in zip(found, said, strict=True))


def test_a_part_that_dies_leaves_what_it_had_and_the_others_run(tmp_path, monkeypatch, capsys):
    """Parts are scripts here: one writes a result and is killed, one ends well, one never does."""
    scripts = {
        "checks": "import json, os, sys; open(sys.argv[1], 'w').write(json.dumps("
        "{'errors': {'first': 0.5, 'second': 'the process died'}})); os.abort()",
        "ops": "import sys; open(sys.argv[1], 'w').write('{\"rows\": []}')",
        "decode": "import time; time.sleep(600)",
    }

    def command(name: str, args: Any, seconds: float, file: Path, share: str) -> list[str]:
        return [sys.executable, "-c", scripts[name], str(file)]

    monkeypatch.setattr(device, "_command", command)
    monkeypatch.setattr(device, "GRACE_S", 1.0)
    path = tmp_path / "result.json"
    words = ["--stand-in", "--seconds", "3", "--jobs", "1", "--out", str(path)]
    assert device.main(words) == 1
    result = json.loads(path.read_text())
    assert result["checks"]["errors"] == {"first": 0.5, "second": "the process died"}
    assert result["ops"]["rows"] == [] and "error" not in result["ops"]
    assert result["failed"] == [
        "checks: its process ended with -6, see above",
        "decode: its process ended with -9, see above",
        "check second: the process died",
    ]
    assert "FAILED check second" in capsys.readouterr().out
