"""The compiled programs of norm, rope + append, activation, gather and moves, executed by the
emulator, against float64."""

import numpy as np
import pytest

from tests.ascend.compiler import Program, compile_kernel
from tests.ascend.emulator import launch
from tests.ascend.test_execute_linear import SENTINEL, UNIT, read, sigmoid, stored
from tests.kernels_triton.compile_cases import pointers, rope_signature, rope_tiles
from xylite.kernels_triton.gated_act import gated_act, gather_rows
from xylite.kernels_triton.move_blocks import move_pieces, zero_blocks
from xylite.kernels_triton.norm_rope_append import add_rms_norm, qk_norm_rope_append
from xylite.kernels_triton.tiles import HALF, Tiles

both = pytest.mark.parametrize("generation", ["1.1.0", "1.2.0"])
kinds = pytest.mark.parametrize("kind", ["fp16", "bf16"])


def compiled(kernel, signature, constants, generation) -> Program:
    program = compile_kernel(kernel, signature, constants, generation=generation)
    assert program.ok, program
    return program


def run(program: Program, args: list, cores: int = 3) -> None:
    assert not launch(program.hivm, args, cores).leftover


def count(n: int):
    return np.array([n], np.int32)


def check(actual, exact, kind, terms=None) -> None:
    """One rounding to the output's type, and float32 arithmetic on terms of this size."""
    size = np.abs(exact) if terms is None else terms
    allowed = 1.02 * UNIT[kind] * np.abs(exact) + 1e-5 * size + 2.0**-24
    worst = (np.abs(actual - exact) / allowed).max()
    assert worst <= 1, worst


@both
@kinds
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("width, tile", [(320, 512), (300, 128)])
def test_compiled_norm_equals_float64(width, tile, residual, kind, generation):
    program = compiled(
        add_rms_norm,
        {**pointers(x=kind, res=kind, w=kind, out=kind, sum=kind, rows="i32"), "eps": "fp32"},
        {"C": width, "TILE_C": tile, "HAS_RES": residual},
        generation,
    )
    rng, rows = np.random.default_rng(0), 7
    x, res, w = (
        stored(rng.standard_normal(s), kind) for s in ((rows, width), (rows, width), (width,))
    )
    out, total = (stored(np.full((rows + 2, width), SENTINEL), kind) for _ in range(2))
    run(program, [x, res, w, out, total, count(rows), 1e-5])
    exact = read(x, kind) + (read(res, kind) if residual else 0)
    normed = exact / np.sqrt((exact**2).mean(1, keepdims=True) + 1e-5) * read(w, kind)
    check(read(out[:rows], kind), normed, kind)
    assert (read(out[rows:], kind) == SENTINEL).all()
    if residual:
        check(read(total[:rows], kind), exact, kind)
    assert (read(total[rows if residual else 0 :], kind) == SENTINEL).all()


@both
@kinds
@pytest.mark.parametrize("normed, int8", [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize(
    "h, g, d, rot, elements",
    [(6, 2, 64, 64, 2048), (7, 1, 64, 64, 2048), (9, 3, 64, 64, 128), (4, 4, 80, 32, 128)],
)
def test_compiled_rope_and_append_equal_float64(
    h, g, d, rot, elements, normed, int8, kind, generation
):
    t, n, p = 5, 2, 16
    row = Tiles("rope", "", HALF, {"TILE": elements})
    program = compiled(
        qk_norm_rope_append,
        rope_signature(kind, int8),
        {
            "H": h, "G": g, "D": d, "P": p, "ROT": rot, **rope_tiles(row, h, g, d, rot),
            "Q_NORM": normed, "K_NORM": normed, "HAS_SCALES": int8,
        },
        generation,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    qkv = stored(rng.standard_normal((t, (h + 2 * g) * d)), kind)
    positions = rng.integers(0, 50, t).astype(np.int32)
    slots = rng.permutation(n * p)[:t].astype(np.int32)
    angle = np.outer(np.arange(50), 1 / 10000 ** (np.arange(rot // 2) / (rot // 2)))
    rope = np.stack([np.cos(angle), np.sin(angle)], 1).astype(np.float32)
    norms = [stored(rng.standard_normal(d), kind) for _ in range(2)]
    q = stored(np.full((g, t * (h // g), d), SENTINEL), kind)
    k, v = (
        np.full((n, g, p, d), 77, np.int8)
        if int8
        else stored(np.full((n, g, p, d), SENTINEL), kind)
        for _ in range(2)
    )
    ks, vs = np.full((2, n, g, p), np.nan, np.float32)
    sizes = (count(t), t * (h // g) * d, 1e-5)
    run(program, [qkv, positions, rope, *norms, slots, q, k, v, ks, vs, *sizes])
    heads = read(qkv, kind).reshape(t, h + 2 * g, d)

    def turned(x, w):
        if normed:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * read(w, kind)
        cos, sin = (rope[positions, i].astype(np.float64)[:, None] for i in (0, 1))
        a, b, rest = np.split(x, [rot // 2, rot], -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    exact_q = turned(heads[:, :h], norms[0]).reshape(t, g, h // g, d).transpose(1, 0, 2, 3)
    terms = np.abs(exact_q).max()
    check(read(q, kind), exact_q.reshape(q.shape), kind, terms)
    for pool, scales, exact in (
        (k, ks, turned(heads[:, h : h + g], norms[1])),
        (v, vs, heads[:, h + g :]),
    ):
        if int8:
            scale = scales.transpose(0, 2, 1).reshape(n * p, g)
            assert np.isnan(np.delete(scale, slots, 0)).all()
            scale = scale[slots][..., None]
            np.testing.assert_allclose(scale[..., 0], np.abs(exact).max(-1) / 127, rtol=1e-5)
            rows = pool.transpose(0, 2, 1, 3).reshape(n * p, g, d)
            assert (np.abs(rows[slots] * scale - exact) <= 0.5001 * scale).all()
            assert (np.delete(rows, slots, 0) == 77).all()
            continue
        rows = read(pool, kind).transpose(0, 2, 1, 3).reshape(n * p, g, d)
        check(rows[slots], exact, kind, np.abs(exact).max())
        assert (np.delete(rows, slots, 0) == SENTINEL).all()


@both
@kinds
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_compiled_activation_equals_float64(act, kind, generation):
    width, rows = 300, 5
    program = compiled(
        gated_act,
        pointers(x=kind, out=kind, rows="i32"),
        {"F": width, "TILE_C": 128, "ACT": act},
        generation,
    )
    x = stored(np.random.default_rng(2).standard_normal((rows, 2 * width)) * 4, kind)
    out = stored(np.full((rows + 1, width), SENTINEL), kind)
    run(program, [x, out, count(rows)])
    gate, up = np.split(read(x, kind), 2, 1)
    inner = gate if act == "silu" else 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    check(read(out[:rows], kind), gate * sigmoid(inner) * up, kind, np.abs(gate * up))
    assert (read(out[rows:], kind) == SENTINEL).all()


@both
def test_compiled_gather_copies_rows(generation):
    program = compiled(
        gather_rows,
        pointers(table="bf16", index="i32", out="bf16", rows="i32"),
        {"C": 200, "TILE_C": 128},
        generation,
    )
    table = np.random.default_rng(3).integers(0, 0x7F80, (40, 200)).astype(np.uint16)
    index, out = np.array([39, 0, 7, 7, 1], np.int32), np.zeros((6, 200), np.uint16)
    run(program, [table, index, out, count(5)], 2)
    assert (out[:5] == table[index]).all() and (out[5] == 0).all()


@both
@pytest.mark.parametrize("whole_blocks", [False, True])
def test_compiled_moves_read_all_sources_first(whole_blocks, generation):
    n, g, p, d = 4, 3, 16, 40
    if whole_blocks:
        shape = {"ROWS": 1, "PIECE": g * p * d, "PIECES": 1, "STEP": 0, "TILE_C": 512}
        src, dst = np.array([0, 3], np.int32), np.array([3, 2], np.int32)
    else:
        shape = {"ROWS": p, "PIECE": d, "PIECES": g, "STEP": p * d, "TILE_C": 64}
        src, dst = np.array([5, 17, 63, 0], np.int32), np.array([17, 5, 0, 63], np.int32)
    kinds = pointers(from_k="bf16", from_v="bf16", to_k="bf16", to_v="bf16", index="i32", num="i32")
    k, v = np.random.default_rng(4).integers(0, 0x7F80, (2, n, g, p, d)).astype(np.uint16)
    buffers = [np.zeros((len(src), shape["PIECE"] * shape["PIECES"]), np.uint16) for _ in "kv"]
    pools = [k.copy(), v.copy()]
    for gather in (True, False):
        program = compiled(move_pieces, kinds, {**shape, "GATHER": gather}, generation)
        there, here = (pools, buffers) if gather else (buffers, pools)
        run(program, [*there, *here, src if gather else dst, count(len(src))])
    for pool, before in zip(pools, (k, v), strict=True):
        if whole_blocks:
            wanted = before.copy()
            wanted[dst] = before[src]
        else:
            rows = before.transpose(0, 2, 1, 3).reshape(n * p, g, d)
            moved = rows.copy()
            moved[dst] = rows[src]
            wanted = moved.reshape(n, p, g, d).transpose(0, 2, 1, 3)
        assert (pool == wanted).all()


@both
def test_compiled_zero_clears_these_blocks_only(generation):
    program = compiled(
        zero_blocks,
        pointers(k="bf16", v="bf16", blocks="i32", num="i32"),
        {"SIZE": 600, "TILE_C": 256},
        generation,
    )
    k, v = np.full((2, 4, 600), 0x7FC0, np.uint16)
    k, v = k.copy(), v.copy()
    run(program, [k, v, np.array([2, 0], np.int32), count(2)])
    for pool in (k, v):
        assert (pool[[0, 2]] == 0).all() and (pool[[1, 3]] == 0x7FC0).all()
