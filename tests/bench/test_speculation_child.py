"""With and without drafts: two engines that differ in nothing else."""

from pathlib import Path

import pytest

from bench.compare.child import Start
from bench.compare.child_speculation import Engines
from bench.host import write_small_model
from xylite.runtime.budgets import Budgets


@pytest.mark.model
def test_both_engines_have_the_same_budgets_whatever_their_iterations_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_small_model(tmp_path)
    settings = {
        "load_format": "dummy",
        "num_blocks": 32,
        "max_model_len": 512,
        "speculative_config": {"method": "ngram"},
    }
    engines = Engines(Start(str(tmp_path), settings, 1))
    try:
        plain, drafting = (e._running().scheduler for e in engines._engines)
        # After each of its iterations the one that drafts finds that it is faster.
        monkeypatch.setattr(Budgets, "observe", lambda *args: True)
        monkeypatch.setattr(Budgets, "full", property(lambda self: plain.budget + 16))
        case = {"workload": "random", "concurrency": 1, "number": 1, "new": 4, "drafts": 1}
        assert engines.measure(case, "salt")["tok_s"] > 0
        assert drafting is not plain
        assert drafting.budget == plain.budget
        assert drafting.mixed_budget == plain.mixed_budget
    finally:
        engines.close()
