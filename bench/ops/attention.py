"""The attention of one iteration, made out for a table and for what it is compared with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.ops import batches
from bench.ops.batches import Chunk
from bench.ops.shapes import Shape
from bench.ops.timing import Clock, Run
from xylite.ops import Batch, DenseKV, Ops

APPEND: Final = 4096  # tokens stored at once
TRIAL_S: Final = 0.02  # per size of tiles that is tried
SHORT: Final = 32  # chunks up to this many tokens go to torch as one padded batch


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One iteration's attention.

    q       [T, H, D]
    k, v    [sum of kv_len, G, D], the keys of one sequence after the other's
    start   [S + 1] first key of each sequence
    """

    shape: Shape
    chunks: Sequence[Chunk]
    q: Tensor
    k: Tensor
    v: Tensor
    start: Sequence[int]

    @property
    def flops(self) -> float:
        """Two products of each query with each key it sees."""
        pairs = sum(c.tokens * c.past + c.tokens * (c.tokens + 1) // 2 for c in self.chunks)
        return 4.0 * pairs * self.shape.heads * self.shape.head_dim

    @property
    def num_bytes(self) -> float:
        """Every key and value once, queries and results once."""
        return float(self.k.nbytes + self.v.nbytes + 2 * self.q.nbytes)


def make_work(
    shape: Shape, chunks: Sequence[Chunk], dtype: torch.dtype, device: torch.device
) -> Work:
    """Random values, the same for the same chunks on the same kind of device."""
    generator = torch.Generator(device=device).manual_seed(0)

    def values(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(dtype)

    start = np.concatenate(([0], np.cumsum([c.kv_len for c in chunks]))).tolist()
    q = values(sum(c.tokens for c in chunks), shape.heads, shape.head_dim)
    k, v = (values(start[-1], shape.kv_heads, shape.head_dim) for _ in range(2))
    return Work(shape, tuple(chunks), q, k, v, start)


def own(ops: Ops, work: Work) -> Run:
    """The table's attention, with everything in the pool that it reads."""
    q, kv, batch = stored(ops, work)
    kind = batches.kind_of(work.shape)
    return lambda: ops.attention(q, kv, batch, kind)


def stored(ops: Ops, work: Work) -> tuple[Tensor, DenseKV, Batch]:
    """q, pool and batch as the table wants them: keys and values are appended by its own function,
    which knows how they lie, at angle zero, so that they stay what they are."""
    shape, size = work.shape, ops.device.block_size
    place, dim = ops.device.torch_device, shape.head_dim
    table = batches.token_table(work.chunks, size, np.random.default_rng(0))
    batch = batches.on_device(table, shape, ops.device, size)
    num_blocks = sum(-(-c.kv_len // size) for c in work.chunks)
    pool = (num_blocks, shape.kv_heads, size, dim)
    kv = DenseKV(*(torch.zeros(pool, dtype=work.k.dtype, device=place) for _ in range(2)))
    angle = torch.tensor([1.0, 0.0], device=place)[:, None].expand(2, dim // 2)
    rope = angle.expand(1, 2, dim // 2).contiguous()
    act = ops.act_dtype(work.q.dtype)

    def append(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, kv: DenseKV) -> tuple[Any, DenseKV]:
        qkv = torch.cat([x.flatten(1) for x in (q, k, v)], 1).to(act)
        zero = torch.zeros(len(slots), dtype=torch.int32, device=place)
        return ops.qk_norm_rope_append(qkv, zero, rope, kv, slots)

    places = np.concatenate([np.arange(c.kv_len) for c in work.chunks])
    owner = np.repeat(np.arange(len(work.chunks)), [c.kv_len for c in work.chunks])
    slots = table.block_table[owner, places // size] * size + places % size
    slots = torch.from_numpy(slots.astype(np.int32)).to(place)
    none = torch.zeros(APPEND, shape.heads, dim, dtype=work.q.dtype, device=place)
    for i in range(0, len(slots), APPEND):
        k, v = work.k[i : i + APPEND], work.v[i : i + APPEND]
        _, kv = append(none[: len(k)], k, v, slots[i : i + APPEND], kv)
    own_keys = torch.from_numpy(_own_keys(work)).to(place)
    q, kv = append(work.q, work.k[own_keys], work.v[own_keys], batch.slots, kv)
    return q, kv, batch


def _own_keys(work: Work) -> np.ndarray:
    """[T] the row of k that belongs to each query."""
    ends = zip(work.chunks, work.start[1:], strict=True)
    return np.concatenate([np.arange(end - c.tokens, end) for c, end in ends])


def _joined(work: Work, parts: dict[int, Tensor]) -> Tensor:
    """Results [tokens, H * D] of each chunk, in order; [T, H * D]."""
    return torch.cat([parts[i] for i in range(len(work.chunks))])


def sdpa(work: Work) -> Run:
    """torch's scaled_dot_product_attention, as one would call it for such a batch: all short
    chunks as one padded batch with a mask, the heads of a group as rows of it; the others one by
    one, causal and without padding. What is padded was padded before."""
    shape, group = work.shape, work.shape.group
    short = [i for i, c in enumerate(work.chunks) if c.tokens <= SHORT]
    scale = shape.head_dim**-0.5
    first = np.concatenate(([0], np.cumsum([c.tokens for c in work.chunks]))).tolist()
    alone: list[tuple[int, Tensor, Tensor, Tensor, Any]] = []
    for i, c in enumerate(work.chunks):
        if c.tokens > SHORT:
            q = work.q[first[i] : first[i + 1]].transpose(0, 1)[None]
            k, v = (x[work.start[i] : work.start[i + 1]].transpose(0, 1) for x in (work.k, work.v))
            alone.append((i, q, k.contiguous()[None], v.contiguous()[None], _causal(c, q.device)))
    padded = _padded(work, short, first) if short else None
    mask = _mask(work, short) if short else None

    def run() -> Tensor:
        parts: dict[int, Tensor] = {}
        for i, q, k, v, lower_right in alone:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=lower_right, scale=scale, enable_gqa=group > 1
            )
            parts[i] = out[0].transpose(0, 1).flatten(1)
        if padded is not None:
            q, k, v = padded
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
            out = out.unflatten(2, (-1, group)).permute(0, 2, 1, 3, 4).flatten(2)
            for row, i in enumerate(short):
                parts[i] = out[row, out.shape[1] - work.chunks[i].tokens :]
        return _joined(work, parts)

    return run


def _causal(chunk: Chunk, device: torch.device) -> Any:
    """Each query sees what is before it: on CUDA said in a form that flash attention takes."""
    if device.type == "cuda":
        from torch.nn.attention import bias  # here, because it takes torch's compiler with it

        return bias.causal_lower_right(chunk.tokens, chunk.kv_len)
    seen = torch.ones(chunk.tokens, chunk.kv_len, dtype=torch.bool, device=device)
    return seen.tril(chunk.past)


def _padded(
    work: Work, picked: Sequence[int], first: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, G, tokens * group, D], k and v [B, G, L, D] of some chunks, padded in front so that
    all end together; first [S + 1] first token of each chunk."""
    shape = work.shape
    len_q = max(work.chunks[i].tokens for i in picked)
    len_kv = max(work.chunks[i].kv_len for i in picked)
    size = (len(picked), shape.kv_heads)
    q = work.q.new_zeros(*size, len_q, shape.group, shape.head_dim)
    k, v = (work.k.new_zeros(*size, len_kv, shape.head_dim) for _ in range(2))
    for b, i in enumerate(picked):
        c = work.chunks[i]
        rows = work.q[first[i] : first[i + 1]].unflatten(1, (shape.kv_heads, -1))
        q[b, :, len_q - c.tokens :] = rows.transpose(0, 1)
        for to, source in ((k, work.k), (v, work.v)):
            to[b, :, len_kv - c.kv_len :] = source[work.start[i] : work.start[i + 1]].transpose(
                0, 1
            )
    return q.flatten(2, 3), k, v


def _mask(work: Work, picked: Sequence[int]) -> Tensor:
    """[B, 1, tokens * group, L] which keys each row of `_padded` sees."""
    chunks = [work.chunks[i] for i in picked]
    len_q, len_kv = max(c.tokens for c in chunks), max(c.kv_len for c in chunks)
    key = torch.arange(len_kv, device=work.q.device)
    causal = key - (len_kv - len_q) <= torch.arange(len_q, device=work.q.device)[:, None]
    mask = torch.stack([causal & (key >= len_kv - c.kv_len) for c in chunks])[:, None]
    for b, c in enumerate(chunks):
        # A padding row sees something, so that its softmax is a number.
        mask[b, 0, : len_q - c.tokens, -1] = True
    return mask.repeat_interleave(work.shape.group, 2)


def flex(work: Work) -> Run:
    """torch's flex_attention, compiled: all sequences as one, a mask that keeps them apart."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device = work.q.device
    own_keys = torch.from_numpy(_own_keys(work)).to(device)
    lengths = torch.tensor([c.kv_len for c in work.chunks], device=device)
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    place = torch.arange(len(owner), device=device)

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        mine = own_keys[q]
        return (owner[k] == owner[mine]) & (place[k] <= mine)

    q, k, v = (x.transpose(0, 1).contiguous()[None] for x in (work.q, work.k, work.v))
    mask = create_block_mask(seen, None, None, q.shape[2], k.shape[2], device=str(device))
    call: Any = torch.compile(flex_attention, dynamic=False)
    gqa, scale = work.shape.group > 1, work.shape.head_dim**-0.5

    def run() -> Tensor:
        out = call(q, k, v, block_mask=mask, enable_gqa=gqa, scale=scale)
        return out[0].transpose(0, 1).flatten(1)

    return run


def tutorial(work: Work, clock: Clock, *, tune: bool = True) -> Run:
    """Flash attention as Triton's tutorial has it, on the batch padded to its longest chunk and
    sequence (padded before, which is not counted); its quickest tiles."""
    from bench.ops import tutorial as kernels

    shape, scale = work.shape, work.shape.head_dim**-0.5
    first = np.concatenate(([0], np.cumsum([c.tokens for c in work.chunks]))).tolist()
    rows, k, v = _padded(work, range(len(work.chunks)), first)
    q = rows.unflatten(2, (-1, shape.group)).transpose(2, 3).flatten(1, 2).contiguous()
    pad = torch.tensor(
        [k.shape[2] - c.kv_len for c in work.chunks], dtype=torch.int32, device=q.device
    )

    def run_with(config: kernels.Config) -> Run:
        def run() -> Tensor:
            out = kernels.attention(q, k, v, pad, scale, config)
            out = out.transpose(1, 2).flatten(2)
            ends = enumerate(work.chunks)
            return _joined(work, {i: out[i, out.shape[1] - c.tokens :] for i, c in ends})

        return run

    return quickest(clock, [run_with(c) for c in kernels.ATTENTION], tune=tune)


def quickest(clock: Clock, runs: Sequence[Run], *, tune: bool = True) -> Run:
    """The one that takes the least time; those that do not compile for this device are left out.

    tune  False: the last one, without trying any
    """
    if not tune:
        return runs[-1]
    seconds: dict[int, float] = {}
    failure: Exception | None = None
    for i, run in enumerate(runs):
        try:
            seconds[i] = clock.time(run, TRIAL_S).median
        except Exception as e:  # noqa: BLE001 - a compiler's errors are of any class
            failure = e
    if not seconds:
        raise RuntimeError("no tile sizes compile") from failure
    return runs[min(seconds, key=lambda i: seconds[i])]
