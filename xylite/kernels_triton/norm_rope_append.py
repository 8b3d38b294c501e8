"""What stands between the GEMMs of a layer: residual + RMSNorm, and q/k norm + rope + KV append.

Both are one pass over rows that fit on chip; longer rows are walked twice, in pieces, reading the
inputs again rather than what was just written.
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
def _turn_heads(
    p_src, p_dst, p_norm, b_cos, b_sin, eps, heads, groups, SRC_GROUP: tl.constexpr,
    dst_group, dst_head, D: tl.constexpr, ROT: tl.constexpr, TILE_G: tl.constexpr,
    TILE_H: tl.constexpr, TILE_D: tl.constexpr, TILE_REST: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of [groups, heads] heads of one token.

    The rotated part of a head is two halves of TILE_D columns, ROT / 2 of which exist; the rest of
    the head passes through in TILE_REST columns. p_src has strides (SRC_GROUP, D, 1), p_dst
    (dst_group, dst_head, 1). b_cos, b_sin [TILE_D].
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
    kind = p_dst.dtype.element_ty
    tl.store(p_dst + dst, (b_1 * b_c - b_2 * b_s).to(kind), mask=m)
    tl.store(p_dst + HALF + dst, (b_2 * b_c + b_1 * b_s).to(kind), mask=m)
    if ROT < D:
        tl.store(p_dst + ROT + dst_r, b_r.to(kind), mask=m_r)


@triton.jit
def qk_norm_rope_append(
    p_qkv, p_positions, p_rope, p_q_norm, p_k_norm, p_slots, p_q, p_k, p_v, p_rows, q_stride, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ROT: tl.constexpr,
    TILE_G: tl.constexpr, TILE_H: tl.constexpr, TILE_D: tl.constexpr, TILE_REST: tl.constexpr,
    TILE_V: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    """q into attention's layout, k and v into their slots; a task is one token, grid = cores.

    p_qkv         [T, (H + 2 G) * D]
    p_positions   [T] int32
    p_rope        [positions, 2, ROT / 2] float32: cos, sin
    p_q_norm ..   [D], used if Q_NORM, K_NORM
    p_slots       [T] int32, block * P + offset
    p_q           [G, q_stride / D, D]; row = token * group + head of the group
    p_k, p_v      [N, G, P, D]
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
        row = tl.cast(i_t, tl.int64) * ((H + 2 * G) * D)
        for i_g in range(0, G, TILE_G):
            _turn_heads(
                p_qkv + row + i_g * (GROUP * D),
                p_q + tl.cast(i_g, tl.int64) * q_stride + tl.cast(i_t, tl.int64) * (GROUP * D),
                p_q_norm, b_cos, b_sin, eps, GROUP, G - i_g, GROUP * D, q_stride, D, D, ROT,
                TILE_G, TILE_H, TILE_D, TILE_REST, Q_NORM,
            )  # fmt: skip
            _turn_heads(
                p_qkv + row + (H + i_g) * D, p_k + at + i_g * (P * D), p_k_norm, b_cos, b_sin, eps,
                1, G - i_g, D, P * D, D, D, ROT, TILE_G, 1, TILE_D, TILE_REST, K_NORM,
            )  # fmt: skip
            m_v = (o_gv < G - i_g) & (o_dv < D)
            b_v = tl.load(p_qkv + row + (H + G + i_g) * D + o_gv * D + o_dv, mask=m_v, other=0.0)
            tl.store(
                p_v + at + i_g * (P * D) + o_gv * (P * D) + o_dv,
                b_v.to(p_v.dtype.element_ty), mask=m_v,
            )  # fmt: skip
