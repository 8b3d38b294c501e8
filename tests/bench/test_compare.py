"""bench.compare: turns, and disturbed runs that are made again; engines are scripts here."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.compare import __main__ as compare
from bench.compare import child_speculation, machine, offline, peers, plan, report
from bench.compare.child import Start
from tests.bench.toy_engines import script, toy
from xylite.runtime.speculation import StepCosts


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


def test_results_name_no_folders():
    assert compare._without_folder("/home/me/w.gguf") == "w.gguf"
    assert compare._without_folder("bf16=/home/me/w.gguf") == "bf16=w.gguf"
    assert compare._without_folder("--decode") == "--decode"


def test_this_machine_is_described():
    found = machine.describe()
    assert found["cpu"] and found["cores"] >= 1 and found["memory_gib"] > 0
