"""The compiled attention programs, executed: planned memory, cube and vector cores, flags.

Tolerances: the result and the probabilities are rounded to the type, 2^-11 for float16 and 2^-8
for bfloat16, of values up to about 4.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tests.ascend.compiler import Program, compile_kernel
from tests.ascend.emulator import launch
from tests.ascend.memory import Fault, from_bf16, to_bf16
from tests.kernels_triton import compile_cases
from tests.kernels_triton.attention_cases import merge_case, tasks_case, tree_case
from tests.kernels_triton.cases import Case, Chunk, Shape, make_case, mixes, random_tree
from xylite.kernels_triton.attention_tiles import AttentionTiles, attention_tiles
from xylite.runtime import task_table

TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2}
CORES = 3


def to_bits(x: np.ndarray, dtype: str) -> np.ndarray:
    return to_bf16(x) if dtype == "bf16" else np.ascontiguousarray(x, np.float16)


def to_values(x: np.ndarray, dtype: str) -> np.ndarray:
    return (from_bf16(x) if dtype == "bf16" else x).astype(np.float64)


@functools.cache
def program(make: Callable[..., compile_cases.Case], generation: str, *arguments: Any) -> Program:
    """The compiled program of one of the case makers; compiled once per process."""
    case = make(*arguments)
    made = compile_kernel(
        case.kernel,
        case.signature,
        case.constants,
        name=case.name,
        generation=generation,
        **case.options,
    )
    assert made.ok, made
    return made


@dataclass(frozen=True)
class Programs:
    """The three kernels for one shape, by generation and type."""

    shape: Shape
    tile_q: tuple[int, ...]
    dtype: str = "fp16"
    generation: str = "1.2.0"
    int8: bool = False

    def tree(self, width: int) -> str:
        return program(_tree, self.generation, self.shape, width).hivm

    def tasks(self, tile_q: int) -> str:
        chip = f"910b-{self.generation}"
        multibuffer = attention_tiles(chip, self.shape.dim).options[0]["multibuffer"]
        args = (self.shape, self.tile_q, tile_q, self.dtype, multibuffer, self.int8)
        return program(_tasks, self.generation, *args).hivm

    def merge(self) -> str:
        return program(_merge, self.generation, self.shape, self.dtype).hivm


def _tree(shape: Shape, width: int) -> compile_cases.Case:
    return tree_case(shape, width, options={})


def _merge(shape: Shape, dtype: str) -> compile_cases.Case:
    return merge_case(shape, dtype=dtype, options={"multibuffer": 1})


def _tasks(
    shape: Shape, classes: tuple[int, ...], tile_q: int, dtype: str, multibuffer: int, int8: bool
) -> compile_cases.Case:
    columns = attention_tiles("910b-1.2.0", shape.dim).columns
    options = ({"multibuffer": multibuffer},) * len(classes)
    tiles = AttentionTiles(classes, shape.block_size, columns, options)
    return tasks_case(shape, tiles, tile_q, dtype=dtype, int8=int8)


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 values and one scale per token and head."""
    scale = np.nan_to_num(np.abs(x).max(-1), nan=1.0) / 127
    return np.nan_to_num(np.rint(x / scale[..., None])).astype(np.int8), scale.astype(np.float32)


def run(
    case: Case, programs: Programs, edit: Callable[[str], str] = lambda text: text
) -> np.ndarray:
    """Tree bias, tasks of each class and merge, all emulated; [G, rows, D]. `edit` spoils the
    text of the task programs, for controls."""
    shape, t, dtype = case.shape, case.table, programs.dtype
    table = task_table.build(
        t,
        num_kv_heads=shape.heads,
        group=shape.group,
        window=shape.window,
        tile_classes=programs.tile_q,
        kv_tile=shape.block_size,
        num_cores=CORES,
    )
    rows, spare = case.q.shape[1], 3  # the rest of a bucket that this iteration does not fill
    q = np.full((shape.heads, rows + spare, shape.dim), np.nan)
    q[:, :rows] = case.q
    position = np.full(rows + spare, np.nan, np.float32)
    position[:rows] = np.repeat(t.positions, shape.group)
    width = 2 * shape.block_size
    tree = np.full((1 + rows + spare, width), np.nan, np.float16)
    tree[0] = 0
    parts = int(table.parts[1]) + 1
    acc = np.full((parts, shape.dim), np.nan, np.float32)
    maxima, sums = np.full((2, parts), np.nan, np.float32)
    out = to_bits(np.full(q.shape, np.nan), dtype)
    if programs.int8:
        (k, ks), (v, vs) = quantised(case.k), quantised(case.v)
    else:
        k, v = (to_bits(x, dtype) for x in (case.k, case.v))
        ks = vs = acc
    mask = np.concatenate([t.tree_mask.astype(np.int8), np.zeros(1, np.int8)])
    left = []
    for c in table.classes:
        tasks = np.concatenate([c.tasks, np.full((1, c.tasks.shape[1]), 1 << 30, np.int32)])
        chunks = (t.kv_len, t.num_draft, t.bias_start)
        args: list[Any] = [tree, mask, tasks, c.core_start, *chunks, width]
        left += launch(programs.tree(width), args, CORES).leftover
        args = [
            to_bits(q, dtype), k, v, ks, vs, out, acc, maxima, sums, tasks, c.core_start,
            t.block_table, position, tree, rows + spare, t.block_table.shape[1], width,
        ]  # fmt: skip
        left += launch(edit(programs.tasks(c.tile_q)), args, CORES).leftover
    merges = np.concatenate([table.merges, np.zeros((1, table.merges.shape[1]), np.int32)])
    args = [out, acc, maxima, sums, merges, table.parts, rows + spare]
    left += launch(programs.merge(), args, 2).leftover
    assert not left, f"flags set and never awaited: {left}"
    assert np.isnan(acc[-1]).all(), "wrote beyond its parts"
    result = to_values(out, dtype)
    assert np.isnan(result[:, rows:]).all(), "wrote rows that no task names"
    return result[:, :rows]


def rounded(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: to_values(to_bits(x, dtype), dtype)


def error(result: np.ndarray, case: Case) -> float:
    return float(np.nan_to_num(np.abs(result - case.expected), nan=np.inf).max(initial=0))


@pytest.mark.parametrize(
    "group, dtype, generation",
    [(1, "fp16", "1.1.0"), (3, "bf16", "1.2.0"), (7, "fp16", "1.2.0"), (8, "bf16", "1.1.0")],
)
def test_compiled_programs_give_right_numbers_on_a_mixed_batch(group, dtype, generation):
    rng = np.random.default_rng(group)
    shape = Shape(group=group, block_size=32)
    case = make_case(rng, shape, mixes(rng, 32)["everything"], rounded(dtype))
    result = run(case, Programs(shape, (16, 64), dtype, generation))
    assert error(result, case) < TOLERANCE[dtype]


def test_compiled_programs_give_right_numbers_where_a_prefix_is_shared(monkeypatch):
    monkeypatch.setattr(task_table, "PREFIX_CUT", 64)
    rng = np.random.default_rng(9)
    shape = Shape(block_size=32)
    chunks = [Chunk(130, 1), Chunk(70, 3, shared=3), Chunk(200, 1), Chunk(190, 1, shared=5)]
    case = make_case(rng, shape, chunks, rounded("fp16"))
    result = run(case, Programs(shape, (16, 64)))
    assert error(result, case) < TOLERANCE["fp16"]


@pytest.mark.parametrize("mix", ["one token", "decode", "prefill", "verify"])
def test_compiled_programs_give_right_numbers_on_each_kind_of_batch(mix):
    rng = np.random.default_rng(len(mix))
    shape = Shape(block_size=32)
    case = make_case(rng, shape, mixes(rng, 32)[mix], rounded("fp16"))
    result = run(case, Programs(shape, (16, 64)))
    assert error(result, case) < TOLERANCE["fp16"]


@pytest.mark.parametrize(
    "dim, window, cap, dtype",
    [
        (128, 0, 0.0, "bf16"),
        (80, 0, 0.0, "fp16"),
        (96, 200, 0.0, "bf16"),
        (192, 0, 20.0, "fp16"),
        (256, 150, 20.0, "bf16"),
    ],
)
def test_tiles_of_the_table_give_right_numbers_on_a_mixed_batch(dim, window, cap, dtype):
    """The programs that are launched on the chip, with its blocks of 128 keys."""
    rng = np.random.default_rng(dim)
    shape = Shape(1, 4, dim, 128, window, cap)
    tiles = attention_tiles("910b-1.2.0", dim, window=window, cap=cap)
    chunks = [
        Chunk(250, 40), Chunk(383, 1), Chunk(130, 9, random_tree(rng, 8)), Chunk(0, 3)
    ]  # fmt: skip
    case = make_case(rng, shape, chunks, rounded(dtype))
    result = run(case, Programs(shape, tiles.tile_q, dtype))
    assert error(result, case) < TOLERANCE[dtype]


def test_int8_keys_and_values_are_scaled_by_the_compiled_program():
    rng = np.random.default_rng(2)
    shape = Shape(1, block_size=32)
    case = make_case(rng, shape, mixes(rng, 32)["verify"], rounded("fp16"))
    result = run(case, Programs(shape, (16, 64), int8=True))
    # 127 steps per largest element: half a step of values up to about 4, twice.
    assert 1e-3 < error(result, case) < 0.1


def test_an_empty_batch_ends_without_deadlock():
    shape = Shape(block_size=32)
    case = make_case(np.random.default_rng(0), shape, [])
    assert run(case, Programs(shape, (16, 64))).shape[1] == 0


# ------------------------------------------------------------------------------ negative controls


@pytest.fixture
def small() -> tuple[Case, Programs]:
    rng = np.random.default_rng(0)
    shape = Shape(block_size=32)
    case = make_case(rng, shape, [Chunk(60, 1), Chunk(10, 30)], rounded("fp16"))
    return case, Programs(shape, (64,))


def without(text: str, mark: str, index: int) -> str:
    """The program without one of the lines that hold `mark`."""
    lines = text.splitlines()
    drop = [i for i, line in enumerate(lines) if mark in line][index]
    return "\n".join(line for i, line in enumerate(lines) if i != drop)


def test_a_missing_flag_is_noticed_as_a_deadlock(small):
    with pytest.raises(Fault, match="DEADLOCK"):
        run(*small, lambda text: without(text, "sync_block_set", 1))


def test_a_missing_wait_is_noticed_by_the_flag_that_is_left(small):
    with pytest.raises(AssertionError, match="never awaited"):
        run(*small, lambda text: without(text, "sync_block_wait", -1))


def test_buffers_that_overlap_give_wrong_numbers(small):
    case, programs = small

    def overlap(text: str) -> str:
        """All float32 [32, 32] tiles of a vector core at one address."""
        cast = r"pointer_cast\(%c\d+_i64\)(.*memref<32x32xf32, #hivm.address_space<ub>>)"
        edited, n = re.subn(cast, r"pointer_cast(%c2048_i64)\1", text)
        assert n > 1
        constant = "    %c2048_i64 = arith.constant 2048 : i64\n"
        body = re.search(r"func\.func @\w+_mix_aiv.*\n", edited)
        assert body
        if constant.strip() in edited[body.end() :]:
            return edited
        return edited[: body.end()] + constant + edited[body.end() :]

    assert error(run(case, programs, overlap), case) > 0.1


def test_an_address_beyond_the_vector_memory_is_a_fault(small):
    def beyond(text: str) -> str:
        """The last accumulator tile of a vector core moved to its last bytes."""
        name = re.findall(r"pointer_cast\((%c\d+_i64)\) : memref<32x64xf32,", text)[-1]
        constant = rf"(\{name} = arith\.constant) \d+ :"
        start = text.index("_mix_aiv(")
        return text[:start] + re.sub(constant, r"\1 196600 :", text[start:])

    with pytest.raises(Fault, match=r"outside \[0, 196608\)"):
        run(*small, beyond)


def test_a_block_that_does_not_exist_is_a_fault(small):
    case, programs = small
    table = case.table.block_table.copy()
    table[0, 1] = len(case.k)
    case = replace(case, table=replace(case.table, block_table=table))
    with pytest.raises(Fault, match="outside"):
        run(case, programs)
