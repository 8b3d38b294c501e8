from dataclasses import replace

import pytest

from tests.kernels_triton import compile_cases
from xylite.errors import ConfigError
from xylite.kernels_triton import launch, tiles
from xylite.kernels_triton.tiles import FLOAT, HALF, Tiles

CHIPS = sorted({row.chip for row in tiles.builtin()})
TUNED = Tiles(
    "linear", "sm_90", HALF, {"TILE_M": 16, "TILE_N": 32, "TILE_K": 64, "BAND": 2},
    {"num_warps": 2}, max_rows=16, n=4096, k=4096,
)  # fmt: skip


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("op", ["linear", "epilogue", "gated"])
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 8192])
def test_every_gemm_has_tiles_on_every_chip(chip, op, rows):
    table = tiles.for_chip(chip)
    for dtype in (HALF, FLOAT, "int8", "w8a8", "int4"):
        if op == "linear" and dtype not in (HALF, FLOAT):
            continue  # quantised weights always have scales
        row = table.gemm(op, dtype, rows, 4096, 4096, 24)
        assert row.max_rows == 0 or row.max_rows >= rows


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("op", ["norm", "act", "gather", "rope", "sample"])
def test_every_vector_kernel_has_tiles_on_every_chip(chip, op):
    for dtype in (HALF, FLOAT):
        size = tiles.for_chip(chip).vector(op, dtype).sizes["TILE"]
        assert size & (size - 1) == 0


def test_narrow_tiles_are_taken_when_wide_ones_leave_cores_idle():
    table = tiles.for_chip("910b-1.2.0")
    wide = table.gemm("linear", HALF, 1, 28672, 4096, 24)
    narrow = table.gemm("linear", HALF, 1, 2048, 4096, 24)
    assert wide.sizes["TILE_N"] == 256 and narrow.sizes["TILE_N"] == 64
    assert wide.num_tasks(1, 28672) == 112 and narrow.num_tasks(1, 2048) == 32


def test_when_nothing_fills_the_cores_the_most_tasks_win():
    assert tiles.for_chip("910b-1.2.0").gemm("linear", HALF, 1, 128, 64, 24).sizes["TILE_N"] == 64


def test_cases_to_compile_have_the_tiles_of_the_launch():
    for chip in CHIPS:
        row = tiles.for_chip(chip).vector("rope", HALF)
        for heads in compile_cases.HEADS:
            assert compile_cases.rope_tiles(row, *heads) == launch.rope_tiles(row, *heads)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("op", ["linear", "epilogue", "gated"])
def test_an_invariant_table_has_one_row_whatever_the_batch(chip, op):
    table = tiles.for_chip(chip, [replace(TUNED, chip=chip, max_rows=0)], invariant=True)
    for n in (96, 4096):
        rows = {id(table.gemm(op, HALF, m, n, 4096, 24)) for m in (1, 16, 17, 500, 8192)}
        assert len(rows) == 1


def test_tuned_rows_win_where_they_fit_and_only_there():
    table = tiles.for_chip("sm_90", [TUNED])
    assert table.gemm("linear", HALF, 16, 4096, 4096, 132) is TUNED
    assert table.gemm("linear", HALF, 17, 4096, 4096, 132) is not TUNED
    assert table.gemm("linear", HALF, 16, 4096, 2048, 132) is not TUNED
    assert table.gemm("gated", HALF, 16, 4096, 4096, 132) is not TUNED


def test_merge_replaces_a_place_as_a_whole():
    old = [replace(TUNED, options={"num_warps": w}) for w in (4, 8)]
    other = replace(TUNED, max_rows=64)
    assert tiles.merge([TUNED], [*old, other]) == (TUNED, other)


def test_an_unknown_chip_is_named_with_those_that_exist():
    with pytest.raises(ConfigError, match=r"'sm_10'; there are tables for 910b-1\.0\.0, "):
        tiles.for_chip("sm_10")
