"""Every row of the tile table through the real compiler, for the generations it is meant for."""

import pytest

from tests.ascend.compiler import compile_kernel
from tests.kernels_triton.compile_cases import GEMM_OPS, Case, cases, gemm_cases
from xylite.kernels_triton.smooth_gemm import smooth_gemm
from xylite.kernels_triton.tiles import Tiles, builtin

# Findings that are right where they stand, by kernel: why.
ALLOWED = {
    "scalar-store": {
        "add_rms_norm": "the sum of a row is one number",
        "quantise_rows": "the scale of a row is one number",
        "qk_norm_rope_append": "with one head per pass its sum of squares is one number",
        "sample": "maximum, mass and id of a row are single numbers; cumsum runs over 128 of them",
        "verify": "a row's answer is one number",
        "group_tasks": "a tile's task is four numbers",
    }
}
IN_PLACE = ("penalise",)


GENERATIONS = ("1.0.0", "1.1.0", "1.2.0")


def all_cases() -> list[tuple[str, Case]]:
    return [
        (g, case) for g in GENERATIONS for case in cases(f"910b-{g}", thorough=g == GENERATIONS[-1])
    ]


def ids(value: object) -> str:
    return value.name.replace(" ", "-") if isinstance(value, Case) else str(value)


@pytest.mark.parametrize("generation, case", all_cases(), ids=ids)
def test_case_fits_the_chip_as_it_is_written(generation, case):
    program = compile_kernel(
        case.kernel,
        case.signature,
        case.constants,
        name=case.name,
        generation=generation,
        **case.options,
    )
    assert program.ok, program
    assert not program.retries, program  # a retry gives up double buffering
    for space, used in program.memory.items():
        assert used <= program.limits[space], program
    # 1.0.0 leaves one of the two vector cores of every mixed kernel idle.
    assert program.vector_cores in (0, 1 if generation == "1.0.0" else 2), program
    if generation != "1.1.0" and program.vector_cores:
        assert not case.options["multibuffer"], program
    kernel = case.kernel.__name__
    unexplained = [
        f for f in program.findings if kernel not in ALLOWED.get(f.partition("=")[0], {})
    ]
    assert not unexplained, program
    # A store that reads lanes it does not own would race with their owner.
    assert kernel in IN_PLACE or 2 not in program.kinds, program


def test_every_row_of_the_table_is_compiled():
    compiled = {
        (g, case.constants[s], tuple(sorted(case.options)))
        for g, case in all_cases()
        for s in ("TILE_M", "TILE_C", "TILE_V")
        if s in case.constants
    }
    for row in builtin():
        chip, _, generation = row.chip.partition("-")
        if chip != "910b" or row.op == "rope":
            continue
        if row.op not in GEMM_OPS and row.dtype != ("float" if row.op == "sample" else "half"):
            continue
        size = row.sizes["TILE_M" if row.op in GEMM_OPS else "TILE"]
        assert (generation, size, tuple(sorted(row.options))) in compiled, row


def plain_gemm(m: int, n: int, k: int) -> Case:
    row = Tiles("linear", "910b-1.2.0", "half", {"TILE_M": m, "TILE_N": n, "TILE_K": k, "BAND": 4})
    return next(gemm_cases(row))


def test_a_tile_larger_than_the_accumulator_memory_is_refused():
    """The control of all the above: the planner would say so."""
    case = plain_gemm(256, 256, 64)
    program = compile_kernel(smooth_gemm, case.signature, case.constants)
    assert not program.ok
    assert "cc overflow, requires 2097152 bits while 1048576 bits available" in program.error


def test_a_tile_that_loses_its_double_buffers_is_noticed():
    case = plain_gemm(128, 128, 1024)
    program = compile_kernel(smooth_gemm, case.signature, case.constants, multibuffer=True)
    assert program.retries
