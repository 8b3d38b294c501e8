"""SmoothGEMM: linear layers with fixed tiles, whatever the number of tokens.

Source: Song et al. 2026 (XY-Serve), section 6. M, the number of tokens, is padded *virtually*: on
chip every tile is full, from and to memory only the rows that exist. M is read from the device, so
a captured launch serves any M up to its capacity. N and K are compile-time constants.

The task list of a GEMM is regular, so it needs no memory: task i is the i-th tile of a serpentine
walk, and core c runs tasks c, c + cores, c + 2 cores, ...

Weight formats (`FORMAT`), all [N, K] with K innermost:

    ""        same type as x
    "int8"    int8, one scale per row of w; exact in the epilogue
    "w8a8"    x is int8 with one scale per token, w as above; the product is exact in int32
    "int4"    two values per byte, groups of TILE_K columns with a scale and a zero each. Byte j of
              a group holds column j in its low and column j + TILE_K / 2 in its high half, so
              that a tile unpacks without shuffling: two half tiles, two products
"""

import triton
import triton.language as tl


@triton.jit
def serpentine(i_task, tiles_m, tiles_n, BAND: tl.constexpr):
    """(M tile, N tile) of task i: bands of BAND M tiles, walked along N, every other one back.

    Within a band the tiles of one column follow each other, so they share the weight tile; the
    turn at the end of a band starts with the weights that were read last.
    """
    per_band = BAND * tiles_n
    i_band = i_task // per_band
    first = i_band * BAND
    height = tl.minimum(tiles_m - first, BAND)
    i = i_task - i_band * per_band
    i_col = i // height
    i_m = first + i - i_col * height
    back = i_band % 2
    i_n = i_col + back * (tiles_n - 1 - 2 * i_col)
    return i_m, i_n


@triton.jit
def activate(b_gate, ACT: tl.constexpr):
    """SiLU or tanh-GELU in float32, both as x * sigmoid(s) so that no tanh is needed; the
    bound keeps the exponential finite and is far below what float32 can add to 1."""
    if ACT == "silu":
        b_s = b_gate
    else:
        b_s = 1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
    return b_gate / (1.0 + tl.exp(tl.minimum(-b_s, 80.0)))


@triton.jit
def soft_cap(b_y, CAP: tl.constexpr):
    """CAP * tanh(y / CAP), by an exponential that cannot overflow; NaN stays NaN."""
    b_z = b_y * (2.0 / CAP)
    return CAP * (1.0 - 2.0 / (1.0 + tl.exp(tl.where(b_z > 80.0, 80.0, b_z))))


@triton.jit
def _load_x(p_x, o_k, o_m, rows, K: tl.constexpr, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(p_x + o_m[:, None] * K + o_k[None, :], mask=(o_m < rows)[:, None], other=0.0)
    m = (o_m < rows)[:, None] & (o_k < K)[None, :]
    return tl.load(p_x + o_m[:, None] * K + o_k[None, :], mask=m, other=0.0)


@triton.jit
def _load_w(
    p_w, o_k, o_n, cols, K: tl.constexpr, PITCH: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    p = p_w + o_n[:, None] * PITCH + o_k[None, :]
    if EVEN_N and EVEN_K:
        return tl.load(p)
    if EVEN_K:
        return tl.load(p, mask=(o_n < cols)[:, None], other=0)
    return tl.load(p, mask=(o_n < cols)[:, None] & (o_k < K)[None, :], other=0)


@triton.jit
def _unpack4(b_packed, b_scale, b_zero, HIGH: tl.constexpr):
    """One half of a tile of packed 4-bit values, as float32. Signed bytes: the high half is in
    [-8, 7], the low half in [0, 15]; zeros are stored accordingly (see `pack_int4`)."""
    b_q = b_packed.to(tl.float32)
    b_high = tl.floor(b_q * 0.0625)
    if HIGH:
        return (b_high + 8.0 - b_zero) * b_scale
    return (b_q - b_high * 16.0 - b_zero) * b_scale


@triton.jit
def _accumulate_int4(
    p_x, p_w, p_ws, p_wz, acc, rows, cols,
    K: tl.constexpr, N_ALL: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """acc + x @ w.T over all groups of columns; the group is TILE_K, which divides K."""
    o_m = tl.arange(0, TILE_M)
    o_n = tl.arange(0, TILE_N)
    o_j = tl.arange(0, TILE_K // 2)
    for i_g in range(K // TILE_K):
        b_lo = _load_x(p_x, i_g * TILE_K + o_j, o_m, rows, K, True)
        b_hi = _load_x(p_x, i_g * TILE_K + TILE_K // 2 + o_j, o_m, rows, K, True)
        b_w = _load_w(p_w, i_g * (TILE_K // 2) + o_j, o_n, cols, K, K // 2, EVEN_N, True)
        b_s = tl.load(p_ws + i_g * N_ALL + o_n, mask=o_n < cols, other=0.0).to(tl.float32)[:, None]
        b_z = tl.load(p_wz + i_g * N_ALL + o_n, mask=o_n < cols, other=0.0).to(tl.float32)[:, None]
        b_w_lo = _unpack4(b_w, b_s, b_z, False).to(b_lo.dtype)
        b_w_hi = _unpack4(b_w, b_s, b_z, True).to(b_lo.dtype)
        acc = tl.dot(b_lo, tl.trans(b_w_lo), acc, input_precision="ieee")
        acc = tl.dot(b_hi, tl.trans(b_w_hi), acc, input_precision="ieee")
    return acc


@triton.jit
def _accumulate(
    p_x, p_w, p_up, acc, acc_up, rows, cols,
    K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, FORMAT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """acc + x @ w.T, and the same with the up rows if GATED; x is read once for both."""
    o_m = tl.arange(0, TILE_M)
    o_n = tl.arange(0, TILE_N)
    o_j = tl.arange(0, TILE_K)
    for i_k in range(0, K, TILE_K):
        b_x = _load_x(p_x, i_k + o_j, o_m, rows, K, EVEN_K)
        b_w = _load_w(p_w, i_k + o_j, o_n, cols, K, K, EVEN_N, EVEN_K)
        if FORMAT == "int8":
            b_w = b_w.to(b_x.dtype)
        if FORMAT == "w8a8":
            acc = tl.dot(b_x, tl.trans(b_w), acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(b_x, tl.trans(b_w), acc, input_precision="ieee")
        if GATED:
            b_u = _load_w(p_up, i_k + o_j, o_n, cols, K, K, EVEN_N, EVEN_K)
            if FORMAT == "int8":
                b_u = b_u.to(b_x.dtype)
            if FORMAT == "w8a8":
                acc_up = tl.dot(b_x, tl.trans(b_u), acc_up, out_dtype=tl.int32)
            else:
                acc_up = tl.dot(b_x, tl.trans(b_u), acc_up, input_precision="ieee")
    return acc, acc_up


@triton.jit
def _scaled(
    acc, p_xs, p_ws, p_bias, o_m, o_n, rows, cols, FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """The accumulator as float32, with the scales of its format and the bias."""
    b_y = acc.to(tl.float32)
    if FORMAT == "int8" or FORMAT == "w8a8":
        b_y = b_y * tl.load(p_ws + o_n, mask=o_n < cols, other=0.0).to(tl.float32)[None, :]
    if FORMAT == "w8a8":
        b_y = b_y * tl.load(p_xs + o_m, mask=o_m < rows, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        b_y = b_y + tl.load(p_bias + o_n, mask=o_n < cols, other=0.0).to(tl.float32)[None, :]
    return b_y


@triton.jit
def gemm_tile(
    p_x, p_xs, p_w, p_ws, p_wz, p_bias, p_res, p_out, row, rows, i_n,
    N: tl.constexpr, K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, FORMAT: tl.constexpr, ACT: tl.constexpr, CAP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr,
):  # fmt: skip
    """One output tile: rows [row, row + rows) of x, columns i_n * TILE_N onwards of the N outputs.

    With ACT, w has 2 N rows: gate rows, then up rows.
    """
    GATED: tl.constexpr = ACT != ""
    N_ALL: tl.constexpr = 2 * N if GATED else N
    EVEN_N: tl.constexpr = N % TILE_N == 0
    EVEN_K: tl.constexpr = K % TILE_K == 0
    W_PITCH: tl.constexpr = K // 2 if FORMAT == "int4" else K
    o_m = tl.arange(0, TILE_M)
    o_n = tl.arange(0, TILE_N)
    col = i_n * TILE_N
    cols = N - col
    row = tl.cast(row, tl.int64)
    p_x += row * K
    p_xs += row
    p_w += tl.cast(col, tl.int64) * W_PITCH
    p_ws += col
    p_wz += col
    p_bias += col
    p_up = p_w + N * W_PITCH
    if FORMAT == "w8a8":
        acc = tl.zeros([TILE_M, TILE_N], tl.int32)
    else:
        acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    if FORMAT == "int4":
        up = acc
        acc = _accumulate_int4(
            p_x, p_w, p_ws, p_wz, acc, rows, cols, K, N_ALL, TILE_M, TILE_N, TILE_K, EVEN_N
        )
        if GATED:
            up = _accumulate_int4(
                p_x, p_up, p_ws + N, p_wz + N, up, rows, cols, K, N_ALL, TILE_M, TILE_N, TILE_K,
                EVEN_N,
            )  # fmt: skip
    else:
        acc, up = _accumulate(
            p_x, p_w, p_up, acc, acc, rows, cols, K, TILE_M, TILE_N, TILE_K, EVEN_N, EVEN_K,
            FORMAT, GATED,
        )  # fmt: skip
    b_y = _scaled(acc, p_xs, p_ws, p_bias, o_m, o_n, rows, cols, FORMAT, HAS_BIAS)
    if GATED:
        b_up = _scaled(up, p_xs, p_ws + N, p_bias + N, o_m, o_n, rows, cols, FORMAT, HAS_BIAS)
        b_y = activate(b_y, ACT) * b_up
    if CAP != 0.0:
        b_y = soft_cap(b_y, CAP)
    o_out = o_m[:, None] * N + o_n[None, :]
    m_out = (o_m < rows)[:, None] & (o_n < cols)[None, :]
    out = row * N + col
    if HAS_RES:
        b_y += tl.load(p_res + out + o_out, mask=m_out, other=0.0).to(tl.float32)
    tl.store(p_out + out + o_out, b_y.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def smooth_gemm(
    p_x, p_xs, p_w, p_ws, p_wz, p_bias, p_res, p_out, p_rows,
    N: tl.constexpr, K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, BAND: tl.constexpr, FORMAT: tl.constexpr, ACT: tl.constexpr,
    CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr,
):  # fmt: skip
    """out = epilogue(x @ w.T); grid = cores.

    p_x     [T, K], int8 for "w8a8"
    p_xs    [T] float32 scales of x, "w8a8" only
    p_w     [N or 2 N, K], bytes [.., K / 2] for "int4"
    p_ws    scales [rows of w]; "int4": [K / group, rows of w]
    p_wz    zeros, like p_ws, "int4" only
    p_bias  [rows of w]
    p_res   [T, N], added last
    p_out   [T, N]
    p_rows  [1] int32: T

    Pointers that a variant does not use may be any valid pointer.
    """
    rows = tl.load(p_rows)
    TILES_N: tl.constexpr = (N + TILE_N - 1) // TILE_N
    tiles_m = (rows + TILE_M - 1) // TILE_M
    for i_task in range(tl.program_id(0), tiles_m * TILES_N, tl.num_programs(0)):
        i_m, i_n = serpentine(i_task, tiles_m, TILES_N, BAND)
        row = i_m * TILE_M
        gemm_tile(
            p_x, p_xs, p_w, p_ws, p_wz, p_bias, p_res, p_out, row,
            tl.minimum(rows - row, TILE_M), i_n, N, K, TILE_M, TILE_N, TILE_K, FORMAT, ACT, CAP,
            HAS_BIAS, HAS_RES,
        )  # fmt: skip


@triton.jit
def quantise_rows(p_x, p_q, p_s, p_rows, K: tl.constexpr, TILE_C: tl.constexpr):
    """Rows of x as int8 with one float32 scale each: s = max |x| / 127, q = round(x / s).

    p_x [T, K], p_q [T, K] int8, p_s [T]. A row of zeros gets scale 1. Ties round up.
    """
    rows = tl.load(p_rows)
    o_c = tl.arange(0, TILE_C)
    for i_row in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(i_row, tl.int64) * K
        top = 0.0
        for i_k in range(0, K, TILE_C):
            m = i_k + o_c < K
            b_x = tl.load(p_x + row + i_k + o_c, mask=m, other=0.0).to(tl.float32)
            top = tl.maximum(top, tl.max(tl.abs(b_x), 0))
        scale = tl.where(top > 0.0, top / 127.0, 1.0)
        tl.store(p_s + i_row, scale)
        for i_k in range(0, K, TILE_C):
            m = i_k + o_c < K
            b_x = tl.load(p_x + row + i_k + o_c, mask=m, other=0.0).to(tl.float32)
            b_q = tl.floor(b_x * (1.0 / scale) + 0.5)
            tl.store(p_q + row + i_k + o_c, b_q.to(tl.int8), mask=m)
