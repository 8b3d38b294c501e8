"""Every function of a table against `xylite/ops/reference.py` in float64, on the table's device.

A check gives how large its worst error is against what the types allow: one rounding of the result
to its own type, and sums in float32. 1 or less is right. Kernels that give ids must give the
reference's. The sizes lie around the edges of tiles and blocks.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from bench.ops.batches import Limits
from bench.ops.cases import sample_batch
from bench.ops.checks_attention import attention, recorded, rope
from bench.ops.exact import Check, Maker, Sizes, error, exactly, same
from xylite import tree
from xylite.kernels_triton import weights
from xylite.ops import DenseKV, Ops, SamplerState, reference

SMALL: Final = Sizes((1, 33), 16, (3,), (64,), 96, 70, 300, Limits(3, 24, 48), "tiny")
FULL: Final = Sizes((1, 7, 16, 17, 64, 129, 513), 64, (1, 3, 4, 7, 8), (64, 80, 96, 128, 192, 256),
                    1024, 1400, 50000, Limits(16, 1024, 4096), "llama-3-8b")  # fmt: skip


def share_of(made: Sequence[Check], first: int, step: int) -> list[Check]:
    """Every step-th family from `first` on: what one process of `step` checks, so that few kernels
    are compiled twice."""
    families = list(dict.fromkeys(c.family for c in made))[first::step]
    return [c for c in made if c.family in families]


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
