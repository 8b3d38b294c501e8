"""A Llama directory with its channels in another order: the same function, other groups.

Quantising in groups of neighbours costs nothing where the weights were quantised in these very
groups before, as those of the demo model were. After shuffling, each group holds values of many
former groups, as it does in a checkpoint that was never quantised.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS: Final = "model.safetensors"
# (layer, length of an axis) -> the order of that axis; None = as it is.
Order = Callable[[int, int], Tensor] | None


def write_shuffled(source: Path, target: Path, seed: int = 0) -> Path:
    """Write the directory `source`, of one safetensors file, to the empty folder `target`;
    returns it.

    Shuffled are the channels between layers, the inner ones of each MLP, and those of values within
    a head. Queries and keys stay: rotary positions know their order.
    """
    for file in source.iterdir():
        if file.name != WEIGHTS:
            shutil.copy(file, target / file.name)
    config = json.loads((source / "config.json").read_text())
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}

    def order(n: int) -> Tensor:
        return torch.randperm(n, generator=generator)

    stream = order(config["hidden_size"])
    inner = [order(config["intermediate_size"]) for _ in range(config["num_hidden_layers"])]
    value = [order(size) for _ in inner]

    def of_heads(layer: int, n: int) -> Tensor:
        return (torch.arange(n // size)[:, None] * size + value[layer]).flatten()

    def as_stream(layer: int, n: int) -> Tensor:
        return stream

    def as_inner(layer: int, n: int) -> Tensor:
        return inner[layer]

    # By the part of a name before "weight" or "bias".
    orders: dict[str, tuple[Order, Order]] = {
        "embed_tokens": (None, as_stream),
        "lm_head": (None, as_stream),
        "q_proj": (None, as_stream),
        "k_proj": (None, as_stream),
        "v_proj": (of_heads, as_stream),
        "o_proj": (as_stream, of_heads),
        "gate_proj": (as_inner, as_stream),
        "up_proj": (as_inner, as_stream),
        "down_proj": (as_stream, as_inner),
        "input_layernorm": (as_stream, None),
        "post_attention_layernorm": (as_stream, None),
        "norm": (as_stream, None),
    }
    for name, tensor in load_file(source / WEIGHTS).items():
        words = name.split(".")
        layer = int(words[2]) if words[1] == "layers" else 0
        for axis, turn in zip(range(tensor.dim()), orders[words[-2]]):
            if turn is not None:
                tensor = tensor.index_select(axis, turn(layer, tensor.shape[axis]))
        made[name] = tensor.contiguous()
    save_file(made, target / WEIGHTS, metadata={"format": "pt"})
    return target
