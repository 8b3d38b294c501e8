"""The meaning of every op, in plain torch: any dtype, float64 included, and any shape.

Kernels are compared with this file, and with `ops/shared/sampling.py`, which draws its tokens. It
also serves: on the CPU it is what `ops/cpu.py` replaces piece by piece. Rules that hold for all
functions:

- Sums that decide precision (norms, softmax, epilogues) run in float32, or in float64 if given it,
  and are rounded to the input's dtype once.
- A KV leaf that is consumed is written in place and returned.
- T = 0, S = 0 and R = 0 are ordinary.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from xylite import config, tree
from xylite.errors import ConfigError
from xylite.host_memory import host_memory
from xylite.ops import Activation, AttentionKind, Batch, DenseKV, Device, KVCache, Ops
from xylite.ops.shared.sampling import finite, sample, verify


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


# Linear layers


def pack_linear(w: Tensor, gated: bool = False) -> Tensor:
    """The leaf of a weight [N, K] (or of E of them, [E, N, K]): the tensor itself."""
    return w


def act_dtype(dtype: torch.dtype) -> torch.dtype:
    """Activations have the weights' dtype."""
    return dtype


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    """Rows of the table [V, C] for tokens [T]; [T, C]."""
    return F.embedding(tokens, table)


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    act: Activation | None = None,
    cap: float = 0.0,
) -> Tensor:
    """x [T, K] @ w.T + bias, then one of the epilogues; see `ops.Linear`."""
    return _epilogue(F.linear(x, w, bias), residual, act, cap)


def _epilogue(y: Tensor, residual: Tensor | None, act: Activation | None, cap: float) -> Tensor:
    if act is not None:
        y = gated_act(y, act)
    if cap:
        y = (cap * torch.tanh(y.to(_wide(y.dtype)) / cap)).to(y.dtype)
    return y if residual is None else y + residual


def grouped_linear(
    x: Tensor,
    w: Tensor,
    expert_of: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    act: Activation | None = None,
    cap: float = 0.0,
) -> Tensor:
    """`linear` where row t of x [T, K] meets the weight w[e] and bias[e], e = expert_of[t].

    w          [E, N, K]
    expert_of  [T], each in [0, E)
    bias       [E, N]
    """
    y = x.new_empty(x.shape[0], w.shape[1])
    for e in range(w.shape[0]):
        (rows,) = torch.where(expert_of == e)
        y[rows] = F.linear(x[rows], w[e], None if bias is None else bias[e])
    return _epilogue(y, residual, act, cap)


def gated_act(x: Tensor, kind: Activation) -> Tensor:
    """act(x[:, :F]) * x[:, F:] of x [T, 2 F]; [T, F]."""
    gate, up = x.to(_wide(x.dtype)).chunk(2, -1)
    gate = F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")
    return (gate * up).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, w: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual) * w, x + residual), [T, C] each; residual None = 0.

    The norm is of the sum before it is rounded to x's dtype.
    """
    if residual is None:
        return _rms_norm(x, w, eps).to(x.dtype), x
    total = x.to(_wide(x.dtype)) + residual
    return _rms_norm(total, w, eps).to(x.dtype), total.to(x.dtype)


def _rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """In at least float32, not rounded."""
    x = x.to(_wide(x.dtype))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


# Attention


def qk_norm_rope_append(
    qkv: Tensor,
    positions: Tensor,
    rope: Tensor,
    kv: DenseKV,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, DenseKV]:
    """Norm and turn q and k heads, write k and v; q [G, T * group, D]. See the protocol."""
    num_kv, size, dim = kv.k.shape[1:]
    heads = qkv.unflatten(-1, (-1, dim))
    q, k, v = heads.split([heads.shape[1] - 2 * num_kv, num_kv, num_kv], 1)
    turn = rope[positions]
    q, k = _turned(q, q_norm, turn, eps).to(qkv.dtype), _turned(k, k_norm, turn, eps)
    at = (slots // size, slice(None), slots % size)
    if kv.k_scale is None or kv.v_scale is None:
        kv.k[at], kv.v[at] = k.to(qkv.dtype).to(kv.k.dtype), v.to(kv.v.dtype)
    else:
        for x, pool, scales in ((k, kv.k, kv.k_scale), (v, kv.v, kv.v_scale)):
            pool[at], scale = _quantised(x.to(_wide(x.dtype)))
            scales[at] = scale.to(scales.dtype)
    packed = q.unflatten(1, (num_kv, -1)).transpose(0, 1).flatten(1, 2)
    return packed.contiguous(), kv


def _turned(x: Tensor, norm: Tensor | None, turn: Tensor, eps: float) -> Tensor:
    """Heads x [T, heads, D], normed over D, their first elements turned by turn [T, 2, rot / 2];
    in at least float32, not rounded."""
    wide = x.to(_wide(x.dtype)) if norm is None else _rms_norm(x, norm, eps)
    half = turn.shape[-1]
    cos, sin = turn[:, 0, None], turn[:, 1, None]
    a, b, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] as int8, ties up, and the scales [...]: the largest magnitude / 127.

    Zeros have scale 1. A row that is not finite has a scale that is not either.
    """
    top = x.abs().amax(-1)
    scale = torch.where(top == 0, 1.0, top / 127)
    q = torch.floor(x / scale[..., None] + 0.5)
    return q.nan_to_num(0).to(torch.int8), scale


def attention(q: Tensor, kv: DenseKV, batch: Batch, kind: AttentionKind) -> Tensor:
    """Attention of q [G, T * group, D] over blocked KV, chunk by chunk; [T, H * D].

    Without tokens q no longer tells H; the result is [0, G * D] then.
    """
    num_kv, size, dim = kv.k.shape[1:]
    starts, lengths = batch.q_start.tolist(), batch.kv_len.tolist()
    if not starts[-1]:
        return q.new_empty(0, num_kv * dim)
    q = q.unflatten(1, (starts[-1], -1))
    out = q.new_empty(starts[-1], num_kv, q.shape[2], dim)
    trees = [_tree(batch, i, d) for i, d in enumerate(batch.num_draft.tolist())]
    wide = _wide(q.dtype)
    for i, length in enumerate(lengths):
        start, end = starts[i], starts[i + 1]
        n = end - start
        # No query of the chunk sees a key before `first`, tree or not: depth only grows by one.
        first = max(0, length - n - kind.window + 1) if kind.window else 0
        seen = None
        if n > 1 or trees[i] is not None:
            seen = _visible(n, length, trees[i], kind.window).to(q.device)[:, first:]
        blocks = batch.block_table[i, first // size : -(-length // size)]
        keep = slice(first % size, first % size + length - first)
        k, v = (
            x.transpose(0, 1).flatten(1, 2)[:, keep]
            for x in (
                _values(kv.k[blocks], kv.k_scale, blocks, wide),
                _values(kv.v[blocks], kv.v_scale, blocks, wide),
            )
        )
        out[start:end] = _softmax_attention(q[:, start:end], k, v, seen, kind)
    return out.flatten(1)


def _values(x: Tensor, scale: Tensor | None, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """What KV blocks x [n, G, P, D] stand for; int8 ones times their scale [N, G, P], in dtype."""
    return x if scale is None else x.to(dtype) * scale[blocks].to(dtype)[..., None]


def _softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, kind: AttentionKind
) -> Tensor:
    """Of q [G, n, group, D] over k, v [G, L, D] where seen [n, L]; [n, G, group, D]."""
    wide = _wide(q.dtype)
    num_kv, n, group, dim = q.shape
    rows = q.to(wide).reshape(num_kv, n * group, dim) * kind.scale
    scores = rows @ k.to(wide).transpose(1, 2)
    if kind.cap:
        scores = kind.cap * torch.tanh(scores / kind.cap)
    scores = scores.view(num_kv, n, group, -1)
    if seen is not None:
        scores = scores.masked_fill_(~seen[None, :, None], -torch.inf)
    mixed = scores.softmax(-1).view(num_kv, n * group, -1) @ v.to(wide)
    return mixed.view(num_kv, n, group, dim).transpose(0, 1).to(q.dtype)


def _tree(batch: Batch, i: int, num: int) -> Tensor | None:
    """Mask of chunk i's tree of `num` draft tokens, [num, num] bool; None if it has no tree."""
    start = int(batch.bias_start[i])
    if start < 0 or not num:
        return None
    return batch.tree_mask[start : start + num * num].view(num, num).cpu()


def _visible(n: int, length: int, mask: Tensor | None, window: int) -> Tensor:
    """Which of `length` keys each of a chunk's n queries sees, [n, length] bool.

    Draft tokens of a tree stand, for the window, at their depth: where they will be if accepted.
    """
    key = torch.arange(length)
    seen = key <= key[length - n :, None]
    if mask is not None:
        num = mask.shape[0]
        seen[n - num :, length - num :] = mask
        key[length - num :] = length - num - 1 + mask.sum(-1)
    if window:
        seen &= key[length - n :, None] - key < window
    return seen


# KV storage


def _rows(kv: KVCache, change: Callable[[Tensor], None]) -> KVCache:
    for leaf in tree.leaves(kv):
        change(leaf)
    return kv


def move_slots(kv: KVCache, src: Tensor, dst: Tensor) -> KVCache:
    """The cache with slots src [n] copied to dst [n]; all are read before any is written."""

    def move(x: Tensor) -> None:
        size = x.shape[2]
        x[dst // size, :, dst % size] = x[src // size, :, src % size]

    return _rows(kv, move)


def copy_blocks(kv: KVCache, src: Tensor, dst: Tensor) -> KVCache:
    """The cache with blocks src [n] copied to dst [n]; all are read before any is written."""

    def copy(x: Tensor) -> None:
        x[dst] = x[src]

    return _rows(kv, copy)


def zero_blocks(kv: KVCache, blocks: Tensor) -> KVCache:
    """The cache with these blocks cleared."""

    def clear(x: Tensor) -> None:
        x[blocks] = 0

    return _rows(kv, clear)


def all_reduce(x: Tensor) -> Tensor:
    """x: one rank."""
    return x


# The device


TABLE: Final = Ops(
    name="reference",
    device=Device(
        kind="cpu",
        torch_device=torch.device("cpu"),
        arch="reference",
        num_cores=config.cpu_threads(),
        block_size=16,
        block_multiple=1,
        tile_classes=(),
        memory=host_memory,
        synchronize=lambda: None,
    ),
    pack_linear=pack_linear,
    act_dtype=act_dtype,
    embed=embed,
    linear=linear,
    add_rms_norm=add_rms_norm,
    qk_norm_rope_append=qk_norm_rope_append,
    attention=attention,
    gated_act=gated_act,
    grouped_linear=grouped_linear,
    sample=sample,
    finite=finite,
    verify=verify,
    move_slots=move_slots,
    copy_blocks=copy_blocks,
    zero_blocks=zero_blocks,
    all_reduce=all_reduce,
    kv_formats=("int8",),
)


def available() -> str | None:
    """None: plain torch works everywhere."""
    return None


def table(index: int) -> Ops:
    """The reference ops on the CPU; there is one, of index 0."""
    if index:
        raise ConfigError(f"device reference:{index}: there is only index 0", param="device")
    return TABLE
