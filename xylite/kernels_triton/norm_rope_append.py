"""What stands between the GEMMs of a layer: residual + RMSNorm, and q/k norm + rope + KV append.

Both are one pass over rows that fit on chip; longer rows are walked twice, in pieces, reading the
inputs again rather than what was just written.

KV in int8 has one float32 scale per token and KV head, the largest magnitude / 127, so a token is
written once and never again, and its values do not depend on what else is in the batch.
"""

import triton
import triton.language as tl


@triton.jit
def add_rms_norm(
    p_x, p_res, p_w, p_out, p_sum, p_rows, eps,
    C: tl.constexpr, TILE_C: tl.constexpr, HAS_RES: tl.constexpr,
):  # fmt: skip
    """sum = x + res, out = sum / sqrt(mean(sum^2) + eps) * w; grid = cores.

    p_x, p_res, p_out, p_sum  [T, C]; p_sum is written only if HAS_RES; the norm is of the sum
                              before it is rounded to its type
    p_w                       [C]
    p_rows                    [1] int32: T
    """
    rows = tl.load(p_rows)
    o_c = tl.arange(0, TILE_C)
    if TILE_C >= C:
        m = o_c < C
        b_w = tl.load(p_w + o_c, mask=m, other=0.0).to(tl.float32)
        for i_row in range(tl.program_id(0), rows, tl.num_programs(0)):
            row = tl.cast(i_row, tl.int64) * C
            b_x = tl.load(p_x + row + o_c, mask=m, other=0.0).to(tl.float32)
            if HAS_RES:
                b_x += tl.load(p_res + row + o_c, mask=m, other=0.0).to(tl.float32)
                tl.store(p_sum + row + o_c, b_x.to(p_sum.dtype.element_ty), mask=m)
            factor = 1.0 / tl.sqrt(tl.sum(b_x * b_x, 0) / C + eps)
            tl.store(p_out + row + o_c, (b_x * factor * b_w).to(p_out.dtype.element_ty), mask=m)
    else:
        for i_row in range(tl.program_id(0), rows, tl.num_programs(0)):
            row = tl.cast(i_row, tl.int64) * C
            b_square = tl.zeros([TILE_C], tl.float32)
            for c in range(0, C, TILE_C):
                m = o_c < C - c
                b_x = tl.load(p_x + row + c + o_c, mask=m, other=0.0).to(tl.float32)
                if HAS_RES:
                    b_x += tl.load(p_res + row + c + o_c, mask=m, other=0.0).to(tl.float32)
                    tl.store(p_sum + row + c + o_c, b_x.to(p_sum.dtype.element_ty), mask=m)
                b_square += b_x * b_x
            factor = 1.0 / tl.sqrt(tl.sum(b_square, 0) / C + eps)
            for c in range(0, C, TILE_C):
                m = o_c < C - c
                b_x = tl.load(p_x + row + c + o_c, mask=m, other=0.0).to(tl.float32)
                if HAS_RES:
                    b_x += tl.load(p_res + row + c + o_c, mask=m, other=0.0).to(tl.float32)
                b_w = tl.load(p_w + c + o_c, mask=m, other=0.0).to(tl.float32)
                b_y = (b_x * factor * b_w).to(p_out.dtype.element_ty)
                tl.store(p_out + row + c + o_c, b_y, mask=m)


@triton.jit
def _scale(b_top, b_total):
    """Scales of int8 rows from their largest magnitudes. A row of zeros gets 1; one that is not
    finite, as its sum tells, gets NaN: a maximum may pass over NaN."""
    return tl.where(b_top == 0.0, 1.0, b_top / 127.0) + 0.0 * b_total


@triton.jit
def _quantise(b_x, b_scale):
    """round(x / scale), ties up."""
    return tl.floor(b_x * (1.0 / b_scale) + 0.5).to(tl.int8)


@triton.jit
def _turn_heads(
    p_src, p_dst, p_scale, p_norm, b_cos, b_sin, eps, heads, groups, SRC_GROUP: tl.constexpr,
    dst_group, dst_head, scale_group, D: tl.constexpr, ROT: tl.constexpr, TILE_G: tl.constexpr,
    TILE_H: tl.constexpr, TILE_D: tl.constexpr, TILE_REST: tl.constexpr, HAS_NORM: tl.constexpr,
    QUANTISE: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of [groups, heads] heads of one token.

    The rotated part of a head is two halves of TILE_D columns, ROT / 2 of which exist; the rest of
    the head passes through in TILE_REST columns. p_src has strides (SRC_GROUP, D, 1), p_dst
    (dst_group, dst_head, 1). b_cos, b_sin [TILE_D].
    QUANTISE  p_dst is int8, p_scale has one scale per group, scale_group apart; TILE_H is 1
    """
    HALF: tl.constexpr = ROT // 2
    o_g = tl.arange(0, TILE_G)[:, None, None]
    o_h = tl.arange(0, TILE_H)[None, :, None]
    o_d = tl.arange(0, TILE_D)[None, None, :]
    m = (o_g < groups) & (o_h < heads) & (o_d < HALF)
    src = o_g * SRC_GROUP + o_h * D + o_d
    dst = o_g * dst_group + o_h * dst_head + o_d
    b_1 = tl.load(p_src + src, mask=m, other=0.0).to(tl.float32)
    b_2 = tl.load(p_src + HALF + src, mask=m, other=0.0).to(tl.float32)
    if ROT < D:
        o_r = tl.arange(0, TILE_REST)[None, None, :]
        m_r = (o_g < groups) & (o_h < heads) & (o_r < D - ROT)
        src_r = o_g * SRC_GROUP + o_h * D + o_r
        dst_r = o_g * dst_group + o_h * dst_head + o_r
        b_r = tl.load(p_src + ROT + src_r, mask=m_r, other=0.0).to(tl.float32)
    if HAS_NORM:
        o_1 = tl.arange(0, TILE_D)
        b_square = tl.sum(b_1 * b_1, 2) + tl.sum(b_2 * b_2, 2)
        if ROT < D:
            b_square += tl.sum(b_r * b_r, 2)
        b_f = (1.0 / tl.sqrt(b_square / D + eps))[:, :, None]
        b_w1 = tl.load(p_norm + o_1, mask=o_1 < HALF, other=0.0).to(tl.float32)
        b_w2 = tl.load(p_norm + HALF + o_1, mask=o_1 < HALF, other=0.0).to(tl.float32)
        b_1 = b_1 * b_f * b_w1[None, None, :]
        b_2 = b_2 * b_f * b_w2[None, None, :]
        if ROT < D:
            o_3 = tl.arange(0, TILE_REST)
            b_w3 = tl.load(p_norm + ROT + o_3, mask=o_3 < D - ROT, other=0.0).to(tl.float32)
            b_r = b_r * b_f * b_w3[None, None, :]
    b_c = b_cos[None, None, :]
    b_s = b_sin[None, None, :]
    b_t1 = b_1 * b_c - b_2 * b_s
    b_t2 = b_2 * b_c + b_1 * b_s
    if QUANTISE:
        # Two dimensions from here: a third of one element takes the compiler 32 bytes each.
        o_s = tl.arange(0, TILE_G)[:, None]
        o_1 = tl.arange(0, TILE_D)[None, :]
        m_s = (o_s < groups) & (o_1 < HALF)
        b_t1 = tl.reshape(b_t1, [TILE_G, TILE_D])
        b_t2 = tl.reshape(b_t2, [TILE_G, TILE_D])
        b_top = tl.maximum(tl.max(tl.abs(b_t1), 1), tl.max(tl.abs(b_t2), 1))
        b_total = tl.sum(b_t1, 1) + tl.sum(b_t2, 1)
        if ROT < D:
            o_3 = tl.arange(0, TILE_REST)[None, :]
            b_r = tl.reshape(b_r, [TILE_G, TILE_REST])
            b_top = tl.maximum(b_top, tl.max(tl.abs(b_r), 1))
            b_total += tl.sum(b_r, 1)
        b_scale = _scale(b_top, b_total)[:, None]
        p_scales = p_scale + o_s * scale_group + tl.arange(0, 1)[None, :]
        tl.store(p_scales, b_scale, mask=o_s < groups)
        p_rows = p_dst + o_s * dst_group
        tl.store(p_rows + o_1, _quantise(b_t1, b_scale), mask=m_s)
        tl.store(p_rows + HALF + o_1, _quantise(b_t2, b_scale), mask=m_s)
        if ROT < D:
            m_3 = (o_s < groups) & (o_3 < D - ROT)
            tl.store(p_rows + ROT + o_3, _quantise(b_r, b_scale), mask=m_3)
    else:
        kind = p_dst.dtype.element_ty
        tl.store(p_dst + dst, b_t1.to(kind), mask=m)
        tl.store(p_dst + HALF + dst, b_t2.to(kind), mask=m)
        if ROT < D:
            tl.store(p_dst + ROT + dst_r, b_r.to(kind), mask=m_r)


@triton.jit
def qk_norm_rope_append(
    p_qkv, p_positions, p_rope, p_q_norm, p_k_norm, p_slots, p_q, p_k, p_v, p_ks, p_vs, p_rows,
    q_stride, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ROT: tl.constexpr,
    TILE_G: tl.constexpr, TILE_H: tl.constexpr, TILE_D: tl.constexpr, TILE_REST: tl.constexpr,
    TILE_V: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """q into attention's layout, k and v into their slots; a task is one token, grid = cores.

    p_qkv         [T, (H + 2 G) * D]
    p_positions   [T] int32
    p_rope        [positions, 2, ROT / 2] float32: cos, sin
    p_q_norm ..   [D], used if Q_NORM, K_NORM
    p_slots       [T] int32, block * P + offset
    p_q           [G, q_stride / D, D]; row = token * group + head of the group
    p_k, p_v      [N, G, P, D], int8 if HAS_SCALES
    p_ks, p_vs    [N, G, P] float32: scales, written if HAS_SCALES
    p_rows        [1] int32: T
    q_stride      elements from one KV head of q to the next
    TILE_G        KV heads per pass, TILE_H >= H / G, TILE_D >= ROT / 2, TILE_REST >= D - ROT,
                  TILE_V >= D; all powers of two
    """
    GROUP: tl.constexpr = H // G
    HALF: tl.constexpr = ROT // 2
    o_d = tl.arange(0, TILE_D)
    o_gv = tl.arange(0, TILE_G)[:, None]
    o_dv = tl.arange(0, TILE_V)[None, :]
    for i_t in range(tl.program_id(0), tl.load(p_rows), tl.num_programs(0)):
        turn = tl.load(p_positions + i_t).to(tl.int64) * ROT
        b_cos = tl.load(p_rope + turn + o_d, mask=o_d < HALF, other=0.0)
        b_sin = tl.load(p_rope + turn + HALF + o_d, mask=o_d < HALF, other=0.0)
        slot = tl.load(p_slots + i_t)
        i_block = slot // P
        at = tl.cast(i_block, tl.int64) * (G * P * D) + (slot - i_block * P) * D
        at_scale = tl.cast(i_block, tl.int64) * (G * P) + (slot - i_block * P)
        row = tl.cast(i_t, tl.int64) * ((H + 2 * G) * D)
        for i_g in range(0, G, TILE_G):
            _turn_heads(
                p_qkv + row + i_g * (GROUP * D),
                p_q + tl.cast(i_g, tl.int64) * q_stride + tl.cast(i_t, tl.int64) * (GROUP * D),
                p_ks, p_q_norm, b_cos, b_sin, eps, GROUP, G - i_g, GROUP * D, q_stride, D, 0, D,
                ROT, TILE_G, TILE_H, TILE_D, TILE_REST, Q_NORM, False,
            )  # fmt: skip
            _turn_heads(
                p_qkv + row + (H + i_g) * D, p_k + at + i_g * (P * D), p_ks + at_scale + i_g * P,
                p_k_norm, b_cos, b_sin, eps, 1, G - i_g, D, P * D, D, P, D, ROT, TILE_G, 1, TILE_D,
                TILE_REST, K_NORM, HAS_SCALES,
            )  # fmt: skip
            m_v = (o_gv < G - i_g) & (o_dv < D)
            b_v = tl.load(p_qkv + row + (H + G + i_g) * D + o_gv * D + o_dv, mask=m_v, other=0.0)
            p_values = p_v + at + i_g * (P * D) + o_gv * (P * D) + o_dv
            if HAS_SCALES:
                b_v = b_v.to(tl.float32)
                b_scale = _scale(tl.max(tl.abs(b_v), 1), tl.sum(b_v, 1))[:, None]
                p_scales = p_vs + at_scale + i_g * P + o_gv * P + tl.arange(0, 1)[None, :]
                tl.store(p_scales, b_scale, mask=o_gv < G - i_g)
                tl.store(p_values, _quantise(b_v, b_scale), mask=m_v)
            else:
                tl.store(p_values, b_v.to(p_v.dtype.element_ty), mask=m_v)
