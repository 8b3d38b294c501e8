"""Engines for bench.compare that are scripts."""

import sys
from pathlib import Path
from typing import Any

from bench.compare.peers import ROOT, Engine

CHILD = """
import sys, time
from bench.compare import child

def seconds(prompts, new, disturbed=[9.0, 0.5, 0.1]):
    print("noise of a library")
    assert all(300 <= t < 1000 for p in prompts for t in p)
    if len(prompts) == 13:
        sys.exit("the model has fallen over")
    if new == 1 and len(prompts) == 3:  # what comes before the first tokens takes now long, now not
        disturbed.append(disturbed.pop(0))
        return disturbed[-1]
    return 0.5 + (new - 1) / 4

child.serve(lambda start: (child.Model(1000, seconds), {"toy": start.settings["version"]}))
"""


def script(tmp_path: Path, code: str, name: str = "script.py") -> Path:
    path = tmp_path / name
    path.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}")
    return path


def toy(tmp_path: Path, **fields: Any) -> Engine:
    child = (sys.executable, str(script(tmp_path, CHILD)))
    made = {"name": "toy", "precision": "bf16", "child": child, "settings": {"version": "7"}}
    return Engine(**(made | fields))
