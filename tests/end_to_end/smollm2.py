"""The demo model as a Hugging Face directory, weights rounded to bfloat16, and texts it continues.

The continuations were measured with transformers (greedy; the same ids in float32, bfloat16 and
float16). Each but CHAT keeps a distance of more than 1 between its two best logits.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from xylite import models, ops, tree
from xylite.checkpoint import open_checkpoint
from xylite.models import weights
from xylite.text.gguf_tokenizer import from_gguf


def write_directory(path: Path) -> Path:
    """Write model.safetensors (bfloat16), tokenizer.json, configs and template."""
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
        "config.json": {**checkpoint.config, "torch_dtype": "bfloat16"},
        "generation_config.json": checkpoint.generation_config,
        "tokenizer_config.json": checkpoint.tokenizer_config,
    }.items():
        (path / file).write_text(json.dumps(dict(content), default=_plain))
    (path / "chat_template.jinja").write_text(checkpoint.chat_template)
    return path


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else list(value)


ALPHA = "Here is the English alphabet: ABC"
ALPHA_TEXT = "DEFGHIJKLMNOPQRSTUVWXYZ"  # 14 tokens: DEF GH I J K LM N OP QR ST UV W XY Z
ALPHA_IDS = [33203, 23960, 57, 58, 59, 34519, 62, 7627, 43323, 3127, 19539, 71, 32891, 74]
NUM = "1, 2, 3, 4, 5, 6, 7,"
NUM_TEXT = " 8, 9, 10, 11, 12, 1"  # 20 tokens
NUM_IDS = [216, 40, 28, 216, 41, 28, 216, 33, 32, 28, 216, 33, 33, 28, 216, 33, 34, 28, 216, 33]
CJK = "你好 你好 你好 你好 你好 你好"
CJK_TEXT = " 你好 你好 你好 你好"  # 20 tokens: each character is two
CZ = "ďábel ďábel ďábel ďábel ďábel"
CZ_TEXT = " ďábel ďábel ďábel ďábel ďábel"  # 20 tokens
LONG = "The quick brown fox jumps over the lazy dog. " * 40 + "The quick brown"  # 403 tokens
LONG_TEXT = " fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog"  # 16
NUMLONG = "1, 2, 3, " + ", ".join(map(str, range(4, 150))) + ","  # 636 tokens
NUMLONG_TEXT = " 150, 151, 152, 153, 154"  # 24
CHAT = [{"role": "user", "content": "What is 2+2?"}]  # 37 tokens
CHAT_TEXT = "The answer to this classic math problem is 4."  # 12 tokens with the end
HELLO = 19556  # the token "Hello"
