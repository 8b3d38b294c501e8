"""Every function of a table against `xylite/ops/reference.py` in float64, on the table's device.

A check gives how large its worst error is against what the types allow: one rounding of the result
to its own type, and sums in float32. 1 or less is right. Kernels that give ids must give the
reference's. The sizes lie around the edges of tiles and blocks.
"""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from bench.balance import read_lengths
from bench.ops import attention as rivals
from bench.ops import batches
from bench.ops.batches import Limits
from bench.ops.cases import MIXES, TRACES, sample_batch
from bench.ops.shapes import SHAPES, Shape
from tests.kernels_triton import cases
from xylite import tree
from xylite.kernels_triton import weights
from xylite.ops import DenseKV, Ops, SamplerState, TaskLists, reference
from xylite.runtime import task_table

# One rounding to the type, and what is lost between its smallest numbers.
ROUNDING: Final[Mapping[torch.dtype, float]] = {
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
SMALLEST: Final = 2.0**-25
# Sums in float32: far above what any order of them gives, far below what a wrong term changes.
SUMMING: Final = 64 * 2.0**-24


@dataclass(frozen=True, slots=True)
class Check:
    """run() -> the worst error, in units of the error that is allowed."""

    name: str
    run: Callable[[], float]

    @property
    def family(self) -> str:
        """Its name without a number of rows: those of one family run the same few kernels."""
        return re.sub(r" \d+ rows$", "", self.name)


def share_of(made: Sequence[Check], first: int, step: int) -> list[Check]:
    """Every step-th family from `first` on: what one process of `step` checks, so that few kernels
    are compiled twice."""
    families = list(dict.fromkeys(c.family for c in made))[first::step]
    return [c for c in made if c.family in families]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is checked.

    rows    of x for products and row by row
    blocks  size of the KV blocks
    groups, head_sizes   query heads per KV head, and their sizes
    limits  of iterations drawn from recorded lengths, at the shape of that name
    """

    rows: Sequence[int]
    blocks: int
    groups: Sequence[int]
    head_sizes: Sequence[int]
    width: int
    cols: int
    vocab: int
    limits: Limits
    shape: str


SMALL: Final = Sizes((1, 33), 16, (3,), (64,), 96, 70, 300, Limits(3, 24, 48), "tiny")
FULL: Final = Sizes((1, 7, 16, 17, 64, 129, 513), 64, (1, 3, 4, 7, 8), (64, 80, 96, 128, 192, 256),
                    1024, 1400, 50000, Limits(16, 1024, 4096), "llama-3-8b")  # fmt: skip


def error(actual: Tensor, exact: Tensor, magnitude: Tensor | None = None) -> float:
    """Worst error over what is allowed; magnitude: size of the terms that were summed."""
    assert actual.shape == exact.shape, (actual.shape, exact.shape)
    if not actual.numel():
        return 0.0
    size = exact.abs() if magnitude is None else magnitude
    allowed = 1.01 * ROUNDING[actual.dtype] * exact.abs() + SUMMING * size + SMALLEST
    return ((actual.double() - exact).abs() / allowed).nan_to_num(torch.inf).max().item()


def same(actual: Tensor, exact: Tensor) -> float:
    """0 if they are equal, else infinity."""
    return 0.0 if torch.equal(actual, exact) else torch.inf


def _double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def exactly(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """f in float64."""
    return f(*map(_double, args), **{k: _double(v) for k, v in kwargs.items()})


class Maker:
    """Random inputs for the checks of one table in one dtype."""

    def __init__(self, ops: Ops, dtype: torch.dtype, sizes: Sizes):
        self.ops, self.dtype, self.sizes = ops, dtype, sizes
        self.place = ops.device.torch_device
        self._generator = torch.Generator().manual_seed(0)

    def random(self, *size: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(*size, generator=self._generator) * scale
        return made.to(self.dtype).to(self.place)

    def integers(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.place)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Uninitialised memory is NaN, or a large integer: what a kernel fails to write is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def make_checks(ops: Ops, dtype: torch.dtype, sizes: Sizes) -> list[Check]:
    """All checks of a table of Triton kernels."""
    made = Maker(ops, dtype, sizes)
    makers = (linear, grouped, elementwise, rope, attention, recorded, sampling, storage)
    name = str(dtype).removeprefix("torch.")
    return [
        dataclasses.replace(check, name=f"{name} {check.name}")
        for maker in makers
        for check in maker(made)
    ]


def linear(m: Maker) -> Iterator[Check]:
    """Each format with each epilogue, at each number of rows."""
    n, k = m.sizes.cols, m.sizes.width
    packers = {"plain": m.ops.pack_linear, **m.ops.packers}
    epilogues: dict[str, dict[str, Any]] = {
        "": {},
        "bias residual cap": {"bias": True, "residual": True, "cap": 5.0},
        "silu": {"bias": True, "act": "silu"},
        "gelu": {"act": "gelu_tanh"},
    }
    for (form, pack), (kind, options), rows in itertools.product(
        packers.items(), epilogues.items(), m.sizes.rows
    ):
        yield Check(
            f"linear {form} {kind} {rows} rows".replace("  ", " "),
            lambda pack=pack, options=options, rows=rows: _linear(m, pack, options, rows, n, k),
        )


def _linear(
    m: Maker, pack: Callable[..., Any], options: Mapping[str, Any], rows: int, n: int, k: int
) -> float:
    x, w = m.random(rows, k), m.random(n, k, scale=k**-0.5)
    rest = dict(options)
    if rest.get("bias"):
        rest["bias"] = m.random(n)
    if rest.get("residual"):
        rest["residual"] = m.random(rows, n)
    packed = pack(w.clone(), gated="act" in rest)
    actual = m.ops.linear(x, packed, **rest)
    seen = x.double()
    if packed.format == "w8a8":
        from xylite.kernels_triton import launch

        bound: Any = m.ops.linear  # to its target
        q, scale = launch.quantise(bound.args[0], x)
        seen = q.double() * scale.double()[:, None]
    values = weights.unpack(packed)
    if packed.format == "int4":  # the kernel rounds what it unpacked to the type of x
        values = values.to(x.dtype)
    exact = exactly(reference.linear, seen, values, **rest)
    plain = {"bias": rest["bias"].abs()} if "bias" in rest else {}
    size = exactly(reference.linear, seen.abs(), values.abs(), **plain)
    if "act" in rest:
        # An error of the gate's sum is multiplied by up, and the other way round.
        gate, up = size.chunk(2, 1)
        size = 2 * gate * up + gate + up
    if "residual" in rest:
        size = size + rest["residual"].double().abs()
    return error(actual, exact, size)


def grouped(m: Maker) -> Iterator[Check]:
    """Experts with many rows, few, and none."""
    k, n, num = m.sizes.width, m.sizes.cols, 5
    for rows in m.sizes.rows:

        def run(rows: int = rows) -> float:
            x, w = m.random(rows, k), m.random(num, n, k, scale=k**-0.5)
            expert_of = torch.randint(
                0, num - 1, (rows,), generator=torch.Generator().manual_seed(1)
            )
            expert_of = expert_of.int().to(m.place)
            actual = m.ops.grouped_linear(x, m.ops.pack_linear(w.clone()), expert_of)
            exact = exactly(reference.grouped_linear, x, w, expert_of)
            size = exactly(reference.grouped_linear, x.abs(), w.abs(), expert_of)
            return error(actual, exact, size)

        yield Check(f"grouped_linear {rows} rows", run)


def elementwise(m: Maker) -> Iterator[Check]:
    """Norm, gated activation and embedding."""
    for rows in m.sizes.rows:

        def norm(rows: int = rows) -> float:
            x, residual = m.random(rows, m.sizes.width), m.random(rows, m.sizes.width)
            w = m.random(m.sizes.width).float()
            actual = m.ops.add_rms_norm(x, residual, w, 1e-5)
            exact = exactly(reference.add_rms_norm, x, residual, w, 1e-5)
            sizes = (None, x.double().abs() + residual.double().abs())
            return max(error(*pair) for pair in zip(actual, exact, sizes, strict=True))

        def act(rows: int = rows) -> float:
            x = m.random(rows, 2 * m.sizes.width)
            kinds = ("silu", "gelu_tanh")
            return max(
                error(m.ops.gated_act(x, kind), exactly(reference.gated_act, x, kind))
                for kind in kinds
            )

        def embed(rows: int = rows) -> float:
            table = m.random(500, m.sizes.width)
            ids = m.integers(*[(7 * i) % 500 for i in range(rows)])
            return same(m.ops.embed(m.ops.pack_linear(table.clone()), ids), table[ids.long()])

        yield Check(f"add_rms_norm {rows} rows", norm)
        yield Check(f"gated_act {rows} rows", act)
        yield Check(f"embed {rows} rows", embed)


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


def _attention(m: Maker, mix: str, shape: cases.Shape) -> float:
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
    classes = device.classes_of(shape.dim, kind) if device.classes_of else device.tile_classes
    tasks = task_table.build(
        table, num_kv_heads=shape.heads, group=shape.group, window=shape.window,
        tile_classes=classes, kv_tile=shape.block_size, num_cores=device.num_cores,
    )  # fmt: skip
    lists = TaskLists(
        tasks=tuple(torch.from_numpy(c.tasks) for c in tasks.classes),
        core_start=tuple(torch.from_numpy(c.core_start) for c in tasks.classes),
        merges=torch.from_numpy(tasks.merges),
        parts=torch.from_numpy(tasks.parts),
        tile_q=tuple(c.tile_q for c in tasks.classes),
    )
    batch = batches.on_device(table, like, dataclasses.replace(device, tile_classes=()), 0)
    batch = dataclasses.replace(batch, tasks=(tree.map(lambda t: t.to(m.place), lists),))
    q, k, v = (torch.from_numpy(x).to(m.dtype).to(m.place) for x in (made.q, made.k, made.v))
    out = m.ops.attention(q, DenseKV(k, v), batch, kind)
    exact = torch.from_numpy(made.expected).to(m.place)
    exact = exact.unflatten(1, (-1, shape.group)).transpose(0, 1).flatten(1)
    return _attention_error(out, exact)


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


def sampling(m: Maker) -> Iterator[Check]:
    """Ids drawn in every way, and drafts verified."""
    rows, v = 24, m.sizes.vocab
    for name in ("greedy", "temperature", "top_k top_p", "penalties"):

        def run(name: str = name) -> float:
            logits = (torch.randn(rows, v, generator=torch.Generator().manual_seed(4)) * 3).to(
                m.place
            )
            batch = sample_batch(
                rows, m.place, hot=name != "greedy", filtered=name == "top_k top_p"
            )
            state = None
            if name == "penalties":
                state = SamplerState(
                    torch.arange(rows * v, device=m.place).view(rows, v) % 5 == 0,
                    (torch.arange(rows * v, device=m.place).view(rows, v) % 3).int(),
                )
                batch = dataclasses.replace(
                    batch, penalised=True, state_row=m.integers(*range(rows)),
                    repetition_penalty=batch.repetition_penalty * 1.3,
                    frequency_penalty=batch.frequency_penalty + 0.3,
                )  # fmt: skip
            drawn = m.ops.sample(logits.clone(), batch, state, None)
            return _draws(drawn, reference.sample(logits.double(), batch, state, None), logits)

        yield Check(f"sample {name}", run)

    def verify() -> float:
        parent = m.integers(-1, 0, 1, 1, -1, 4, 5, 5)
        draft = m.integers(-1, 3, 4, 9, -1, 8, 2, 1)
        ids = m.integers(3, 4, 1, 1, 7, 8, 2, 2).long()
        depth = m.integers(0, 1, 2, 2, 0, 1, 2, 2)
        return same(
            m.ops.verify(ids, parent, draft, depth), reference.verify(ids, parent, draft, depth)
        )

    yield Check("verify", verify)


def _draws(drawn: Tensor, exact: Tensor, logits: Tensor) -> float:
    """0 if all ids are the reference's. In a large vocabulary one row in 24 may differ: its uniform
    can lie closer to the edge between two ids than float32 tells."""
    assert drawn.dtype == torch.long and bool(((drawn >= 0) & (drawn < logits.shape[1])).all())
    wrong = int((drawn != exact).sum())
    return 0.0 if wrong == 0 else 1.0 if wrong == 1 and logits.shape[1] > 1000 else torch.inf


def storage(m: Maker) -> Iterator[Check]:
    """Slots and blocks moved, copied and cleared in every layer."""

    def pools() -> tuple[DenseKV, ...]:
        room = (6, 2, m.sizes.blocks, 64)
        return tuple(DenseKV(m.random(*room), m.random(*room)) for _ in range(2))

    def compare(name: str, *arrays: Tensor) -> float:
        mine = pools()
        other = tree.map(lambda t: t.clone(), mine)
        mine = getattr(m.ops, name)(mine, *arrays)
        other = getattr(reference, name)(other, *(a.long() for a in arrays))
        return max(same(*pair) for pair in zip(tree.leaves(mine), tree.leaves(other), strict=True))

    last = 6 * m.sizes.blocks - 1
    moves = m.integers(0, 5, last, 17), m.integers(5, last, 1, 0)
    yield Check("move_slots", lambda: compare("move_slots", *moves))
    copies = m.integers(0, 3, 5), m.integers(3, 1, 2)
    yield Check("copy_blocks", lambda: compare("copy_blocks", *copies))
    yield Check("zero_blocks", lambda: compare("zero_blocks", m.integers(1, 4)))
