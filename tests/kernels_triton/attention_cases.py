"""The attention kernels as things to compile, on Ascend and on CUDA. No torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from tests.kernels_triton.cases import Shape
from tests.kernels_triton.compile_cases import Case, pointers
from xylite.kernels_triton import meta_attention
from xylite.kernels_triton.attention_tiles import HEAD_SIZES, AttentionTiles, attention_tiles
from xylite.runtime.step import MERGE_FIELDS, TASK_FIELDS


def power_of_two(n: int) -> int:
    return 1 << max(0, (n - 1).bit_length())


def tasks_case(
    shape: Shape,
    tiles: AttentionTiles,
    tile_q: int,
    *,
    dtype: str = "bf16",
    tree: bool = True,
    int8: bool = False,
) -> Case:
    """`meta_attention_tasks` for one tile class."""
    kv = "i8" if int8 else dtype
    signature = {
        **pointers(q=dtype, k=kv, v=kv, ks="fp32", vs="fp32", o=dtype),
        **pointers(acc="fp32", max="fp32", sum="fp32", tasks="i32", core_start="i32"),
        **pointers(block_table="i32", position="fp32", tree="fp16"),
        **dict.fromkeys(("q_rows", "table_width", "tree_width"), "i32"),
    }
    first, second = tiles.columns
    constants = {
        "SCALE": shape.scale, "CAP": shape.cap, "WINDOW": shape.window, "G": shape.heads,
        "GROUP": shape.group, "TILE_Q": tile_q, "TILE_KV": shape.block_size, "D": shape.dim,
        "D0": first, "D1": second, "FIELDS": len(TASK_FIELDS), "HAS_TREE": tree,
        "HAS_SCALES": int8,
    }  # fmt: skip
    extra = [f"window {shape.window}"] * (shape.window > 0) + [f"cap {shape.cap}"] * (shape.cap > 0)
    extra += ["trees"] * tree + ["int8 KV"] * int8
    name = " ".join([f"attention {dtype} {tile_q}x{shape.block_size} D {shape.dim}", *extra])
    options = tiles.options[tiles.tile_q.index(tile_q)]
    return Case(name, meta_attention.meta_attention_tasks, signature, constants, options)


def merge_case(shape: Shape, *, dtype: str = "bf16", options: Mapping[str, Any]) -> Case:
    """`merge_parts`."""
    signature = {
        **pointers(o=dtype, acc="fp32", max="fp32", sum="fp32", merges="i32", parts="i32"),
        "q_rows": "i32",
    }
    constants = {
        "D": shape.dim, "TILE_D": power_of_two(shape.dim), "TILE_R": 16,
        "FIELDS": len(MERGE_FIELDS),
    }  # fmt: skip
    return Case(
        f"merge {dtype} D {shape.dim}", meta_attention.merge_parts, signature, constants, options
    )


def tree_case(shape: Shape, width: int, *, options: Mapping[str, Any]) -> Case:
    """`tree_bias_rows`."""
    signature = {
        **pointers(tree="fp16", mask="i8", tasks="i32", core_start="i32", kv_len="i32"),
        **pointers(num_draft="i32", bias_start="i32"),
        "tree_width": "i32",
    }
    constants = {
        "GROUP": shape.group, "TILE_KV": shape.block_size, "TILE_G": power_of_two(shape.group),
        "TILE_W": power_of_two(width), "FIELDS": len(TASK_FIELDS),
    }  # fmt: skip
    return Case(
        f"tree bias group {shape.group} width {width}", meta_attention.tree_bias_rows, signature,
        constants, options,
    )  # fmt: skip


def table_cases(chip: str) -> Iterator[Case]:
    """The tiles of a chip: of each head size both classes with all that a kernel can have at once,
    and the large one as most models run it."""
    for head_size in HEAD_SIZES:
        for window, cap, tree in ((1024, 50.0, True), (0, 0.0, False)):
            tiles = attention_tiles(chip, head_size, window=window, cap=cap)
            shape = Shape(8, 4, head_size, tiles.tile_kv, window, cap)
            for tile_q in tiles.tile_q if tree else tiles.tile_q[-1:]:
                yield tasks_case(shape, tiles, tile_q, tree=tree)
        most = attention_tiles(chip, head_size, window=1024, cap=50.0, int8=True)
        shape = Shape(8, 4, head_size, most.tile_kv, 1024, 50.0)
        for tile_q in most.tile_q:
            yield tasks_case(shape, most, tile_q, int8=True)
        plain = attention_tiles(chip, head_size, int8=True)
        if plain.tile_q != most.tile_q:
            shape = Shape(8, 4, head_size, plain.tile_kv)
            yield tasks_case(shape, plain, plain.tile_q[-1], int8=True)
    yield merge_case(Shape(dim=128), options={})
    yield merge_case(Shape(dim=80), options={})
    yield tree_case(Shape(group=7, block_size=64), 128, options={})
