"""The demo model as a Hugging Face directory, weights rounded to bfloat16.

    python -m bench.model_dir DIRECTORY

Other engines read this form, so that they compute with the same weights.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from xylite import models, ops, tree
from xylite.checkpoint import open_checkpoint
from xylite.models import weights
from xylite.text.gguf_tokenizer import from_gguf


def write_directory(path: Path) -> Path:
    """Write model.safetensors (bfloat16), tokenizer.json, configs and template to a folder that
    exists; returns it."""
    checkpoint = open_checkpoint("demo")
    family, spec = models.describe(checkpoint.config)
    table = ops.load("reference")
    params = weights.load(checkpoint, spec, family, table, torch.bfloat16, max_len=1)
    tensors: dict[str, torch.Tensor] = {}
    leaves = dict(tree.named_leaves(params))
    for name, leaf in tree.named_leaves(family.abstract(spec)):
        start = 0
        for part in leaf.parts:
            rows = leaves[name][start : start + part.rows]
            tensors[part.name] = rows.to(torch.bfloat16).contiguous().clone()
            start += part.rows
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert checkpoint.gguf_metadata is not None and checkpoint.chat_template is not None
    from_gguf(checkpoint.gguf_metadata).save(str(path / "tokenizer.json"))
    for file, content in {
        "config.json": _config(checkpoint.config),
        "generation_config.json": checkpoint.generation_config,
        "tokenizer_config.json": checkpoint.tokenizer_config,
    }.items():
        (path / file).write_text(json.dumps(dict(content), default=_plain))
    (path / "chat_template.jinja").write_text(checkpoint.chat_template)
    return path


def _config(gguf: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters as config.json has them: a share of head_dim turns by position."""
    config = {**gguf, "torch_dtype": "bfloat16"}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    turning = config.pop("rope_dimension_count", head_dim)
    if turning != head_dim:
        config["partial_rotary_factor"] = turning / head_dim
    return config


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Iterable) else dataclasses.asdict(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Writes the demo model as a directory in bfloat16."
    )
    parser.add_argument("directory", type=Path)
    path = parser.parse_args().directory
    path.mkdir(parents=True, exist_ok=True)
    print(write_directory(path))


if __name__ == "__main__":
    main()
