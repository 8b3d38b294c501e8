"""Grouped GEMM for experts: rows sorted by expert, each run of rows times its expert's weight.

The host does not know the routing, so the task table is made on the device: `group_tasks` turns
row counts into (expert, first row, rows) per M tile, and `grouped_gemm` walks (M tile, N tile)
pairs in the same serpentine as `smooth_gemm`, with the same tiles, formats and epilogues.
"""

import triton
import triton.language as tl

from xylite.kernels_triton.smooth_gemm import gemm_tile, serpentine

TASK_WIDTH = tl.constexpr(4)


@triton.jit
def group_tasks(p_count, p_tasks, p_num_tiles, E: tl.constexpr, TILE_M: tl.constexpr):
    """The M tiles of all experts; one program.

    p_count      [E] int32 rows of each expert; rows of expert e follow those of expert e - 1
    p_tasks      [capacity, 4] int32: expert, first row, rows, 0. sum(ceil(count / TILE_M)) rows
                 are written, never more than ceil(T / TILE_M) + min(E, T)
    p_num_tiles  [1] int32, how many
    """
    i_tile = 0
    row = 0
    for i_e in range(E):
        count = tl.load(p_count + i_e)
        tiles = (count + TILE_M - 1) // TILE_M
        for i in range(tiles):
            p = p_tasks + (i_tile + i) * TASK_WIDTH
            tl.store(p, i_e)
            tl.store(p + 1, row + i * TILE_M)
            tl.store(p + 2, tl.minimum(count - i * TILE_M, TILE_M))
        i_tile += tiles
        row += count
    tl.store(p_num_tiles, i_tile)


@triton.jit
def grouped_gemm(
    p_x, p_xs, p_w, p_ws, p_wz, p_bias, p_res, p_out, p_tasks, p_num_tiles,
    N: tl.constexpr, K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, BAND: tl.constexpr, FORMAT: tl.constexpr, ACT: tl.constexpr,
    CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr,
):  # fmt: skip
    """out = epilogue(x @ w[expert].T); grid = cores. Arguments as `smooth_gemm`, rows sorted by
    expert, every weight, scale, zero and bias with a leading expert axis.

    p_tasks, p_num_tiles  as `group_tasks` wrote them
    """
    TILES_N: tl.constexpr = (N + TILE_N - 1) // TILE_N
    W_ROWS: tl.constexpr = 2 * N if ACT != "" else N
    W_PITCH: tl.constexpr = K // 2 if FORMAT == "int4" else K
    SCALES: tl.constexpr = W_ROWS * (K // TILE_K) if FORMAT == "int4" else W_ROWS
    tiles_m = tl.load(p_num_tiles)
    for i_task in range(tl.program_id(0), tiles_m * TILES_N, tl.num_programs(0)):
        i_m, i_n = serpentine(i_task, tiles_m, TILES_N, BAND)
        i_e = tl.load(p_tasks + i_m * TASK_WIDTH).to(tl.int64)
        row = tl.load(p_tasks + i_m * TASK_WIDTH + 1)
        rows = tl.load(p_tasks + i_m * TASK_WIDTH + 2)
        gemm_tile(
            p_x, p_xs, p_w + i_e * (W_ROWS * W_PITCH), p_ws + i_e * SCALES, p_wz + i_e * SCALES,
            p_bias + i_e * W_ROWS, p_res, p_out, row, rows, i_n, N, K, TILE_M, TILE_N, TILE_K,
            FORMAT, ACT, CAP, HAS_BIAS, HAS_RES,
        )  # fmt: skip
