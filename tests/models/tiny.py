"""Tiny random models on disk, in both formats."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from torch import Tensor

from xylite import models, tree

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def config(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, **changes}


def shapes(cfg: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor under Hugging Face's names."""
    family, spec = models.describe(cfg)
    leaves = tree.leaves(family.abstract(spec))
    return {p.name: (p.rows, *leaf.shape[1:]) for leaf in leaves for p in leaf.parts}


def tensors(cfg: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights under Hugging Face's names, none of them alike."""
    family, spec = models.describe(cfg)
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for leaf in tree.leaves(family.abstract(spec)):
        for part in leaf.parts:
            x = torch.randn(part.rows, *leaf.shape[1:], generator=generator)
            if leaf.role == "norm":
                x = 1 + 0.3 * x
            elif leaf.role == "bias":
                x = 0.3 * x
            else:
                x = 1.5 * leaf.shape[-1] ** -0.5 * x
            made[part.name] = x
    return made


def save_directory(
    path: Path, cfg: Mapping[str, Any], weights: Mapping[str, Tensor], shards: int = 1
) -> Path:
    """A Hugging Face directory, in several files with an index if shards > 1."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(cfg))
    names = sorted(weights)
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    if shards == 1:
        files = ["model.safetensors"]
    for i, file in enumerate(files):
        part = {n: weights[n].contiguous() for n in names[i::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
    if shards > 1:
        where = {n: files[i % shards] for i, n in enumerate(names)}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path


GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Name in a GGUF file of a tensor of Hugging Face's."""
    plain = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in plain:
        return plain[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_LAYER[part]}.{kind}"


def in_pairs(x: Tensor, heads: int) -> Tensor:
    """Rows of each head as llama.cpp wants them: rotary pairs side by side."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def gguf_writer(path: Path, cfg: Mapping[str, Any]) -> gguf.GGUFWriter:
    """A writer that has the hyperparameters and a vocabulary, but no tensors yet."""
    w = gguf.GGUFWriter(path, "llama")
    w.add_block_count(cfg["num_hidden_layers"])
    w.add_context_length(cfg["max_position_embeddings"])
    w.add_embedding_length(cfg["hidden_size"])
    w.add_feed_forward_length(cfg["intermediate_size"])
    w.add_head_count(cfg["num_attention_heads"])
    w.add_head_count_kv(cfg["num_key_value_heads"])
    w.add_layer_norm_rms_eps(cfg["rms_norm_eps"])
    w.add_rope_freq_base(cfg["rope_theta"])
    size = cfg.get("head_dim") or cfg["hidden_size"] // cfg["num_attention_heads"]
    w.add_key_length(size)
    w.add_rope_dimension_count(size)
    w.add_token_list([f"t{i}" for i in range(cfg["vocab_size"])])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    return w


def finish_gguf(w: gguf.GGUFWriter) -> None:
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def save_gguf(
    path: Path,
    cfg: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    kind: Kind | Callable[[str], Kind] = Kind.F32,
) -> dict[str, Tensor]:
    """A GGUF file whose matrices are stored as `kind`; returns what they dequantise to.

    kind  of all, or by name. Vectors are F32 whatever it is, as llama.cpp's converter does
    """
    w = gguf_writer(path, cfg)
    stored = {}
    for name, x in weights.items():
        heads = 0
        if ".q_proj." in name:
            heads = cfg["num_attention_heads"]
        elif ".k_proj." in name:
            heads = cfg["num_key_value_heads"]
        theirs = in_pairs(x, heads) if heads else x
        wanted = kind if isinstance(kind, Kind) else kind(name)
        raw_kind = wanted if x.dim() > 1 else Kind.F32
        raw = gguf.quantize(theirs.contiguous().numpy(), raw_kind)
        plain = raw_kind in (Kind.F32, Kind.F16)
        w.add_tensor(gguf_name(name), raw, raw_dtype=None if plain else raw_kind)
        value = torch.from_numpy(gguf.dequantize(raw, raw_kind).copy()).view_as(x)
        if heads:
            value = value.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        stored[name] = value
    finish_gguf(w)
    return stored
