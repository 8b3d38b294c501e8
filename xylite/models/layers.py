"""Pieces that several families share: rotary tables, KV storage, the head, GGUF's names."""

import contextlib
import math
import mmap
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from xylite.models.spec import GgufSource, ModelSpec, Rope
from xylite.ops import DenseKV, KVCache, Ops

ROPE_SLICE: Final = 4096  # positions
HUGE_PAGE: Final = 2 * 2**20  # bytes, of x86 and most of Arm


def rope_table(rope: Rope, max_len: int, *, max_position: int = 0) -> Tensor:
    """Cosine and sine of every position and frequency, [max_len, 2, rot / 2] float32.

    max_position  the model's own length; "dynamic" stretches the base only if max_len exceeds it,
                  by as much as max_len needs, the same for every position. (transformers stretches
                  with each sequence's length, which makes earlier keys wrong as it grows.)
    source        transformers, modeling_rope_utils.py: frequencies are computed in the same order
                  of float32 operations, so they are the same numbers
    """
    inv_freq, factor = _inverse_frequencies(rope, max_len, max_position)
    table = torch.empty(max_len, 2, inv_freq.shape[0])
    for start in range(0, max_len, ROPE_SLICE):  # what is computed on the way takes as much again
        end = min(start + ROPE_SLICE, max_len)
        angle = torch.arange(start, end, dtype=torch.float32)[:, None] * inv_freq
        torch.stack((angle.cos() * factor, angle.sin() * factor), 1, out=table[start:end])
    return table


def _inverse_frequencies(rope: Rope, max_len: int, max_position: int) -> tuple[Tensor, float]:
    """([rot / 2] float32, factor of cos and sin)."""
    step = torch.arange(0, rope.rot, 2, dtype=torch.float32) / max(rope.rot, 1)
    plain = 1.0 / (rope.theta**step)
    if rope.type == "linear":
        return plain / rope.factor, 1.0
    if rope.type == "divisors":
        return plain / torch.tensor(rope.divisors), 1.0
    if rope.type == "dynamic" and max_len > max_position > 0:
        stretch = rope.factor * max_len / max_position - (rope.factor - 1)
        theta = rope.theta * stretch ** (rope.rot / (rope.rot - 2))
        return 1.0 / (theta**step), 1.0
    if rope.type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.type == "yarn":
        return _yarn(rope, rope.theta**step), _yarn_factor(rope)
    return plain, 1.0


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones stay, those between blend."""
    length = rope.original_max_position
    wave = 2 * math.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (length / wave - low) / (high - low)
    between = (1 - blend) * plain / rope.factor + blend * plain
    scaled = torch.where(wave > length / low, plain / rope.factor, plain)
    inside = (wave >= length / high) & (wave <= length / low)
    return torch.where(inside, between, scaled)


def _yarn(rope: Rope, base: Tensor) -> Tensor:
    """Frequencies that turn often in the original length stay, slow ones are divided.

    source   Peng et al. 2023, arXiv 2309.00071, section 3.2
    """

    def dim_of(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return rope.rot * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rot - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp(
        (torch.arange(rope.rot // 2, dtype=torch.float32) - low) / (high - low), 0, 1
    )
    keep = 1 - ramp
    return 1.0 / (rope.factor * base) * (1 - keep) + 1.0 / base * keep


def _yarn_factor(rope: Rope) -> float:
    def of(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return of(rope.mscale) / of(rope.mscale_all_dim)
    return of(1.0)


def make_kv(
    spec: ModelSpec, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """An empty cache: per layer k and v, [N, G, P, D] of zeros; with scales if dtype is int8."""

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = _lazy_zeros(shape, dtype) if device.type == "cpu" else None
        return torch.zeros(shape, dtype=dtype, device=device) if made is None else made

    shape = (2 * spec.num_layers, num_blocks, spec.num_kv_heads, block_size)
    whole = zeros((*shape, spec.head_dim), dtype)
    if dtype != torch.int8:
        return tuple(DenseKV(whole[i], whole[i + 1]) for i in range(0, len(whole), 2))
    scales = zeros(shape, torch.float32)
    return tuple(
        DenseKV(whole[i], whole[i + 1], scales[i], scales[i + 1]) for i in range(0, len(whole), 2)
    )


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """Zeros whose memory the system gives page by page as it is used, in huge pages where it can.

    torch.zeros writes them all: seconds, and gigabytes that a small load never needs. The items of
    the first dimension are a little apart: a new block is written in all of them, and if they began
    new pages at the same block, one iteration would wait for all those pages (0.25 s where the
    machine is virtual and has to ask its host). None where the platform has no such memory.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return None
    size = math.prod(shape[1:])
    apart = size + HUGE_PAGE // shape[0] // 64 * 64 // dtype.itemsize
    num_bytes = shape[0] * apart * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape[0], apart)[:, :size].view(shape)


def kv_block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, the scales of int8 included."""
    per_head = spec.head_dim * dtype.itemsize
    if dtype == torch.int8:
        per_head += torch.float32.itemsize
    return spec.num_layers * block_size * 2 * spec.num_kv_heads * per_head


def head_logits(hidden: Tensor, head: Any, ops: Ops, cap: float = 0.0) -> Tensor:
    """Hidden states [R, C] times the head [V, C]; [R, V] float32.

    V counts the rows of the head. Models are padded: rows at and beyond the tokenizer's ids mean
    nothing. Whoever reads these logits takes `logits[:, :limits.vocab_size]` first, for sampling
    and for log-probabilities alike.
    """
    return ops.linear(hidden, head, cap=cap).float()


# Hugging Face's names -> GGUF's, within a layer. Source: gguf.tensor_mapping.
_GGUF_LAYER: Final[Mapping[str, str]] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_names(spec: ModelSpec) -> dict[str, GgufSource]:
    """Where GGUF keeps the tensors of a plain decoder, by Hugging Face's names."""
    names = {
        "model.embed_tokens.weight": GgufSource("token_embd.weight"),
        "model.norm.weight": GgufSource("output_norm.weight"),
        "lm_head.weight": GgufSource("output.weight"),
    }
    for i in range(spec.num_layers):
        for ours, theirs in _GGUF_LAYER.items():
            for kind in ("weight", "bias"):
                name = f"model.layers.{i}.{ours}.{kind}"
                names[name] = GgufSource(f"blk.{i}.{theirs}.{kind}")
    return names
