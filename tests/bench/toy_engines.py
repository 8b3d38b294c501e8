"""Engines for bench.compare that are scripts."""

import sys
from pathlib import Path
from typing import Any

from bench.compare.peers import ROOT, Engine

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


def script(tmp_path: Path, code: str, name: str = "script.py") -> Path:
    path = tmp_path / name
    path.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}")
    return path


def toy(tmp_path: Path, **fields: Any) -> Engine:
    child = (sys.executable, str(script(tmp_path, CHILD)))
    made = {"name": "toy", "precision": "bf16", "child": child, "settings": {"version": "7"}}
    return Engine(**(made | fields))
