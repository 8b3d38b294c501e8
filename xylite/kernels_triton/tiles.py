"""Tile sizes and launch options as data: (op, chip, dtype, shape bucket) -> Tiles.

A row serves every shape it fits; rows for one exact (N, K), from a file that `xylite tune` wrote
(tuned.py), win over the built-in ones. Every built-in row is compiled in the tests for the chip it
names: on Ascend it fits UB, L1 and L0C without losing its double buffers, on CUDA it spills nothing
and fits the shared memory. The rows of sm_80 stay below 99 KiB of it, so that they serve sm_86,
sm_89 and sm_120 too.

Chips: "910b-1.0.0", "910b-1.1.0" and "910b-1.2.0" (all Ascend 910B and A3 have the same memories;
the number is the generation of the compiler, AscendNPU-IR in CANN 8.5, 9.0 and 9.1, which plan
differently), "sm_80", "sm_90", "interpreter". Meta-Attention's tiles are in attention_tiles.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from xylite.errors import ConfigError

INTERPRETER: Final = "interpreter"
HALF: Final = "half"  # bfloat16 and float16
FLOAT: Final = "float"  # float32
ANY_ROWS: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Tiles:
    """One row of the table.

    op        "linear": one accumulator, nothing after it; "epilogue": with bias, residual, cap or
              scales; "gated": two accumulators. Then one per other kernel
    dtype     HALF or FLOAT of the activations, or the weight format "int8", "w8a8", "int4"
    sizes     the kernel's tile constants
    options   launch options of that chip's compiler
    max_rows  serves up to this many rows; 0 = any number
    n, k      serves this exact weight shape; 0 = any
    """

    op: str
    chip: str
    dtype: str
    sizes: Mapping[str, int]
    options: Mapping[str, int] = field(default_factory=dict)
    max_rows: int = 0
    n: int = 0
    k: int = 0

    def num_tasks(self, rows: int, cols: int) -> int:
        """Tiles of a GEMM with this many rows and columns."""
        m, n = self.sizes["TILE_M"], self.sizes["TILE_N"]
        return -(-rows // m) * -(-cols // n)


def _gemms(
    chip: str, dtype: str, by_op: Mapping[str, Mapping[int, Iterable[str]]], **options: int
) -> list[Tiles]:
    """Rows from text: {op: {max_rows: ["16x128x256 w4 s3", ...]}}, best for large N first.

    The first number is TILE_M, then TILE_N and TILE_K; w = num_warps, s = num_stages.
    """
    rows = []
    for op, buckets in by_op.items():
        for max_rows, texts in buckets.items():
            for text in texts:
                shape, *rest = text.split()
                m, n, k = (int(x) for x in shape.split("x"))
                names = {"w": "num_warps", "s": "num_stages"}
                own = {names[word[0]]: int(word[1:]) for word in rest}
                sizes = {"TILE_M": m, "TILE_N": n, "TILE_K": k, "BAND": 8 if m < 128 else 4}
                rows.append(Tiles(op, chip, dtype, sizes, {**options, **own}, max_rows))
    return rows


def _rowwise(chip: str, half: Mapping[str, int], options: Mapping[str, int]) -> list[Tiles]:
    """Rows of the vector kernels: elements per pass, half as many in float32."""
    return [
        Tiles(op, chip, dtype, {"TILE": size // share}, options)
        for op, size in half.items()
        for dtype, share in ((HALF, 1), (FLOAT, 2))
    ]


def _ascend(generation: str) -> list[Tiles]:
    """Ascend 910B. Mixed kernels (cube and vector) run without automatic multi-buffering on
    generation 1.2.0: several projects met races in it, and the emulator of tests/ascend gets wrong
    numbers from such a GEMM with an epilogue. Pure cube and pure vector kernels keep it.

    Generation 1.0.0 leaves one of the two vector cores of a mixed kernel idle, so the other needs
    twice the memory: its tiles are smaller.
    """
    chip = f"910b-{generation}"
    first = generation == "1.0.0"
    mixed = {"multibuffer": generation == "1.1.0"}
    few = {16: ["16x256x256", "16x128x256", "16x64x256"], 64: ["64x256x256", "64x128x256"]}
    cube = {"linear": {**few, 0: ["128x256x128", "128x128x256", "64x128x256"]}}
    part = {16: ["16x128x256", "16x64x256"], 64: ["64x128x128", "64x64x128"]}
    wide = ["64x128x128"] if first else ["128x128x128", "64x128x128"]
    wide_two = ["64x64x128"] if first else ["128x64x128", "64x64x128"]
    both = {"epilogue": {**part, 0: wide}, "gated": {**part, 0: wide_two}}
    packed = {
        "epilogue": {
            16: ["16x64x128"] if first else ["16x128x128", "16x64x128"],
            0: ["64x64x128"] if first else ["128x128x128", "64x64x128"],
        },
        "gated": {16: ["16x64x128"], 0: ["64x64x128"]},
    }
    single = {16: ["16x128x128"], 0: ["64x64x128"]}
    vector = {"norm": 8192, "act": 4096, "gather": 8192, "rope": 2048, "sample": 4096}
    return [
        *_gemms(chip, HALF, cube, multibuffer=True),
        *_gemms(chip, HALF, both, **mixed),
        *_gemms(chip, FLOAT, {"linear": single}, multibuffer=True),
        *_gemms(chip, FLOAT, {"epilogue": single, "gated": single}, **mixed),
        *_gemms(chip, "int8", packed, **mixed),
        *_gemms(chip, "w8a8", both, **mixed),
        *_gemms(chip, "int4", packed, **mixed),
        *_rowwise(chip, vector, {"multibuffer": True}),
    ]


def _cuda(chip: str) -> list[Tiles]:
    """Stages times (x tile + w tiles) is the shared memory; accumulators are the registers."""
    big = chip == "sm_90"
    few = {16: ["16x64x128 w4 s4", "16x32x128 w4 s4"], 64: ["64x128x64 w4 s3", "64x64x64 w4 s4"]}
    many = ["128x256x64 w8 s3", "128x128x64 w8 s3"] if big else ["128x128x32 w8 s4"]
    part = ["128x128x64 w8 s3"] if big else ["128x128x32 w8 s4"]
    two = ["128x64x64 w8 s3"] if big else ["128x64x32 w8 s4"]
    half = {
        "linear": {**few, 0: [*many, "64x64x64 w4 s4"]},
        "epilogue": {**few, 0: [*part, "64x64x64 w4 s4"]},
        "gated": {16: ["16x32x128 w4 s4"], 64: ["64x64x64 w4 s3"], 0: [*two, "64x64x64 w4 s3"]},
    }
    single, single_two = {0: ["32x32x32 w4 s3"]}, {0: ["32x16x32 w4 s3"]}
    packed = {16: ["16x64x128 w4 s3"], 0: ["64x64x128 w4 s3"]}
    packed_two = {16: ["16x32x128 w4 s3"], 0: ["64x32x128 w4 s3"]}
    eight = {16: ["16x64x128 w4 s4"], 0: ["128x128x64 w8 s3", "64x64x64 w4 s3"]}
    vector = {"act": 1024, "gather": 4096, "rope": 4096, "sample": 4096}
    return [
        *_gemms(chip, HALF, half),
        *_gemms(chip, FLOAT, {"linear": single, "epilogue": single, "gated": single_two}),
        *_gemms(chip, "int8", {"epilogue": packed, "gated": packed_two}),
        *_gemms(chip, "w8a8", {"epilogue": eight, "gated": {0: ["64x64x64 w4 s3"]}}),
        *_gemms(chip, "int4", {"epilogue": packed, "gated": packed_two}),
        *_rowwise(chip, vector, {"num_warps": 8}),
        *_rowwise(chip, {"norm": 8192}, {"num_warps": 16}),
    ]


def _interpreter() -> list[Tiles]:
    """Small and large enough that tests meet ragged tiles and the interpreter stays quick."""
    rows = []
    for dtype in (HALF, FLOAT, "int8", "w8a8", "int4"):
        sizes = {"linear": {0: ["32x64x64"]}, "epilogue": {0: ["32x64x64"]}}
        rows += _gemms(INTERPRETER, dtype, {**sizes, "gated": {0: ["32x64x64"]}})
    vector = {"norm": 8192, "act": 8192, "gather": 8192, "rope": 16384, "sample": 8192}
    return rows + _rowwise(INTERPRETER, vector, {})


def builtin() -> tuple[Tiles, ...]:
    """Every row that comes with xylite."""
    return (
        *_ascend("1.0.0"), *_ascend("1.1.0"), *_ascend("1.2.0"),
        *_cuda("sm_80"), *_cuda("sm_90"), *_interpreter(),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TileTable:
    """The rows of one chip. Of two rows that fit equally well, the earlier one wins.

    invariant  the row for a weight does not depend on the number of rows of x, so neither does the
               order of its sums
    """

    chip: str
    rows: tuple[Tiles, ...]
    invariant: bool = False

    def gemm(self, op: str, dtype: str, rows: int, n: int, k: int, cores: int) -> Tiles:
        """The row for x [rows, k] @ w [n, k].T: of those of the smallest bucket that holds `rows`,
        the first whose tasks occupy every core, else the one with the most tasks."""
        if self.invariant:
            rows = ANY_ROWS
        fitting = self._bucket(op, dtype, rows, n, k) or self._bucket(op, dtype, rows, 0, 0)
        if not fitting:
            raise ConfigError(f"no GEMM tiles for {op} {dtype} on {self.chip}")
        if self.invariant:
            return fitting[0]
        for row in fitting:
            if row.num_tasks(rows, n) >= cores:
                return row
        return max(fitting, key=lambda row: row.num_tasks(rows, n))

    def _bucket(self, op: str, dtype: str, rows: int, n: int, k: int) -> list[Tiles]:
        fitting = [
            row
            for row in self.rows
            if (row.op, row.dtype, row.n, row.k) == (op, dtype, n, k)
            and (row.max_rows == 0 or row.max_rows >= rows)
        ]
        limit = min((row.max_rows or ANY_ROWS for row in fitting), default=0)
        return [row for row in fitting if (row.max_rows or ANY_ROWS) == limit]

    def vector(self, op: str, dtype: str) -> Tiles:
        """The row of a kernel without products."""
        for row in self.rows:
            if (row.op, row.dtype) == (op, dtype):
                return row
        raise ConfigError(f"no tiles for {op} {dtype} on {self.chip}")


def for_chip(chip: str, tuned: Iterable[Tiles] = (), invariant: bool = False) -> TileTable:
    """The table of a chip: tuned rows first, then the built-in ones."""
    rows = merge(tuned, (row for row in builtin() if row.chip == chip))
    if not rows:
        chips = sorted({row.chip for row in builtin()})
        raise ConfigError(f"no tiles for chip {chip!r}; there are tables for {', '.join(chips)}")
    return TileTable(chip, rows, invariant)


def merge(first: Iterable[Tiles], then: Iterable[Tiles]) -> tuple[Tiles, ...]:
    """Rows of both; of one (op, chip, dtype, bucket, shape) only those of `first`, if any."""

    def place(row: Tiles) -> tuple[Any, ...]:
        return row.op, row.chip, row.dtype, row.max_rows, row.n, row.k

    first = tuple(first)
    taken = {place(row) for row in first}
    return (*first, *(row for row in then if place(row) not in taken))
