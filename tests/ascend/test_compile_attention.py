"""Every attention tile through the real compiler, for the generations it is meant for.

Of window, soft cap and tree bias each kind has all it can have at once.
"""

from collections.abc import Iterator

import pytest

from tests.ascend.compiler import Program, compile_kernel
from tests.kernels_triton.attention_cases import merge_case, tasks_case, tree_case
from tests.kernels_triton.cases import Shape
from tests.kernels_triton.compile_cases import Case
from xylite.errors import ConfigError
from xylite.kernels_triton.attention_tiles import HEAD_SIZES, AttentionTiles, attention_tiles

KINDS = {"plain": (0, 0.0), "window": (1024, 0.0), "cap": (0, 50.0), "both": (1024, 50.0)}


def shape_of(head_size: int, kind: str) -> Shape:
    window, cap = KINDS[kind]
    return Shape(8, 4, head_size, 128, window, cap)


def tiles_of(chip: str, shape: Shape, int8: bool = False) -> AttentionTiles:
    return attention_tiles(chip, shape.dim, window=shape.window, cap=shape.cap, int8=int8)


def entries(generation: str) -> Iterator[Case]:
    chip = f"910b-{generation}"
    for head_size in HEAD_SIZES:
        for kind in KINDS:
            shape = shape_of(head_size, kind)
            tiles = tiles_of(chip, shape)
            for tile_q in tiles.tile_q:
                if tile_q == 16 and kind in ("window", "cap"):
                    continue  # less than "both", in the same tile
                yield tasks_case(shape, tiles, tile_q)
        for kind in ("plain", "both"):
            shape = shape_of(head_size, kind)
            tiles = tiles_of(chip, shape, int8=True)
            for tile_q in tiles.tile_q if kind == "both" else tiles.tile_q[-1:]:
                yield tasks_case(shape, tiles, tile_q, int8=True)


def compile_case(case: Case, generation: str) -> Program:
    return compile_kernel(
        case.kernel,
        case.signature,
        case.constants,
        name=case.name,
        generation=generation,
        **case.options,
    )


def assert_fits(program: Program, vector_cores: int = 2) -> None:
    assert program.ok, program
    assert not program.retries, program  # a retry gives up code motion or double buffers
    for space, used in program.memory.items():
        assert used <= program.limits[space], program
    assert program.vector_cores == vector_cores, program
    assert not program.findings, program
    assert 2 not in program.kinds, program


def ids(value: object) -> str:
    return value.name.replace(" ", "-") if isinstance(value, Case) else str(value)


@pytest.mark.parametrize(
    "generation, case", [(g, c) for g in ("1.1.0", "1.2.0") for c in entries(g)], ids=ids
)
def test_attention_fits_the_chip_and_uses_both_vector_cores(generation, case):
    assert_fits(compile_case(case, generation))


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_attention_fits_the_chip_with_the_oldest_compiler_on_one_vector_core(head_size):
    shape = shape_of(head_size, "both")
    tiles = tiles_of("910b-1.0.0", shape)
    assert_fits(compile_case(tasks_case(shape, tiles, tiles.tile_q[-1]), "1.0.0"), vector_cores=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_size", HEAD_SIZES[:-1])
def test_int8_kv_fits_the_chip_with_the_oldest_compiler(head_size, kind):
    shape = shape_of(head_size, kind)
    tiles = tiles_of("910b-1.0.0", shape, int8=True)
    case = tasks_case(shape, tiles, tiles.tile_q[-1], int8=True)
    assert_fits(compile_case(case, "1.0.0"), vector_cores=1)


def test_int8_kv_of_the_largest_heads_is_refused_with_the_oldest_compiler():
    with pytest.raises(ConfigError, match="910b-1.0.0 has no kernel for int8 KV at head size 256"):
        tiles_of("910b-1.0.0", shape_of(256, "plain"), int8=True)


@pytest.mark.parametrize("generation", ["1.1.0", "1.2.0"])
@pytest.mark.parametrize("head_size", [80, 256])
def test_merging_parts_fits_the_chip(head_size, generation):
    case = merge_case(shape_of(head_size, "plain"), options={"multibuffer": True})
    assert_fits(compile_case(case, generation), vector_cores=0)


@pytest.mark.parametrize("group", [1, 7, 8])
def test_the_bias_of_draft_trees_fits_the_chip(group):
    shape = Shape(8, group, 128, 128)
    assert_fits(compile_case(tree_case(shape, 256, options={}), "1.2.0"), vector_cores=0)


def test_a_tile_larger_than_the_vector_memory_is_refused():
    """The control of all the above: the planner would say so."""
    shape = Shape(8, 4, 128, 256)
    tiles = AttentionTiles((128,), 256, (128, 0), ({"multibuffer": 0},))
    program = compile_case(tasks_case(shape, tiles, 128), "1.2.0")
    assert not program.ok
    assert "ub overflow, requires" in program.error
    assert "bits while 1572864 bits available" in program.error
