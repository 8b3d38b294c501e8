"""What is measured: each op at a model's shapes, with its work, its traffic and its rivals."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.balance import read_lengths
from bench.ops import attention, batches
from bench.ops.batches import Limits
from bench.ops.shapes import Shape
from bench.ops.timing import Clock, Run, num_bytes_of
from xylite.ops import DenseKV, Ops, SampleBatch, reference

# Weights of one shape, and KV of one iteration, rotate through this much memory on the host, so
# that none is found in cache.
ROTATE_BYTES: Final = 256 << 20
TRACES: Final = ("azure_conversation", "azure_code")
MIXES: Final = ("prefill", "decode", "verify", "mixed")
TORCH, TUTORIAL = "torch", "tutorial"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case's calls. A rival is made when it is its turn: it may fail, and it takes memory.

    waits  rivals wait for the host in between, so they cannot be recorded
    """

    run: Run
    rivals: Mapping[str, Callable[[], Run]]
    flops: float
    num_bytes: float
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One figure.

    form   weight format, "" = the dtype itself
    rows   tokens
    rank   lower ones come first when time is short
    """

    op: str
    model: str
    name: str
    rows: int
    rank: int
    prepare: Callable[[], Prepared]
    form: str = ""


class Slot:
    """Keeps the last thing that was made: cases of one weight follow each other, and the weights
    of all together would not fit."""

    def __init__(self) -> None:
        self._held: tuple[Any, Any] = (None, None)

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives for this key, made anew only if another key was asked for since."""
        if self._held[0] != key:
            self._held = (None, None)  # the old one goes before the new one comes
            self._held = (key, make())
        return self._held[1]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cases of a run share.

    formats  weight formats by name, "" first: (weight, gated) -> leaf
    rivals   names of those to measure: torch, flex, tutorial
    tune     the tutorials' kernels try all their tiles
    """

    ops: Ops
    clock: Clock
    dtype: torch.dtype
    formats: Mapping[str, Callable[..., Any]]
    rows: Sequence[int]
    limits: Limits
    rivals: frozenset[str]
    tune: bool = True
    iterations: int = 1
    slot: Slot = field(default_factory=Slot)

    def random(self, *size: int) -> Tensor:
        """Normal values of the table's activations."""
        made = torch.randn(*size, device=self.ops.device.torch_device)
        return made.to(self.ops.act_dtype(self.dtype))

    def rotated(self, make: Callable[[], Any], num_bytes: int = 0) -> Iterator[Any]:
        """One thing for ever; on the host, so many in turn that none stays in cache.

        num_bytes  of one, if it is not a weight
        """
        first = make()
        on_host = self.ops.device.torch_device.type == "cpu" and self.ops.device.kind == "cpu"
        copies = ROTATE_BYTES // max(num_bytes or num_bytes_of(first), 1) if on_host else 0
        return itertools.cycle([first, *(make() for _ in range(copies))])

    def in_turn(self, make: Callable[[], Run], num_bytes: int) -> Run:
        """Calls that read so many bytes each, on the host from another place each time."""
        runs = self.rotated(make, num_bytes)
        return lambda: next(runs)()


def make_cases(shapes: Sequence[Shape], setting: Setting, ops: Sequence[str] = ()) -> list[Case]:
    """The cases of these models, the most telling first; ops: only these, () = all."""
    makers = (linear, attention_cases, grouped, elementwise, sample)
    found = [
        dataclasses.replace(case, rank=case.rank + 10 * place)
        for place, shape in enumerate(shapes)
        for maker in makers
        for case in maker(shape, setting)
    ]
    return sorted((c for c in found if not ops or c.op in ops), key=lambda c: c.rank)


def linear(shape: Shape, s: Setting) -> Iterator[Case]:
    """Each weight of a layer and the head, in each format, at each number of rows."""
    head = {"head": (shape.vocab, shape.width, False)}
    for form, pack in s.formats.items():
        for name, (n, k, gated) in {**shape.weights, **head}.items():
            if form and name == "head":
                continue
            make = functools.partial(_weights, s, n, k, pack, gated)
            held = functools.partial(s.slot.get, ("linear", shape.name, name, form), make)
            for m in s.rows if name != "head" else [m for m in s.rows if m <= 256]:
                rank = 2 * bool(form) + (m not in (1, 16, 256, 4096))
                prepare = functools.partial(_linear, s, held, (n, k), gated, m, not form)
                yield Case("linear", shape.name, name, m, rank, prepare, form)


@dataclass(frozen=True, slots=True)
class _Weights:
    packed: Iterator[Any]
    plain: Iterator[Tensor]
    num_bytes: int


def _weights(s: Setting, n: int, k: int, pack: Callable[..., Any], gated: bool) -> _Weights:
    place = s.ops.device.torch_device
    plain = (torch.randn(n, k, device=place) * k**-0.5).to(s.dtype)
    packed = s.rotated(lambda: pack(plain.clone(), gated=gated))
    return _Weights(packed, s.rotated(plain.clone), num_bytes_of(next(packed)))


def _linear(
    s: Setting,
    held: Callable[[], _Weights],
    size: tuple[int, int],
    gated: bool,
    m: int,
    plain: bool,
) -> Prepared:
    n, k = size
    w, x = held(), s.random(m, k)
    out = n // 2 if gated else n
    rounded = x.to(s.dtype)

    def by_torch() -> Tensor:
        y = F.linear(rounded, next(w.plain))
        if gated:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        return y

    # Of quantised weights the rivals are those of the plain ones: torch's product again.
    def by_tutorial() -> Run:
        from bench.ops import tutorial

        one = next(w.plain)

        def run_with(config: tutorial.Config) -> Run:
            if not gated:
                return lambda: tutorial.matmul(rounded, one, config)

            def run() -> Tensor:
                gate, up = tutorial.matmul(rounded, one, config).chunk(2, -1)
                return F.silu(gate) * up

            return run

        return attention.quickest(s.clock, [run_with(c) for c in tutorial.MATMUL], tune=s.tune)

    return Prepared(
        lambda: s.ops.linear(x, next(w.packed), act="silu" if gated else None),
        _wanted(s, {TORCH: lambda: by_torch, **({TUTORIAL: by_tutorial} if plain else {})}),
        2.0 * m * n * k,
        w.num_bytes + m * (k + out) * x.itemsize,
    )


def _wanted(s: Setting, rivals: Mapping[str, Callable[[], Run]]) -> dict[str, Callable[[], Run]]:
    return {name: make for name, make in rivals.items() if name.split()[-1] in s.rivals}


def attention_cases(shape: Shape, s: Setting) -> Iterator[Case]:
    """One layer's attention of iterations drawn from each trace."""
    for trace, mix, i in itertools.product(TRACES, MIXES, range(s.iterations)):
        rng = np.random.default_rng([i, TRACES.index(trace), MIXES.index(mix)])
        chunks = batches.draw(rng, read_lengths(trace), mix, s.limits)
        name = f"{mix} {trace.removeprefix('azure_')}" + (f" {i + 1}" if s.iterations > 1 else "")
        prepare = functools.partial(_attention, shape, s, chunks)
        yield Case("attention", shape.name, name, sum(c.tokens for c in chunks), 0, prepare)


def _attention(shape: Shape, s: Setting, chunks: Sequence[batches.Chunk]) -> Prepared:
    work = attention.make_work(shape, chunks, s.dtype, s.ops.device.torch_device)
    size = work.k.nbytes + work.v.nbytes
    rivals = {
        TORCH: lambda: s.in_turn(lambda: attention.sdpa(work), size),
        "torch flex": lambda: attention.flex(work),
        TUTORIAL: lambda: attention.tutorial(work, s.clock, tune=s.tune),
    }
    own = s.in_turn(lambda: attention.own(s.ops, work), size)
    return Prepared(own, _wanted(s, rivals), work.flops, work.num_bytes)


def grouped(shape: Shape, s: Setting) -> Iterator[Case]:
    """A layer's experts, each token at the `top` of them that a random router names."""
    if shape.experts is None:
        return
    e, inner, width = shape.experts, shape.experts.inner, shape.width
    for name, n, k, gated in (
        ("gate_up", 2 * inner, width, True),
        ("down", width, inner, False),
    ):
        make = functools.partial(_expert_weights, s, e.num, n, k, gated)
        held = functools.partial(s.slot.get, ("experts", shape.name, name), make)
        for m in [m for m in s.rows if m <= 4096]:
            prepare = functools.partial(_grouped, s, held, (e.num, e.top, n, k), gated, m)
            yield Case("grouped_linear", shape.name, name, m, 1, prepare)


def _expert_weights(s: Setting, num: int, n: int, k: int, gated: bool) -> tuple[Any, Tensor]:
    plain = (torch.randn(num, n, k, device=s.ops.device.torch_device) * k**-0.5).to(s.dtype)
    return s.ops.pack_linear(plain.clone(), gated=gated), plain


def _grouped(
    s: Setting,
    held: Callable[[], tuple[Any, Tensor]],
    size: tuple[int, int, int, int],
    gated: bool,
    m: int,
) -> Prepared:
    num, top, n, k = size
    packed, plain = held()
    generator = torch.Generator().manual_seed(m)
    router = torch.rand(m, num, generator=generator)
    expert_of = router.topk(top, 1).indices.flatten().int().to(plain.device)
    x = s.random(m * top, k)
    rounded, act = x.to(s.dtype), "silu" if gated else None
    used = len(expert_of.unique())
    out = n // 2 if gated else n
    moved = used * n * k * plain.itemsize + m * top * (k + out) * x.itemsize
    return Prepared(
        lambda: s.ops.grouped_linear(x, packed, expert_of, act=act),
        _wanted(
            s,
            {TORCH: lambda: lambda: reference.grouped_linear(rounded, plain, expert_of, act=act)},
        ),
        2.0 * m * top * n * k,
        float(moved),
        waits=True,
    )


def elementwise(shape: Shape, s: Setting) -> Iterator[Case]:
    """The functions of a layer that have no products."""
    makers = {
        "add_rms_norm": _norm,
        "qk_norm_rope_append": _rope,
        "gated_act": _gated_act,
    }
    for (op, maker), m in itertools.product(makers.items(), s.rows):
        rank = 1 + (m not in (1, 16, 256, 4096))
        yield Case(op, shape.name, "", m, rank, functools.partial(maker, shape, s, m))


def _norm(shape: Shape, s: Setting, m: int) -> Prepared:
    x, residual = s.random(m, shape.width), s.random(m, shape.width)
    w = torch.ones(shape.width, device=x.device)
    rounded = w.to(x.dtype)

    def by_torch() -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, (shape.width,), rounded, 1e-5), total

    return Prepared(
        lambda: s.ops.add_rms_norm(x, residual, w, 1e-5),
        _wanted(s, {TORCH: lambda: by_torch}),
        6.0 * x.numel(),
        4.0 * x.nbytes,
    )


def _rope(shape: Shape, s: Setting, m: int) -> Prepared:
    dim, size = shape.head_dim, s.ops.device.block_size
    qkv = s.random(m, (shape.heads + 2 * shape.kv_heads) * dim)
    place = qkv.device
    blocks = -(-m // size)

    def pool() -> DenseKV:
        room = (blocks, shape.kv_heads, size, dim)
        return DenseKV(*(torch.zeros(room, dtype=s.dtype, device=place) for _ in range(2)))

    positions = torch.arange(m, dtype=torch.int32, device=place)
    slots = torch.randperm(blocks * size, device=place)[:m].int()
    rope = torch.rand(m, 2, dim // 2, device=place)
    norms: dict[str, Any] = {}
    if shape.qk_norm:
        norms = {n: torch.ones(dim, device=place) for n in ("q_norm", "k_norm")}
    mine, other = pool(), pool()
    place_of, slot_of = positions.long(), slots.long()
    heads = shape.heads + 2 * shape.kv_heads
    q_bytes = m * shape.heads * dim * qkv.itemsize
    kv_bytes = 2 * m * shape.kv_heads * dim * mine.k.itemsize
    return Prepared(
        lambda: s.ops.qk_norm_rope_append(qkv, positions, rope, mine, slots, **norms),
        _wanted(
            s,
            {
                TORCH: lambda: (
                    lambda: reference.qk_norm_rope_append(
                        qkv, place_of, rope, other, slot_of, **norms
                    )
                )
            },
        ),
        (3.0 + 4.0 * shape.qk_norm) * m * heads * dim,
        float(qkv.nbytes + q_bytes + kv_bytes + rope.nbytes),
    )


def _gated_act(shape: Shape, s: Setting, m: int) -> Prepared:
    x = s.random(m, 2 * shape.inner)

    def by_torch() -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    return Prepared(
        lambda: s.ops.gated_act(x, "silu"),
        _wanted(s, {TORCH: lambda: by_torch}),
        5.0 * m * shape.inner,
        1.5 * x.nbytes,
    )


def sample(shape: Shape, s: Setting) -> Iterator[Case]:
    """Greedy rows, rows at a temperature, and rows with top_k and top_p."""
    for name, m in itertools.product(("greedy", "temperature", "top_k top_p"), s.rows):
        if m <= 256:
            rank = 1 + (m not in (1, 64))
            yield Case(
                "sample", shape.name, name, m, rank, functools.partial(_sample, shape, s, name, m)
            )


def _sample(shape: Shape, s: Setting, name: str, m: int) -> Prepared:
    place = s.ops.device.torch_device
    logits = torch.randn(m, shape.vocab, device=place) * 3
    batch = sample_batch(m, place, hot=name != "greedy", filtered=name == "top_k top_p")
    spare = torch.empty_like(logits)

    def consuming(draw: Callable[..., Tensor]) -> Run:
        # Logits are consumed; the copy is part of the figure, and small against the rest.
        return lambda: draw(spare.copy_(logits), batch, None, None)

    by_torch = (lambda: logits.argmax(-1)) if name == "greedy" else consuming(reference.sample)
    mine = s.ops.sample
    return Prepared(
        (lambda: mine(logits, batch, None, None)) if name == "greedy" else consuming(mine),
        _wanted(s, {TORCH: lambda: by_torch}),
        2.0 * logits.numel(),
        (1.0 if name == "greedy" else 3.0) * logits.nbytes,
        waits=name != "greedy",
    )


def sample_batch(rows: int, place: torch.device, *, hot: bool, filtered: bool) -> SampleBatch:
    """Rows that differ in nothing but their uniforms."""
    generator = torch.Generator().manual_seed(rows)

    def all_rows(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=place)

    none = torch.zeros(0, dtype=torch.int32, device=place)
    return SampleBatch(
        temperature=all_rows(0.8 if hot else 0.0),
        top_k=all_rows(50 if filtered else 0, torch.int32),
        top_p=all_rows(0.9 if filtered else 1.0),
        min_p=all_rows(0.0),
        presence_penalty=all_rows(0.0),
        frequency_penalty=all_rows(0.0),
        repetition_penalty=all_rows(1.0),
        uniform=torch.rand(rows, generator=generator).to(place),
        state_row=all_rows(-1, torch.int32),
        mask_row=all_rows(-1, torch.int32),
        bias_row=none,
        bias_token=none,
        bias_value=torch.zeros(0, device=place),
        seen_row=none,
        seen_token=none,
        penalised=False,
        filtered=filtered,
        greedy=not hot,
    )
