"""Tiles and swizzle of linear layers, measured for one model's shapes: `ops.Tuner` of Triton."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from triton.errors import TritonError

from xylite.kernels_triton import launch, tiles
from xylite.kernels_triton.launch import Target
from xylite.kernels_triton.tiles import FLOAT, HALF, Tiles, TileTable
from xylite.kernels_triton.tuned import TunedFile
from xylite.kernels_triton.weights import PackedWeight, unpack

Run = Callable[[], None]

LAST_ROWS: Final = (16, 64, 256, 1024, 0)  # of the ranges
MANY_ROWS: Final = 4096  # at which the last range is measured
MOST_WEIGHTS: Final = 8  # of a product that take turns in one measurement
BANDS: Final = (1, 2, 4, 8, 16)
# Shared memory of a block, as the tests of the built-in rows have it.
SHARED_BYTES: Final[Mapping[str, int]] = {"sm_80": 99 << 10, "sm_90": 227 << 10}
MOST_SUMS: Final = 128  # registers of a thread that hold sums
# What compilers and launches raise for tiles that do not fit.
FAILURES: Final = (TritonError, RuntimeError, ValueError, TypeError, AssertionError, OSError)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """Sizes and launch options of a row of the table."""

    sizes: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int], options: Mapping[str, int]) -> "Choice":
        return cls(tuple(sorted(sizes.items())), tuple(sorted(options.items())))


class TileTuner:
    """Candidates must compile, and give what torch gives for the unpacked weight.

    target   with the tiles that are used now; only the built-in ones count
    seconds  device time of one run of what it is given
    capture  records what a run submits, so that launches cost nothing; None: as it is
    """

    def __init__(
        self,
        target: Target,
        file: TunedFile,
        seconds: Callable[[Run], float],
        capture: Callable[[Run], Run] | None,
    ):
        self._target = replace(target, tiles=tiles.for_chip(target.tiles.chip))
        self._file = file
        self._seconds = seconds
        self._capture = capture
        self._inputs: _Inputs | None = None
        self._runs: dict[Choice, Run | None] = {}

    @property
    def path(self) -> Path:
        return self._file.path

    def format_of(self, weight: Any) -> str:
        if not isinstance(weight, PackedWeight):
            return "none"
        return weight.format or str(weight.data.dtype).removeprefix("torch.")

    def buckets(self, product: Any) -> Sequence[tuple[int, int]]:
        if not isinstance(product.weights[0], PackedWeight):
            return ()
        firsts = (1, *(last + 1 for last in LAST_ROWS[:-1]))
        pairs = zip(firsts, LAST_ROWS, strict=True)
        return [(first, last) for first, last in pairs if first <= product.most]

    def candidates(self, product: Any, bucket: tuple[int, int]) -> Sequence[Choice]:
        builtin = self._builtin(product, bucket)
        chip = self._target.tiles.chip
        made = _cuda if chip in SHARED_BYTES else _variants
        first = Choice.of(builtin.sizes, builtin.options)
        own = [row for row in self._target.tiles.rows
               if (row.op, row.dtype) == (builtin.op, builtin.dtype)]  # fmt: skip
        others = [*(Choice.of(row.sizes, row.options) for row in own), *made(builtin, bucket)]
        if builtin.dtype == "int4":  # the depth of a tile is the group, whatever the row says
            depth = builtin.sizes["TILE_K"]
            others = [c for c in others if dict(c.sizes)["TILE_K"] == depth]
        return list(dict.fromkeys((first, *others)))

    def near(self, product: Any, choice: Choice) -> Sequence[Choice]:
        """Another swizzle, other warps and stages."""
        sizes, options = dict(choice.sizes), dict(choice.options)
        found = [Choice.of(sizes | {"BAND": band}, options) for band in BANDS]
        if self._target.tiles.chip in SHARED_BYTES:
            changes = [{"num_warps": w} for w in (4, 8)]
            changes += [{"num_stages": options["num_stages"] + d} for d in (-1, 1)]
            found += [Choice.of(sizes, options | c) for c in changes if min(c.values()) > 1]
        return found

    def seconds(self, product: Any, bucket: tuple[int, int], choice: Choice) -> float:
        if self._inputs is None or not self._inputs.serve(product, bucket):
            self._inputs = _Inputs(product, bucket, self._target)
            self._runs.clear()
        if choice not in self._runs:
            self._runs[choice] = self._prepared(self._inputs, choice)
        run = self._runs[choice]
        return math.inf if run is None else self._seconds(run) / self._inputs.launches

    def describe(self, choice: Choice) -> str:
        s, o = dict(choice.sizes), dict(choice.options)
        words = [f"{s['TILE_M']}x{s['TILE_N']}x{s['TILE_K']}"]
        words += [f"{name[4]}{o[name]}" for name in ("num_warps", "num_stages") if name in o]
        return " ".join((*words, f"b{s['BAND']}"))

    def keep(self, product: Any, bucket: tuple[int, int], choice: Choice | None) -> None:
        """A row for every range, built-in ones too: it would else be served by the next larger."""
        row = self._builtin(product, bucket)
        if choice is not None:
            row = replace(row, sizes=dict(choice.sizes), options=dict(choice.options))
        n = product.n // 2 if product.act else product.n
        self._file.keep(replace(row, max_rows=bucket[1], n=n, k=product.k))

    def _builtin(self, product: Any, bucket: tuple[int, int]) -> Tiles:
        w, n = product.weights[0], product.n // 2 if product.act else product.n
        if product.act:
            op = "gated"
        elif w.format == "" and not (product.bias or product.residual or product.cap):
            op = "linear"
        else:
            op = "epilogue"
        kind = w.format or (FLOAT if product.dtype == torch.float32 else HALF)
        rows = _rows(product, bucket)
        return self._target.tiles.gemm(op, kind, rows, n, product.k, self._target.cores)

    def _prepared(self, inputs: "_Inputs", choice: Choice) -> Run | None:
        """What launches every weight once; None if the choice does not do here."""
        row = self._builtin(inputs.product, inputs.bucket)
        row = replace(row, sizes=dict(choice.sizes), options=dict(choice.options), max_rows=0)
        gemms = ("linear", "epilogue", "gated")
        rest = [r for r in self._target.tiles.rows if r.op not in gemms]
        target = replace(self._target, tiles=TileTable(row.chip, (row, *rest)))
        try:
            if not inputs.right(target):
                log.info("%s gives another result: left out", self.describe(choice))
                return None
            run = inputs.run(target)
            return self._capture(run) if self._capture else run
        except FAILURES as e:
            said = (str(e).strip().splitlines() or [""])[0]
            log.info("%s is left out: %s: %s", self.describe(choice), type(e).__name__, said)
            return None


def _rows(product: Any, bucket: tuple[int, int]) -> int:
    """Rows at which a range is measured."""
    return min(bucket[1] or MANY_ROWS, product.most)


def _variants(row: Tiles, bucket: tuple[int, int]) -> Iterator[Choice]:
    """Smaller tiles than the built-in one."""
    for name in ("TILE_M", "TILE_N", "TILE_K"):
        if row.sizes[name] >= 32:
            yield Choice.of({**row.sizes, name: row.sizes[name] // 2}, row.options)


def _cuda(row: Tiles, bucket: tuple[int, int]) -> Iterator[Choice]:
    """Tiles for this many rows that may fit shared memory and registers."""
    last = bucket[1] or MANY_ROWS
    wide = 4 if row.dtype == FLOAT else 2
    x_bytes = 1 if row.dtype == "w8a8" else wide
    w_bytes = 1 if row.dtype in ("int8", "w8a8", "int4") else wide
    both = 2 if row.op == "gated" else 1
    for m in (16, 32, 64, 128):
        if m > max(16, last) or (last > 64 and m < 64):
            continue
        for n in (32, 64, 128, 256):
            warps = 8 if m * n * both >= 128 * 128 else 4
            for k in (32, 64, 128):
                stages = 3
                shared = stages * k * (m * x_bytes + both * n * w_bytes)
                sums = m * n * both // (32 * warps)
                if shared <= SHARED_BYTES[row.chip] and sums <= MOST_SUMS:
                    sizes = {"TILE_M": m, "TILE_N": n, "TILE_K": k, "BAND": 8 if m < 128 else 4}
                    yield Choice.of(sizes, {"num_warps": warps, "num_stages": stages})


class _Inputs:
    """What one product is measured with, and what its result should be."""

    def __init__(self, product: Any, bucket: tuple[int, int], target: Target):
        self.product, self.bucket = product, bucket
        device = product.weights[0].data.device
        g = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g).to(product.dtype).to(device)

        rows, n = _rows(product, bucket), product.n // 2 if product.act else product.n
        self._x = random(rows, product.k)
        self._bias = random(product.n) if product.bias else None
        self._residual = random(rows, n) if product.residual else None
        self._weights = product.weights[:MOST_WEIGHTS]
        self.launches = len(self._weights)
        # Not a multiple of any tile, so that what lies beyond the last row counts too.
        self._checked = max(1, rows - 1)
        self._expected = self._reference(target)

    def serve(self, product: Any, bucket: tuple[int, int]) -> bool:
        return self.product is product and self.bucket == bucket

    def run(self, target: Target) -> Run:
        def run() -> None:
            for w in self._weights:
                self._call(target, w, self._x, self._residual)

        return run

    def right(self, target: Target) -> bool:
        """Whether the first weight gives the expected result, up to rounding of the output."""
        x, residual = self._x[: self._checked], self._residual
        residual = None if residual is None else residual[: self._checked]
        got = self._call(target, self._weights[0], x, residual).float()
        tolerance = 1e-4 if self.product.dtype == torch.float32 else 2e-2
        scale = self._expected.square().mean().sqrt() + self._expected.abs()
        return bool(((got - self._expected).abs() <= tolerance * scale).all())

    def _call(self, target: Target, w: Any, x: Tensor, residual: Tensor | None) -> Tensor:
        p = self.product
        return launch.linear(target, x, w, self._bias, residual=residual, act=p.act, cap=p.cap)

    def _reference(self, target: Target) -> Tensor:
        """In float32 by torch, from the values that the kernel multiplies."""
        p, w, x = self.product, self._weights[0], self._x[: self._checked]
        if w.format == "w8a8":
            q, scale = launch.quantise(target, x)
            x = q.float() * scale[:, None]
        y = x.float() @ unpack(w).float().T
        if self._bias is not None:
            y += self._bias.float()
        if p.act:
            gate, up = y.chunk(2, 1)
            gelu = p.act == "gelu_tanh"
            act = (
                torch.nn.functional.gelu(gate, approximate="tanh")
                if gelu
                else gate.sigmoid() * gate
            )
            y = act * up
        if p.cap:
            y = p.cap * torch.tanh(y / p.cap)
        if self._residual is not None:
            y = y + self._residual[: self._checked].float()
        return y
