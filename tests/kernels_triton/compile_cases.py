"""Every row of the tile table as kernels to compile; used on Ascend and on CUDA. No torch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from xylite.kernels_triton import (
    gated_act,
    grouped_gemm,
    move_blocks,
    norm_rope_append,
    sampling,
    smooth_gemm,
)
from xylite.kernels_triton.tiles import FLOAT, HALF, Tiles, builtin

GEMM_OPS = ("linear", "epilogue", "gated")


@dataclass(frozen=True, slots=True)
class Case:
    """One compilation. signature: run-time arguments, "*bf16", "i32", ...; constants: the rest."""

    name: str
    kernel: Callable[..., Any]
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]


def power_of_two(n: int) -> int:
    return 1 << max(0, (n - 1).bit_length())


def pointers(**kinds: str) -> dict[str, str]:
    """Signature of pointer arguments p_NAME."""
    return {f"p_{name}": f"*{kind}" for name, kind in kinds.items()}


def activation(row: Tiles) -> str:
    return "fp32" if row.dtype == FLOAT else "bf16"


def gemm_signature(row: Tiles, kind: str, *tail: str) -> dict[str, str]:
    x = "i8" if row.dtype == "w8a8" else kind
    w = kind if row.dtype in (HALF, FLOAT) else "i8"
    tensors = pointers(x=x, xs="fp32", w=w, ws="fp32", wz="fp32", bias=kind, res=kind, out=kind)
    return {**tensors, **pointers(**dict.fromkeys(tail, "i32"))}


def gemm_constants(row: Tiles, n: int, k: int) -> dict[str, Any]:
    """All that the op may have at once: what it needs less of fits all the more."""
    form = row.dtype if row.dtype not in (HALF, FLOAT) else ""
    plain = row.op == "linear"
    return {
        "N": n, "K": k, **row.sizes, "FORMAT": form, "ACT": "silu" if row.op == "gated" else "",
        "CAP": 0.0 if plain or row.op == "gated" else 30.0, "HAS_BIAS": not plain,
        "HAS_RES": not plain,
    }  # fmt: skip


def gemm_cases(row: Tiles) -> Iterator[Case]:
    m, n, k = (row.sizes[s] for s in ("TILE_M", "TILE_N", "TILE_K"))
    name = f"{row.op} {row.dtype} {m}x{n}x{k}"
    ragged = (1000, 640 if row.dtype == "int4" else 576)
    for label, (cols, depth) in {"": (4096, 4096), " ragged": ragged}.items():
        constants = gemm_constants(row, cols, depth)
        signature = gemm_signature(row, activation(row), "rows")
        yield Case(name + label, smooth_gemm.smooth_gemm, signature, constants, row.options)
    signature = gemm_signature(row, activation(row), "tasks", "num_tiles")
    constants = gemm_constants(row, 768, 2048)
    yield Case(f"grouped {name}", grouped_gemm.grouped_gemm, signature, constants, row.options)


def norm_cases(row: Tiles) -> Iterator[Case]:
    kind, most = activation(row), row.sizes["TILE"]
    signature = pointers(x=kind, res=kind, w=kind, out=kind, sum=kind, rows="i32")
    for width in (576, 4096, 5120, 8192, 16384):
        for residual in (True, False):
            tile = min(most, power_of_two(width))
            constants = {"C": width, "TILE_C": tile, "HAS_RES": residual}
            yield Case(
                f"norm {row.dtype} {width} in {tile}{' + residual' if residual else ''}",
                norm_rope_append.add_rms_norm, {**signature, "eps": "fp32"}, constants, row.options,
            )  # fmt: skip


def act_cases(row: Tiles) -> Iterator[Case]:
    kind, tile = activation(row), row.sizes["TILE"]
    for act in ("silu", "gelu_tanh"):
        yield Case(
            f"{act} {row.dtype} in {tile}", gated_act.gated_act,
            pointers(x=kind, out=kind, rows="i32"), {"F": 11008, "TILE_C": tile, "ACT": act},
            row.options,
        )  # fmt: skip
    yield Case(
        f"quantise {row.dtype} in {tile}", smooth_gemm.quantise_rows,
        pointers(x=kind, q="i8", s="fp32", rows="i32"), {"K": 11008, "TILE_C": tile}, row.options,
    )  # fmt: skip


def gather_cases(row: Tiles) -> Iterator[Case]:
    kind, tile = activation(row), row.sizes["TILE"]
    yield Case(
        f"gather {row.dtype} in {tile}", gated_act.gather_rows,
        pointers(table=kind, index="i32", out=kind, rows="i32"), {"C": 5120, "TILE_C": tile},
        row.options,
    )  # fmt: skip
    moved = pointers(from_k=kind, from_v=kind, to_k=kind, to_v=kind, index="i32", num="i32")
    slots = {"ROWS": 128, "PIECE": 128, "PIECES": 8, "STEP": 128 * 128, "TILE_C": 128}
    blocks = {"ROWS": 1, "PIECE": 8 * 128 * 128, "PIECES": 1, "STEP": 0, "TILE_C": tile}
    for gather in (True, False):
        for name, shape in (("slots", slots), ("blocks", blocks)):
            yield Case(
                f"{'read' if gather else 'write'} {name} {row.dtype}", move_blocks.move_pieces,
                moved, {**shape, "GATHER": gather}, row.options,
            )  # fmt: skip
    if row.dtype == HALF:
        yield from int8_cases(row)
    yield Case(
        f"zero blocks {row.dtype}", move_blocks.zero_blocks,
        pointers(k=kind, v=kind, blocks="i32", num="i32"),
        {"SIZE": 8 * 128 * 128, "TILE_C": tile}, row.options,
    )  # fmt: skip


def int8_cases(row: Tiles) -> Iterator[Case]:
    """Moving and clearing int8 KV and its scales, [N, G, P]."""
    tile = row.sizes["TILE"]
    for what, kind, d in (("values", "i8", 128), ("scales", "fp32", 1)):
        moved = pointers(**dict.fromkeys(("from_k", "from_v", "to_k", "to_v"), kind))
        moved |= pointers(index="i32", num="i32")
        slots = {"ROWS": 128, "PIECE": d, "PIECES": 8, "STEP": 128 * d, "TILE_C": d}
        block = 8 * 128 * d
        blocks = {"ROWS": 1, "PIECE": block, "PIECES": 1, "STEP": 0, "TILE_C": min(tile, block)}
        for gather in (True, False):
            for name, shape in (("slots", slots), ("blocks", blocks)):
                yield Case(
                    f"{'read' if gather else 'write'} int8 {what} of {name}",
                    move_blocks.move_pieces, moved, {**shape, "GATHER": gather}, row.options,
                )  # fmt: skip
        yield Case(
            f"zero int8 {what} of blocks", move_blocks.zero_blocks,
            pointers(k=kind, v=kind, blocks="i32", num="i32"),
            {"SIZE": block, "TILE_C": min(tile, block)}, row.options,
        )  # fmt: skip


# (H, G, D, rotated columns): Llama-3-8B, Qwen2.5-7B, Gemma-2-9B, Phi-2, SmolLM2-135M, Llama-3-70B,
# Qwen3-30B-A3B, StableLM.
HEADS = (
    (32, 8, 128, 128), (28, 4, 128, 128), (16, 8, 256, 256), (32, 32, 80, 32), (9, 3, 64, 64),
    (64, 8, 128, 128), (32, 4, 128, 128), (32, 8, 64, 16),
)  # fmt: skip


def rope_tiles(row: Tiles, h: int, g: int, d: int, rot: int) -> dict[str, int]:
    """As launch.rope_tiles, which needs torch; test_tiles.py holds them equal."""
    tile_h, tile_d = power_of_two(h // g), power_of_two(max(1, rot // 2))
    rest = power_of_two(max(1, d - rot))
    fit = max(1, row.sizes["TILE"] // (tile_h * max(tile_d, rest)))
    tile_g = min(power_of_two(g), 1 << (fit.bit_length() - 1))
    return {
        "TILE_G": tile_g, "TILE_H": tile_h, "TILE_D": tile_d, "TILE_REST": rest,
        "TILE_V": power_of_two(d),
    }  # fmt: skip


def rope_signature(kind: str, int8: bool = False) -> dict[str, str]:
    """Run-time arguments of `qk_norm_rope_append`; int8: of the cache."""
    kv = "i8" if int8 else kind
    tensors = pointers(
        qkv=kind, positions="i32", rope="fp32", q_norm=kind, k_norm=kind, slots="i32", q=kind,
        k=kv, v=kv, ks="fp32", vs="fp32", rows="i32",
    )  # fmt: skip
    return {**tensors, "q_stride": "i32", "eps": "fp32"}


def rope_cases(row: Tiles) -> Iterator[Case]:
    kind = activation(row)
    for h, g, d, rot in HEADS:
        for normed, int8 in ((True, False), (False, False), (True, True)):
            constants = {
                "H": h, "G": g, "D": d, "P": 128, "ROT": rot, **rope_tiles(row, h, g, d, rot),
                "Q_NORM": normed, "K_NORM": normed, "HAS_SCALES": int8,
            }  # fmt: skip
            extra = " + norms" * normed + " to int8" * int8
            yield Case(
                f"rope {row.dtype} H{h} G{g} D{d} rot{rot}{extra}",
                norm_rope_append.qk_norm_rope_append, rope_signature(kind, int8), constants,
                row.options,
            )  # fmt: skip


def sample_cases(row: Tiles) -> Iterator[Case]:
    if row.dtype != FLOAT:
        return  # logits are float32
    tile, v = row.sizes["TILE"], 151936
    signature = pointers(
        logits="fp32", temperature="fp32", top_k="i32", top_p="fp32", floor="fp32",
        uniform="fp32", ids="i32", rows="i32",
    )  # fmt: skip
    kinds = {"greedy": (True, False), "random": (False, False), "filtered": (False, True)}
    for name, (greedy, filtered) in kinds.items():
        constants = {
            "V": v, "PITCH": v, "TILE_V": tile, "TILE_S": tile // 4, "GREEDY": greedy,
            "FILTERED": filtered,
        }  # fmt: skip
        yield Case(f"sample {name}", sampling.sample, signature, constants, row.options)
    yield Case(
        "penalise", sampling.penalise,
        pointers(
            logits="fp32", count="i32", prompt="i8", repetition="fp32", frequency="fp32",
            presence="fp32", rows="i32",
        ),
        {"V": v, "PITCH": v, "TILE_V": tile}, row.options,
    )  # fmt: skip
    yield Case(
        "verify", sampling.verify,
        pointers(**dict.fromkeys(("ids", "parent", "draft_token", "accepted", "rows"), "i32")),
        {}, row.options,
    )  # fmt: skip
    yield Case(
        "group_tasks", grouped_gemm.group_tasks,
        pointers(count="i32", tasks="i32", num_tiles="i32"), {"E": 128, "TILE_M": 64}, row.options,
    )  # fmt: skip


def cases(chip: str, *, thorough: bool = True) -> list[Case]:
    """What the tests compile for a chip: at least one kernel for every row of its table.

    Not thorough: without the variants that need no more memory than their neighbours: ragged
    shapes, most experts, most head counts, vector kernels in float32.
    """
    makers = {
        **dict.fromkeys(GEMM_OPS, gemm_cases),
        "norm": norm_cases, "act": act_cases, "gather": gather_cases, "rope": rope_cases,
        "sample": sample_cases,
    }  # fmt: skip
    rows = [row for row in builtin() if row.chip == chip]
    found = {
        case.name + str(sorted(case.options.items())): case
        for row in rows
        for case in makers[row.op](row)
        if thorough or _is_essential(row, case.name)
    }
    return list(found.values())


def _is_essential(row: Tiles, name: str) -> bool:
    if row.op in GEMM_OPS:
        return "ragged" not in name and ("grouped" not in name or "gated half" in name)
    heads = any(f" H{h} G{g} D{d} " in name + " " for h, g, d, _ in HEADS[:4])
    return (row.dtype == HALF or row.op == "sample") and (
        row.op not in ("rope", "norm")
        or (row.op == "rope" and heads and "norms" in name)
        or (row.op == "norm" and "residual" in name)
    )
