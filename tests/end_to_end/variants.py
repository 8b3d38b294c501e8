"""Copies of the demo model with something changed; large files are links to the original."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The demo model's tokens with so little behind them that an iteration takes milliseconds.
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def variant(
    source: Path, path: Path, *, without: str = "", **changes: Callable[[Any], Any]
) -> Path:
    """A directory like `source` at `path`.

    without  a file to leave out
    changes  by the name of a JSON file without its ending: what to make of its content
    """
    path.mkdir()
    for file in source.iterdir():
        change = changes.get(file.stem) if file.suffix == ".json" else None
        if change is not None:
            content = change(json.loads(file.read_text(encoding="utf-8")))
            (path / file.name).write_text(json.dumps(content), encoding="utf-8")
        elif file.name != without:
            (path / file.name).symlink_to(file.resolve())
    return path


def tiny(source: Path, path: Path) -> Path:
    """`source` at a hundredth of its size; load it with load_format="dummy"."""
    return variant(source, path, without="model.safetensors", config=lambda c: {**c, **TINY})
