"""The Triton kernels as functions of tensors: shapes to tiles, tiles to launches.

Every function takes a `Target` first; the device tables bind it. No launch depends on a number
that changes between iterations: row counts are device integers at fixed addresses.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from xylite.errors import ConfigError
from xylite.kernels_triton import gated_act as act_kernels
from xylite.kernels_triton import grouped_gemm as grouped_kernels
from xylite.kernels_triton import move_blocks as move_kernels
from xylite.kernels_triton import norm_rope_append as layer_kernels
from xylite.kernels_triton import sampling as sampling_kernels
from xylite.kernels_triton import smooth_gemm as gemm_kernels
from xylite.kernels_triton.tiles import FLOAT, HALF, Tiles, TileTable
from xylite.kernels_triton.weights import PackedWeight

MAX_COUNT = 1 << 16


class KV(Protocol):
    """KV of one layer, k and v [N, G, P, D], scales [N, G, P] if they are int8: `ops.DenseKV`."""

    @property
    def k(self) -> Tensor: ...

    @property
    def v(self) -> Tensor: ...

    @property
    def k_scale(self) -> Tensor | None: ...

    @property
    def v_scale(self) -> Tensor | None: ...


def _pairs(leaf: KV) -> list[tuple[Tensor, Tensor]]:
    """What a cache holds of each slot, for keys and values alike: [N, G, P, elements]."""
    if leaf.k_scale is None or leaf.v_scale is None:
        return [(leaf.k, leaf.v)]
    return [(leaf.k, leaf.v), (leaf.k_scale[..., None], leaf.v_scale[..., None])]


Leaf = TypeVar("Leaf", bound=KV)


class Counts:
    """n -> a device integer that holds n, without an upload: a view into a table of all of them.

    Entries lie 16 bytes apart, because Triton compiles anew for pointers of another alignment.
    While a recording is made (see graphs.py), every count is the one integer it is `telling`.
    """

    def __init__(self, device: torch.device):
        self._table = torch.zeros(MAX_COUNT + 1, 4, dtype=torch.int32, device=device)
        self._table[:, 0] = torch.arange(MAX_COUNT + 1, dtype=torch.int32, device=device)
        self._told: Tensor | None = None

    def __call__(self, n: int) -> Tensor:
        if self._told is not None:
            return self._told
        if n > MAX_COUNT:
            raise ConfigError(f"an iteration of {n} rows is more than the limit of {MAX_COUNT}")
        return self._table[n, :1]

    @contextlib.contextmanager
    def telling(self, rows: Tensor) -> Iterator[None]:
        """Launches are for as many rows as `rows` [1] int32 says whenever they run."""
        self._told = rows
        try:
            yield
        finally:
            self._told = None


@dataclass(frozen=True, slots=True)
class Target:
    """What kernels are launched on.

    cores         programs of a kernel with products: AI cores, SMs
    vector_cores  programs of the others
    tiles         tile table of the chip
    count         n -> [1] int32 on the device that holds n
    """

    cores: int
    vector_cores: int
    tiles: TileTable
    count: Counts


def power_of_two(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(0, (n - 1).bit_length())


def _kind(dtype: torch.dtype) -> str:
    return FLOAT if dtype == torch.float32 else HALF


def quantise(target: Target, x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] as int8 with a float32 scale per row."""
    q = torch.empty_like(x, dtype=torch.int8)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if x.shape[0]:
        tiles = target.tiles.vector("act", _kind(x.dtype))
        gemm_kernels.quantise_rows[(target.vector_cores,)](
            x, q, scale, target.count(x.shape[0]), K=x.shape[1],
            TILE_C=min(tiles.sizes["TILE"], power_of_two(x.shape[1])), **tiles.options,
        )  # fmt: skip
    return q, scale


@dataclass(frozen=True, slots=True)
class _Gemm:
    """One GEMM launch, made out: what `smooth_gemm` and `grouped_gemm` have in common."""

    out: Tensor
    tensors: tuple[Tensor, ...]
    constants: dict[str, Any]
    tiles: Tiles


def _prepare(
    target: Target,
    x: Tensor,
    w: PackedWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    act: str | None,
    cap: float,
) -> _Gemm:
    rows, k = x.shape
    if k != w.num_cols:
        raise ConfigError(f"x has {k} columns, the weight {w.num_cols}")
    n = w.num_rows // 2 if act else w.num_rows
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if act:
        op = "gated"
    elif w.format == "" and bias is None and residual is None and not cap:
        op = "linear"
    else:
        op = "epilogue"
    tiles = target.tiles.gemm(op, w.format or _kind(x.dtype), rows, n, k, target.cores)
    sizes = dict(tiles.sizes)
    if w.format == "int4":
        sizes["TILE_K"] = w.group
    x_scale = out
    x = x.contiguous()
    if w.format == "w8a8":
        x, x_scale = quantise(target, x)
    tensors = (
        x, x_scale, w.data, out if w.scale is None else w.scale, out if w.zero is None else w.zero,
        out if bias is None else bias, out if residual is None else residual.contiguous(), out,
    )  # fmt: skip
    constants = {
        **sizes,
        "N": n, "K": k, "FORMAT": w.format, "ACT": act or "", "CAP": float(cap),
        "HAS_BIAS": bias is not None, "HAS_RES": residual is not None,
    }  # fmt: skip
    return _Gemm(out, tensors, constants, tiles)


def linear(
    target: Target,
    x: Tensor,
    w: PackedWeight,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    act: str | None = None,
    cap: float = 0.0,
) -> Tensor:
    """`ops.Linear` with `smooth_gemm`."""
    gemm = _prepare(target, x, w, bias, residual, act, cap)
    if x.shape[0]:
        gemm_kernels.smooth_gemm[(target.cores,)](
            *gemm.tensors, target.count(x.shape[0]), **gemm.constants, **gemm.tiles.options
        )
    return gemm.out


def grouped_linear(
    target: Target,
    x: Tensor,
    w: PackedWeight,
    expert_of: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    act: str | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Row t of x [T, K] times the weight of expert_of[t], with w [E, N, K]; [T, N] (or N / 2).

    Rows are sorted by expert, multiplied, and put back; nothing of it waits for the host.
    """
    rows = x.shape[0]
    order = torch.argsort(expert_of, stable=True)
    if residual is not None:
        residual = residual.index_select(0, order)
    gemm = _prepare(target, x.index_select(0, order), w, bias, residual, act, cap)
    if not rows:
        return gemm.out
    experts = w.data.shape[0]
    ids = torch.arange(experts, dtype=expert_of.dtype, device=x.device)
    ends = torch.searchsorted(expert_of.index_select(0, order), ids, right=True)
    count = torch.diff(ends, prepend=ends.new_zeros(1)).to(torch.int32)
    most = -(-rows // gemm.constants["TILE_M"]) + min(experts, rows)
    tasks = torch.empty(most, 4, dtype=torch.int32, device=x.device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=x.device)
    grouped_kernels.group_tasks[(1,)](
        count, tasks, num_tiles, E=experts, TILE_M=gemm.constants["TILE_M"]
    )
    grouped_kernels.grouped_gemm[(target.cores,)](
        *gemm.tensors, tasks, num_tiles, **gemm.constants, **gemm.tiles.options
    )
    return torch.empty_like(gemm.out).index_copy_(0, order, gemm.out)


def add_rms_norm(
    target: Target, x: Tensor, residual: Tensor | None, w: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual) * w, x + residual); x itself is the sum if there is no residual."""
    x = x.contiguous()
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    if x.shape[0]:
        c = x.shape[1]
        tiles = target.tiles.vector("norm", _kind(x.dtype))
        layer_kernels.add_rms_norm[(target.vector_cores,)](
            x, x if residual is None else residual.contiguous(), w, out, total,
            target.count(x.shape[0]), eps, C=c, TILE_C=min(tiles.sizes["TILE"], power_of_two(c)),
            HAS_RES=residual is not None, **tiles.options,
        )  # fmt: skip
    return out, total


def rope_tiles(tiles: Tiles, h: int, g: int, d: int, rot: int) -> dict[str, int]:
    """Tile constants of `qk_norm_rope_append` for this many heads: as many KV heads per pass as
    keep a tile of q within the row's number of elements."""
    tile_h, tile_d = power_of_two(h // g), power_of_two(max(1, rot // 2))
    tile_rest = power_of_two(max(1, d - rot))
    fit = max(1, tiles.sizes["TILE"] // (tile_h * max(tile_d, tile_rest)))
    return {
        "TILE_G": min(power_of_two(g), 1 << (fit.bit_length() - 1)),
        "TILE_H": tile_h,
        "TILE_D": tile_d,
        "TILE_REST": tile_rest,
        "TILE_V": power_of_two(d),
    }


def qk_norm_rope_append(
    target: Target,
    qkv: Tensor,
    positions: Tensor,
    rope: Tensor,
    kv: Leaf,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Leaf]:
    """`ops.QkNormRopeAppend`; q is [G, T * group, D], the leaf is written in place."""
    _, g, p, d = kv.k.shape
    rows = qkv.shape[0]
    h = qkv.shape[1] // d - 2 * g
    rot = 2 * rope.shape[2]
    q = torch.empty(g, rows * (h // g), d, dtype=qkv.dtype, device=qkv.device)
    if rows:
        tiles = target.tiles.vector("rope", _kind(qkv.dtype))
        layer_kernels.qk_norm_rope_append[(target.vector_cores,)](
            qkv.contiguous(), positions, rope, rope if q_norm is None else q_norm,
            rope if k_norm is None else k_norm, slots, q, kv.k, kv.v,
            kv.k if kv.k_scale is None else kv.k_scale, kv.v if kv.v_scale is None else kv.v_scale,
            target.count(rows), q.stride(0), eps,
            H=h, G=g, D=d, P=p, ROT=rot, **rope_tiles(tiles, h, g, d, rot),
            Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
            HAS_SCALES=kv.k_scale is not None, **tiles.options,
        )  # fmt: skip
    return q, kv


def gated_act(target: Target, x: Tensor, act: str) -> Tensor:
    """act(x[:, :F]) * x[:, F:]."""
    rows, f = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, f, dtype=x.dtype, device=x.device)
    if rows:
        tiles = target.tiles.vector("act", _kind(x.dtype))
        act_kernels.gated_act[(target.vector_cores,)](
            x.contiguous(), out, target.count(rows), F=f,
            TILE_C=min(tiles.sizes["TILE"], power_of_two(f)), ACT=act, **tiles.options,
        )  # fmt: skip
    return out


def embed(target: Target, table: PackedWeight, tokens: Tensor) -> Tensor:
    """Rows `tokens` of an unquantised table [V, C]."""
    if table.format:
        raise ConfigError(f"embedding tables of format {table.format!r} cannot be gathered")
    rows, c = tokens.shape[0], table.num_cols
    out = torch.empty(rows, c, dtype=table.data.dtype, device=table.data.device)
    if rows:
        tiles = target.tiles.vector("gather", _kind(out.dtype))
        act_kernels.gather_rows[(target.vector_cores,)](
            table.data, tokens, out, target.count(rows), C=c,
            TILE_C=min(tiles.sizes["TILE"], power_of_two(c)), **tiles.options,
        )  # fmt: skip
    return out


def _move(
    target: Target, kv: tuple[Leaf, ...], src: Tensor, dst: Tensor, whole_blocks: bool
) -> tuple[Leaf, ...]:
    num = src.shape[0]
    if not num:
        return kv
    for from_k, from_v in (pair for leaf in kv for pair in _pairs(leaf)):
        _, g, p, d = from_k.shape
        if whole_blocks:
            shape = {"ROWS": 1, "PIECE": g * p * d, "PIECES": 1, "STEP": 0}
        else:
            shape = {"ROWS": p, "PIECE": d, "PIECES": g, "STEP": p * d}
        tiles = target.tiles.vector("gather", _kind(from_k.dtype))
        shape["TILE_C"] = min(tiles.sizes["TILE"], power_of_two(shape["PIECE"]))
        size = shape["PIECE"] * shape["PIECES"]
        k, v = (torch.empty(num, size, dtype=t.dtype, device=t.device) for t in (from_k, from_v))
        launch = move_kernels.move_pieces[(target.vector_cores,)]
        count = target.count(num)
        launch(from_k, from_v, k, v, src, count, GATHER=True, **shape, **tiles.options)
        launch(k, v, from_k, from_v, dst, count, GATHER=False, **shape, **tiles.options)
    return kv


def move_slots(target: Target, kv: tuple[Leaf, ...], src: Tensor, dst: Tensor) -> tuple[Leaf, ...]:
    """Rows of every layer's pool moved in place, all sources read first; int32 slots."""
    return _move(target, kv, src, dst, whole_blocks=False)


def copy_blocks(target: Target, kv: tuple[Leaf, ...], src: Tensor, dst: Tensor) -> tuple[Leaf, ...]:
    """Blocks of every layer's pool copied in place, all sources read first; int32 blocks."""
    return _move(target, kv, src, dst, whole_blocks=True)


def zero_blocks(target: Target, kv: tuple[Leaf, ...], blocks: Tensor) -> tuple[Leaf, ...]:
    """These blocks of every layer cleared in place; int32 blocks."""
    if not blocks.shape[0]:
        return kv
    for k, v in (pair for leaf in kv for pair in _pairs(leaf)):
        size = k[0].numel()
        tiles = target.tiles.vector("gather", _kind(k.dtype))
        move_kernels.zero_blocks[(target.vector_cores,)](
            k, v, blocks, target.count(blocks.shape[0]), SIZE=size,
            TILE_C=min(tiles.sizes["TILE"], power_of_two(size)), **tiles.options,
        )  # fmt: skip
    return kv


def _allowed(mask: Tensor, mask_row: Tensor, num_ids: int) -> Tensor:
    """[R, V] bool of bit masks [rows, ceil(V / 32)]; rows with mask_row -1 allow everything."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    words = mask.index_select(0, mask_row.clamp(min=0).long())
    allowed = ((words[:, :, None] >> bits) & 1).bool().flatten(1)[:, :num_ids]
    return allowed | (mask_row < 0)[:, None]


def _penalise(
    target: Target, logits: Tensor, batch: Any, state: Any, sizes: dict[str, int]
) -> None:
    row = batch.state_row.clamp(min=0).long()
    counted = (batch.state_row >= 0)[:, None]
    count = state.count.index_select(0, row) * counted
    one = count.new_ones(batch.seen_row.shape[0])
    count.index_put_((batch.seen_row.long(), batch.seen_token.long()), one, accumulate=True)
    prompt = (state.in_prompt.index_select(0, row) & counted).to(torch.int8)
    sampling_kernels.penalise[(target.vector_cores,)](
        logits, count.to(torch.int32), prompt, batch.repetition_penalty, batch.frequency_penalty,
        batch.presence_penalty, target.count(logits.shape[0]), **sizes,
    )  # fmt: skip


def sample(target: Target, logits: Tensor, batch: Any, state: Any, mask: Tensor | None) -> Tensor:
    """The token of each row of logits [R, V], [R] int64; see `ops/reference.py`.

    Masks and sparse biases are rare and plain torch; the rest is two kernels.
    """
    rows, v = logits.shape
    ids = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    if not rows:
        return ids.long()
    logits = logits.float()
    if mask is not None:
        logits = logits.masked_fill_(~_allowed(mask, batch.mask_row, v), -torch.inf)
    if batch.bias_row.shape[0]:
        at = (batch.bias_row.long(), batch.bias_token.long())
        logits.index_put_(at, batch.bias_value, accumulate=True)
    tiles = target.tiles.vector("sample", FLOAT)
    tile_v = min(tiles.sizes["TILE"], power_of_two(v))
    sizes = {"V": v, "PITCH": logits.stride(0), "TILE_V": tile_v}
    if batch.penalised:
        _penalise(target, logits, batch, state, {**sizes, **tiles.options})
    sampling_kernels.sample[(target.vector_cores,)](
        logits, batch.temperature, batch.top_k, batch.top_p, batch.min_p.log(), batch.uniform, ids,
        target.count(rows), **sizes, TILE_S=min(tiles.sizes["TILE"] // 4, power_of_two(v)),
        GREEDY=batch.greedy, FILTERED=batch.filtered, **tiles.options,
    )  # fmt: skip
    return ids.long()


def verify(
    target: Target, ids: Tensor, parent: Tensor, draft_token: Tensor, depth: Tensor
) -> Tensor:
    """[R] bool, see `sampling.verify`; a row's ancestors are walked, so `depth` is not needed."""
    del depth
    rows = ids.shape[0]
    accepted = torch.zeros(rows, dtype=torch.int32, device=ids.device)
    if rows:
        sampling_kernels.verify[(target.vector_cores,)](
            ids.to(torch.int32), parent, draft_token, accepted, target.count(rows)
        )
    return accepted != 0
