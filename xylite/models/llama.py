"""Llama: Llama 1 to 3, SmolLM2 and what shares their architecture.

source   Touvron et al. 2023, arXiv 2302.13971; the names of tensors are transformers'
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from xylite import tree
from xylite.errors import ConfigError
from xylite.models import layers
from xylite.models.spec import (
    GgufSource,
    Leaf,
    ModelSpec,
    Part,
    flag,
    integer,
    real,
    rope_from_config,
)
from xylite.ops import AttentionKind, Batch, KVCache, Ops

MODEL_TYPES: Final = ("llama",)


@tree.node
class Layer:
    """qkv holds q, k and v rows, gate_up holds gate and up rows; norms and biases are vectors."""

    attn_norm: Any
    qkv: Any
    qkv_bias: Any
    out: Any
    out_bias: Any
    mlp_norm: Any
    gate_up: Any
    gate_up_bias: Any
    down: Any
    down_bias: Any


@tree.node
class Params:
    """rope [positions, 2, rot / 2]; head None = the embedding serves as the head."""

    embed: Any
    layers: tuple[Layer, ...]
    norm: Any
    head: Any
    rope: Any = None


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config.json of type llama; ConfigError names the field that is wrong."""
    width = integer(config, "hidden_size", 1, 2**20)
    num_heads = integer(config, "num_attention_heads", 1, 2**14)
    num_kv = integer(config, "num_key_value_heads", 1, 2**14, num_heads)
    if num_heads % num_kv:
        raise ConfigError(
            f"config.json: num_attention_heads ({num_heads}) is not a multiple of "
            f"num_key_value_heads ({num_kv})",
            param="model",
        )
    if config.get("head_dim") is None and width % num_heads:
        raise ConfigError(
            f"config.json: hidden_size ({width}) is not a multiple of num_attention_heads "
            f"({num_heads}), and head_dim is not given",
            param="model",
        )
    head_dim = integer(config, "head_dim", 1, 2**12, width // num_heads)
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise ConfigError(
            f"config.json: hidden_act {str(act)[:80]!r} is not supported for llama (silu is)",
            param="model",
        )
    if integer(config, "num_experts", 0, 2**16, 0):
        raise ConfigError(
            f"num_experts is {config['num_experts']}: mixtures of experts are not supported for "
            "llama",
            param="model",
        )
    num_layers = integer(config, "num_hidden_layers", 1, 2**12)
    max_position = integer(config, "max_position_embeddings", 1, 2**27, 2048)
    bias = flag(config, "attention_bias", False)
    return ModelSpec(
        family="llama",
        num_layers=num_layers,
        hidden_size=width,
        num_heads=num_heads,
        num_kv_heads=num_kv,
        head_dim=head_dim,
        intermediate_size=integer(config, "intermediate_size", 1, 2**24),
        vocab_size=integer(config, "vocab_size", 1, 2**24),
        max_position=max_position,
        act="silu",
        rms_eps=real(config, "rms_norm_eps", 0, 1, 1e-6),
        rope=rope_from_config(config, head_dim, max_position),
        tied=flag(config, "tie_word_embeddings", False),
        attention=(AttentionKind(index=0, scale=head_dim**-0.5),),
        layer_kinds=(0,) * num_layers,
        kv_groups=(tuple(range(num_layers)),),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=flag(config, "mlp_bias", False),
    )


def abstract(spec: ModelSpec) -> Params:
    """The tree of a model, with a Leaf in place of each tensor."""
    width, vocab = spec.hidden_size, spec.vocab_size
    table = (Part("model.embed_tokens.weight", vocab),)
    head = (Part("lm_head.weight", vocab),)
    return Params(
        embed=Leaf((vocab, width), ("vocab", "embed"), "embedding", table),
        layers=tuple(_abstract_layer(spec, f"model.layers.{i}.") for i in range(spec.num_layers)),
        norm=Leaf((width,), ("norm",), "norm", (Part("model.norm.weight", width),)),
        head=None if spec.tied else Leaf((vocab, width), ("vocab", "embed"), "linear", head),
    )


def _abstract_layer(spec: ModelSpec, prefix: str) -> Layer:
    width, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv = (("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv))
    gate_up = (("mlp.gate_proj", inner), ("mlp.up_proj", inner))

    def leaf(
        parts: tuple[tuple[str, int], ...], axes: tuple[str, ...], columns: int, role: Any
    ) -> Leaf:
        kind = "bias" if role == "bias" else "weight"
        rows = sum(n for _, n in parts)
        shape = (rows, columns) if columns else (rows,)
        named = tuple(Part(f"{prefix}{name}.{kind}", n) for name, n in parts)
        return Leaf(shape, axes, role, named)

    def bias(has: bool, parts: tuple[tuple[str, int], ...], axis: str) -> Leaf | None:
        return leaf(parts, (axis,), 0, "bias") if has else None

    out, down = (("self_attn.o_proj", width),), (("mlp.down_proj", width),)
    return Layer(
        attn_norm=leaf((("input_layernorm", width),), ("norm",), 0, "norm"),
        qkv=leaf(qkv, ("qkv", "embed"), width, "linear"),
        qkv_bias=bias(spec.qkv_bias, qkv, "qkv"),
        out=leaf(out, ("embed", "heads"), q, "linear"),
        out_bias=bias(spec.out_bias, out, "embed"),
        mlp_norm=leaf((("post_attention_layernorm", width),), ("norm",), 0, "norm"),
        gate_up=leaf(gate_up, ("gate_up", "embed"), width, "gated"),
        gate_up_bias=bias(spec.mlp_bias, gate_up, "gate_up"),
        down=leaf(down, ("embed", "mlp"), inner, "linear"),
        down_bias=bias(spec.mlp_bias, down, "embed"),
    )


def gguf_names(spec: ModelSpec) -> dict[str, GgufSource]:
    """Where GGUF keeps each tensor; llama.cpp reorders the rows of q and k heads."""
    names = layers.gguf_names(spec)
    for i in range(spec.num_layers):
        for part, heads in (("q_proj", spec.num_heads), ("k_proj", spec.num_kv_heads)):
            for kind in ("weight", "bias"):
                key = f"model.layers.{i}.self_attn.{part}.{kind}"
                names[key] = GgufSource(names[key].name, heads)
    return names


def with_tables(params: Params, spec: ModelSpec, max_len: int) -> Params:
    """The tree with its rotary table for positions [0, max_len)."""
    rope = layers.rope_table(spec.rope, max_len, max_position=spec.max_position)
    return dataclasses.replace(params, rope=rope)


def forward(
    params: Params, kv: KVCache, batch: Batch, spec: ModelSpec, ops: Ops
) -> tuple[Tensor, KVCache]:
    """Final hidden states [T, C] of the batch's tokens, normed, and the cache to use next; those of
    the last tokens of its chunks [num_last, C], if that is all it asks for."""
    delta, stream = ops.embed(params.embed, batch.tokens), None
    written = []
    for layer, leaf, kind in zip(params.layers, kv, spec.layer_kinds, strict=True):
        x, stream = ops.add_rms_norm(delta, stream, layer.attn_norm, spec.rms_eps)
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
        q, leaf = ops.qk_norm_rope_append(qkv, batch.positions, params.rope, leaf, batch.slots)
        written.append(leaf)
        x = ops.attention(q, leaf, batch, spec.attention[kind])
        if batch.num_last and layer is params.layers[-1]:
            # The cache is written; of what is left, the other tokens need nothing.
            assert ops.last_rows is not None
            x = ops.last_rows(x, batch.q_start, batch.num_last)
            stream = ops.last_rows(stream, batch.q_start, batch.num_last)
        delta = ops.linear(x, layer.out, layer.out_bias)
        x, stream = ops.add_rms_norm(delta, stream, layer.mlp_norm, spec.rms_eps)
        x = ops.linear(x, layer.gate_up, layer.gate_up_bias, act=spec.act)
        delta = ops.linear(x, layer.down, layer.down_bias)
    hidden, _ = ops.add_rms_norm(delta, stream, params.norm, spec.rms_eps)
    return hidden, tuple(written)


def logits(params: Params, hidden: Tensor, spec: ModelSpec, ops: Ops) -> Tensor:
    """Logits [R, V] float32 of hidden states [R, C]; see `layers.head_logits` on padding."""
    return layers.head_logits(hidden, params.embed if spec.tied else params.head, ops)
