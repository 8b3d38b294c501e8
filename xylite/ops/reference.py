"""The meaning of every op, in plain torch: any dtype, float64 included, and any shape.

Kernels are compared with this file. It also serves: on the CPU it is what `ops/cpu.py` replaces
piece by piece. Rules that hold for all functions here:

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
from xylite.ops import (
    Activation,
    AttentionKind,
    Batch,
    DenseKV,
    Device,
    KVCache,
    Ops,
    SampleBatch,
    SamplerState,
)


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


# Sampling


def sample(
    logits: Tensor, batch: SampleBatch, state: SamplerState | None, mask: Tensor | None
) -> Tensor:
    """The token of each row of logits [R, V], [R] int64. The logits are consumed.

    V must be the number of ids that have a meaning: the caller cuts padding columns off.
    mask [rows, ceil(V / 32)] int32, bit t % 32 of word t // 32 = token t allowed; see `mask_row`.

    The order is vLLM's: mask, sparse bias and bans, penalties (repetition as in transformers over
    prompt and output, then frequency and presence over the output), temperature, min_p, top_k,
    top_p. Rows at temperature 0 take the largest logit, the lowest id among equals. Others take
    the first id whose cumulated probability, in id order, exceeds the row's uniform. Values equal
    to the last one that top_k or top_p keeps are kept too, so a result never depends on how a sort
    breaks ties. A row is computed from itself alone: neighbours and the batch flags change no bit.
    A row that allows nothing gives some id of the vocabulary.
    """
    logits = logits.to(_wide(logits.dtype))
    if mask is not None:
        logits = logits.masked_fill_(~_allowed(mask, batch.mask_row, logits.shape[1]), -torch.inf)
    logits.index_put_(
        (batch.bias_row, batch.bias_token), batch.bias_value.to(logits.dtype), accumulate=True
    )
    if batch.penalised:
        logits = _penalised(logits, batch, state)
    best = logits.argmax(-1)
    if batch.greedy:
        return best
    hot = batch.temperature > 0
    # Measured from the row's maximum, no temperature however small overflows.
    top = logits.gather(1, best[:, None])
    heat = torch.where(hot, batch.temperature, 1.0).to(logits.dtype)
    logits = logits.sub_(top).div_(heat[:, None])
    if batch.filtered:
        (rows,) = torch.where(hot & _filters(batch))
        logits[rows] = _filtered(
            logits[rows], batch.top_k[rows], batch.top_p[rows], batch.min_p[rows]
        )
    total = logits.softmax(-1).to(torch.float64).cumsum(-1)
    target = batch.uniform.to(torch.float64)[:, None] * total[:, -1:]
    drawn = torch.searchsorted(total, target, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
    return torch.where(hot, drawn, best)


def _allowed(mask: Tensor, mask_row: Tensor, num_ids: int) -> Tensor:
    """[R, V] bool of the rows' bit masks; rows without one allow everything."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    words = mask[mask_row.clamp(min=0)]
    allowed = (words[:, :, None] >> bits & 1).bool().flatten(1)[:, :num_ids]
    return allowed | (mask_row < 0)[:, None]


def _penalised(logits: Tensor, batch: SampleBatch, state: SamplerState | None) -> Tensor:
    """Logits after repetition, frequency and presence penalties."""
    assert state is not None, "penalties need the sampler's token counts"
    row = batch.state_row.clamp(min=0)
    counted = (batch.state_row >= 0)[:, None]
    count = state.count[row] * counted
    one = count.new_ones(batch.seen_row.shape[0])
    count.index_put_((batch.seen_row, batch.seen_token), one, accumulate=True)
    known = (count > 0) | (state.in_prompt[row] & counted)
    repetition = batch.repetition_penalty.to(logits.dtype)[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(known, repeated, logits)
    logits = logits - batch.frequency_penalty.to(logits.dtype)[:, None] * count
    return logits - batch.presence_penalty.to(logits.dtype)[:, None] * (count > 0)


def _filters(batch: SampleBatch) -> Tensor:
    return (batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0)


def _filtered(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Scaled logits [n, V] (maximum 0) with what min_p, top_k and top_p leave out at -inf."""
    num_ids = logits.shape[1]
    floor = min_p.to(logits.dtype).log()[:, None]
    logits = logits.masked_fill(logits < floor, -torch.inf)
    top_k = torch.where((top_k <= 0) | (top_k > num_ids), num_ids, top_k)
    # The few best decide nearly always; a full sort of the vocabulary is the exception.
    for width in (min(1024, num_ids), num_ids):
        best = logits.topk(width).values
        kth = best.gather(1, (top_k.clamp(max=width) - 1)[:, None].long())
        kth = torch.where((top_k < num_ids)[:, None], kth, -torch.inf)
        kept = logits.masked_fill(logits < kth, -torch.inf)
        share = (best - torch.logsumexp(kept, -1, keepdim=True)).exp()
        before = share.cumsum(-1) - share
        inside = (before < top_p[:, None]) & (best >= kth) & (best > -torch.inf)
        inside[:, 0] = True  # also of a row that allows nothing, or is not finite
        last = best.gather(1, inside.sum(-1, keepdim=True) - 1)
        # Exact if the row's cut lies among the best, or nothing is cut by this row at all.
        known = (top_k <= width) | (top_k == num_ids)
        known &= ~inside[:, -1] | (top_p >= 1)
        if width == num_ids or bool(known.all()):
            break
    last = torch.where((top_p < 1)[:, None], last, -torch.inf)
    return kept.masked_fill(kept < last, -torch.inf)


def finite(x: Tensor) -> Tensor:
    """[R] bool: the row of x [R, C] has no infinity and no NaN."""
    return torch.isfinite(x).all(-1)


def verify(ids: Tensor, parent: Tensor, draft_token: Tensor, depth: Tensor) -> Tensor:
    """[R] bool: the row is its chunk's first, or its parent is accepted and drew its token.

    ids [R] drawn; parent, draft_token, depth [R] as in SampleTable.
    """
    first = parent < 0
    up = parent.clamp(min=0).long()
    match = first | (ids[up] == draft_token)
    accepted = match
    for _ in range(int(depth.max()) if depth.numel() else 0):
        accepted = match & (first | accepted[up])
    return accepted


def logprobs(logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of ids [R] and of the k most likely tokens under raw logits [R, V].

    Returns ([R] float32, ids [R, K] int32, [R, K] float32), best first, K = min(k, V). The chosen
    token's value is read from the same tensor, so it equals its own entry among the best exactly.
    """
    logp = logits.float().log_softmax(-1)
    chosen = logp.gather(1, ids.long()[:, None])[:, 0]
    top, top_ids = logp.topk(min(k, logp.shape[1]))
    return chosen, top_ids.int(), top


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
