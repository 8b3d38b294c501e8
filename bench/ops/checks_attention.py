"""Checks of what attention is made of: rope with KV append, and Meta-Attention."""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.balance import read_lengths
from bench.ops import attention as rivals
from bench.ops import batches
from bench.ops.cases import MIXES, TRACES
from bench.ops.exact import ROUNDING, Check, Maker, error, exactly
from bench.ops.shapes import SHAPES, Shape
from tests.kernels_triton import cases
from xylite.ops import AttentionKind, Batch, DenseKV, reference


def rope(m: Maker) -> Iterator[Check]:
    """With and without norms, whole and partial rotation, every head size."""
    for dim, normed in itertools.product(m.sizes.head_sizes, (False, True)):

        def run(dim: int = dim, normed: bool = normed) -> float:
            rows, g, group, p = 37, 2, m.sizes.groups[-1], m.sizes.blocks
            rot = dim if normed else dim // 2
            qkv = m.random(rows, (group + 2) * g * dim)
            angle = torch.arange(64)[:, None] / 100 ** (torch.arange(rot // 2) * 2 / rot)
            table = torch.stack((angle.cos(), angle.sin()), 1).to(m.place)
            positions = m.integers(*[(3 * i) % 64 for i in range(rows)])
            slots = torch.randperm(4 * p, generator=torch.Generator().manual_seed(2))[:rows]
            slots = slots.int().to(m.place)
            room = (4, g, p, dim)
            norms = {n: m.random(dim).float() for n in ("q_norm", "k_norm")} if normed else {}
            kv = DenseKV(*(torch.zeros(room, dtype=m.dtype, device=m.place) for _ in range(2)))
            q, kv = m.ops.qk_norm_rope_append(qkv, positions, table, kv, slots, eps=1e-5, **norms)
            pool = DenseKV(*(torch.zeros(room, device=m.place).double() for _ in range(2)))
            exact_q, pool = exactly(
                reference.qk_norm_rope_append, qkv, positions, table, pool, slots, eps=1e-5, **norms
            )
            pairs = ((q, exact_q), (kv.k, pool.k), (kv.v, pool.v))
            # The sum of two turned halves may cancel: its error is that of its terms.
            return max(error(a, e, e.abs() + 4 * e.abs().amax()) for a, e in pairs)

        yield Check(f"qk_norm_rope_append D={dim}{' normed' if normed else ''}", run)


def attention(m: Maker) -> Iterator[Check]:
    """Mixed batches of every kind: trees, windows, soft caps, groups, head sizes."""
    mixes = tuple(cases.mixes(np.random.default_rng(0), m.sizes.blocks))
    base = cases.Shape(group=m.sizes.groups[-1], dim=m.sizes.head_sizes[0])
    wanted: list[tuple[str, str, cases.Shape]] = [("", mix, base) for mix in mixes]
    change = dataclasses.replace
    wanted += [
        (f"group {group}", "everything", change(base, group=group)) for group in m.sizes.groups[:-1]
    ]
    wanted += [
        (f"D={dim}", "everything", change(base, dim=dim, heads=1)) for dim in m.sizes.head_sizes[1:]
    ]
    wanted.append(("window", "decode", change(base, window=24)))
    wanted.append(("cap", "everything", change(base, cap=2.0)))
    for detail, mix, shape in wanted:
        yield Check(
            f"attention {mix} {detail}".rstrip(),
            lambda mix=mix, shape=shape: _attention(m, mix, shape),
        )
    for mix in ("decode", "prefill"):
        yield Check(f"attention int8 KV {mix}", lambda mix=mix: _int8(m, mix, base))


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """A case of tests/kernels_triton on the device; expected [T, H * D] in float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    batch: Batch
    kind: AttentionKind
    expected: Tensor


def _made(m: Maker, mix: str, shape: cases.Shape, classes: tuple[int, ...] | None = None) -> _Case:
    """The mix with task lists for these tile classes; None = those the device has for it."""
    shape = dataclasses.replace(shape, block_size=m.sizes.blocks)
    rng = np.random.default_rng(3)
    made = cases.make_case(
        rng, shape, cases.mixes(rng, shape.block_size)[mix],
        lambda x: torch.from_numpy(x).to(m.dtype).double().numpy(),
    )  # fmt: skip
    like = Shape("", 0, shape.heads * shape.group, shape.heads, shape.dim, 0, 0, 1)
    kind = dataclasses.replace(batches.kind_of(like), window=shape.window, cap=shape.cap)
    table = dataclasses.replace(made.table, tokens=np.zeros(int(made.table.q_start[-1]), np.int32))
    device = m.ops.device
    if classes is None:
        classes = device.classes_of(shape.dim, kind) if device.classes_of else device.tile_classes
    device = dataclasses.replace(device, tile_classes=classes, classes_of=None)
    batch = batches.on_device(table, like, device, shape.block_size, window=shape.window)
    q, k, v = (torch.from_numpy(x).to(m.dtype).to(m.place) for x in (made.q, made.k, made.v))
    expected = _by_token(torch.from_numpy(made.expected).to(m.place), shape.group)
    return _Case(q, k, v, batch, kind, expected)


def _by_token(x: Tensor, group: int) -> Tensor:
    """[T, H * D] of [G, T * group, D]."""
    return x.unflatten(1, (-1, group)).transpose(0, 1).flatten(1)


def _attention(m: Maker, mix: str, shape: cases.Shape) -> float:
    case = _made(m, mix, shape)
    out = m.ops.attention(case.q, DenseKV(case.k, case.v), case.batch, case.kind)
    return _attention_error(out, case.expected)


def _int8(m: Maker, mix: str, shape: cases.Shape) -> float:
    """Keys and values in 8 bits with scales, which no table offers yet: the kernel by itself."""
    from xylite.kernels_triton import attention as kernel
    from xylite.kernels_triton.attention_tiles import attention_tiles

    bound: Any = m.ops.linear  # to its target
    target = bound.args[0]
    tiles = attention_tiles(target.tiles.chip, shape.dim, int8=True, size=m.sizes.blocks)
    case = _made(m, mix, shape, tiles.tile_q)
    stored, values, scales = [], [], []
    for x in (case.k, case.v):
        x = x.float().nan_to_num()
        scale = x.abs().amax(-1).clamp(min=1e-6) / 127
        stored.append((x / scale[..., None]).round().to(torch.int8))
        values.append(stored[-1].double() * scale.double()[..., None])
        scales.append(scale)
    lists = case.batch.tasks[0]
    out = kernel.meta_attention(
        case.q, DenseKV(*stored), lists, block_table=case.batch.block_table,
        position=kernel.row_positions(case.batch.positions, shape.group), group=shape.group,
        scale=case.kind.scale, scales=(scales[0], scales[1]),
        parts=kernel.make_parts(int(lists.parts[1]) + 1, shape.dim, m.place), tiles=tiles,
        vector_cores=target.vector_cores,
    )  # fmt: skip
    exact = reference.attention(case.q.double(), DenseKV(*values), case.batch, case.kind)
    return _attention_error(_by_token(out, shape.group), exact)


def _attention_error(out: Tensor, exact: Tensor) -> float:
    """Probabilities are rounded before the second product, of values up to about 4."""
    allowed = 1e-5 if out.dtype == torch.float32 else 8.2 * ROUNDING[out.dtype]
    return ((out.double() - exact).abs().nan_to_num(torch.inf).max() / allowed).item()


def recorded(m: Maker) -> Iterator[Check]:
    """Iterations of recorded lengths at a real shape: many blocks, tasks cut and merged."""
    for trace, mix in itertools.product(TRACES, MIXES):

        def run(trace: str = trace, mix: str = mix) -> float:
            rng = np.random.default_rng(5)
            chunks = batches.draw(rng, read_lengths(trace), mix, m.sizes.limits)
            work = rivals.make_work(SHAPES[m.sizes.shape], chunks, m.dtype, m.place)
            out = rivals.own(m.ops, work)()
            wide = {name: getattr(work, name).double() for name in ("q", "k", "v")}
            place = dataclasses.replace(m.ops.device, tile_classes=())
            table = dataclasses.replace(reference.TABLE, device=place)
            exact = rivals.own(table, dataclasses.replace(work, **wide))()
            return _attention_error(out, exact)

        yield Check(f"attention {mix} of {trace}", run)
