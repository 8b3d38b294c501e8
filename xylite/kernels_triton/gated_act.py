"""Gated activation of rows that hold gate and up side by side, and the embedding gather."""

import triton
import triton.language as tl

from xylite.kernels_triton.smooth_gemm import activate


@triton.jit
def gated_act(p_x, p_out, p_rows, F: tl.constexpr, TILE_C: tl.constexpr, ACT: tl.constexpr):
    """out = act(x[:, :F]) * x[:, F:], computed in float32; grid = cores.

    p_x [T, 2 F], p_out [T, F], p_rows [1] int32: T; ACT "silu" or "gelu_tanh"
    """
    PIECES: tl.constexpr = (F + TILE_C - 1) // TILE_C
    o_c = tl.arange(0, TILE_C)
    for i_task in range(tl.program_id(0), tl.load(p_rows) * PIECES, tl.num_programs(0)):
        i_row = i_task // PIECES
        c = (i_task - i_row * PIECES) * TILE_C
        p = p_x + tl.cast(i_row, tl.int64) * (2 * F) + c
        m = o_c < F - c
        b_gate = tl.load(p + o_c, mask=m, other=0.0).to(tl.float32)
        b_up = tl.load(p + F + o_c, mask=m, other=0.0).to(tl.float32)
        b_y = activate(b_gate, ACT) * b_up
        out = tl.cast(i_row, tl.int64) * F + c
        tl.store(p_out + out + o_c, b_y.to(p_out.dtype.element_ty), mask=m)


@triton.jit
def gather_rows(p_table, p_index, p_out, p_rows, C: tl.constexpr, TILE_C: tl.constexpr):
    """out[t] = table[index[t]]; grid = cores.

    p_table [V, C], p_index [T] int32 in [0, V), p_out [T, C], p_rows [1] int32: T
    """
    PIECES: tl.constexpr = (C + TILE_C - 1) // TILE_C
    o_c = tl.arange(0, TILE_C)
    for i_task in range(tl.program_id(0), tl.load(p_rows) * PIECES, tl.num_programs(0)):
        i_row = i_task // PIECES
        c = (i_task - i_row * PIECES) * TILE_C
        m = o_c < C - c
        source = tl.load(p_index + i_row).to(tl.int64) * C + c
        b_x = tl.load(p_table + source + o_c, mask=m, other=0.0)
        tl.store(p_out + tl.cast(i_row, tl.int64) * C + c + o_c, b_x, mask=m)
