"""Meta-Attention: one kernel for any mix of prefill, decode and verify, driven by a task table.

Each program walks its core's tasks (see runtime/task_table.py). A task is a tile of TILE_Q query
rows of one KV head against a range of keys; one KV block is one tile. Blocks that every row sees
entirely need no mask. At the ends of the range an additive bias is made from each row's position:
keys after it (causal) and keys before its window fall to about -1e28. It is made before the
scores, from differences and minima alone: with compares and selects the kernel exceeds the
Ascend's vector memory at 128 rows. Softmax is online, in float32. A task whose keys were cut
stores its sums unfinished, and `merge_parts` joins them.

No argument changes between iterations: counts are read from `core_start` and `parts`.

Draft trees: the rows of a tree's chunk have a row of `tree_bias` (float16, aligned to the KV
blocks that hold the chunk's own tokens) that is added in place of the causal bound. All others
share row 0, which is zero, so that one loop serves both.

q and o are [G, T * group, D]: a tile's rows are contiguous. Tiles of [T, H, D] were compiled for
AscendNPU-IR 1.1.0 and 1.2.0 against it: they leave one of the two vector cores idle and need twice
the memory, so 128 rows do not fit. One kernel with a loop per tile class was tried too: 16 + 128
rows fit with 1.1.0 only, and with 1.2.0 even 16 + 64 leave a vector core idle. So each class is a
launch.

Storing o as the next GEMM wants it, [T, H * D], was compiled too, with 1.1.0 and 1.2.0: rows of a
tile then lie D and H * D apart in turns. As a tile of [tokens, group * D], as one of [tokens,
group, D] or with the address of each row, a group above 1 leaves one vector core idle and needs
twice the memory (16 rows: 138 instead of 69 K of 192 K; 128 rows: 390 K, which do not fit). With
group 1, where rows are evenly spaced, it costs nothing (182 instead of 181 K), but saves one copy
of [T, H * D] per layer, below a hundredth of the layer's GEMMs. So o is transposed outside.

Head sizes that are no power of two are two tiles side by side, 80 = 64 + 16: nothing is padded.

Source: Song et al. 2026 (XY-Serve), section 5; online softmax: Milakov and Gimelshein 2018.
"""

import triton
import triton.language as tl

SEEN = tl.constexpr(1 << 24)  # subtracted from keys that a tree's rows see whatever their position
TREE_HIDDEN = tl.constexpr(-60000.0)  # of float16; exp(score - 60000) is 0 in float32


@triton.jit
def _load_kv(p_kv, o_n, o_d, D: tl.constexpr, dtype):
    """A tile of one KV block, [TILE_KV, columns], as the type of q (int8 values are exact)."""
    return tl.load(p_kv + o_n[:, None] * D + o_d[None, :]).to(dtype)


@triton.jit
def _bias(i_block, b_position, b_first, free, TILE_KV: tl.constexpr, WINDOW: tl.constexpr):
    """[TILE_Q, TILE_KV] 0 where the row sees the key, else -1e28 or less. float32 holds every
    difference between neighbours: positions are below 2^24."""
    o_n = tl.arange(0, TILE_KV)
    b_key = (o_n + i_block * TILE_KV - free).to(tl.float32)
    b_room = b_position[:, None] - b_key[None, :]
    if WINDOW > 0:
        b_own = (o_n + i_block * TILE_KV).to(tl.float32)
        b_room = tl.minimum(b_room, b_own[None, :] - b_first[:, None])
    return tl.minimum(b_room, 0.0) * 1.0e28


@triton.jit
def _block(
    b_q0, b_q1, p_k, p_v, p_ks, p_vs, b_bias, b_max, b_sum, b_acc0, b_acc1,
    SCALE: tl.constexpr, CAP: tl.constexpr, TILE_KV: tl.constexpr, D: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """One KV block joins the running maximum, sum and weighted values."""
    o_n = tl.arange(0, TILE_KV)
    o_0 = tl.arange(0, D0)
    b_s = tl.dot(b_q0, tl.trans(_load_kv(p_k, o_n, o_0, D, b_q0.dtype)), input_precision="ieee")
    if D1 > 0:
        o_1 = D0 + tl.arange(0, D1)
        b_k = tl.trans(_load_kv(p_k, o_n, o_1, D, b_q0.dtype))
        b_s = tl.dot(b_q1, b_k, b_s, input_precision="ieee")
    if HAS_SCALES:
        b_s = b_s * tl.load(p_ks + o_n).to(tl.float32)[None, :]
    if CAP > 0:
        # CAP * tanh(s / CAP): where exp overflows the quotient is 0, and NaN stays NaN.
        b_s = CAP - (2.0 * CAP) / (1.0 + tl.exp(b_s * (2.0 * SCALE / CAP)))
    else:
        b_s = b_s * SCALE
    if HAS_BIAS:
        b_s += b_bias
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    b_p = tl.exp(b_s - b_new[:, None])
    b_keep = tl.exp(b_max - b_new)
    b_sum = b_sum * b_keep + tl.sum(b_p, 1)
    if HAS_SCALES:
        b_p = b_p * tl.load(p_vs + o_n).to(tl.float32)[None, :]
    b_p = b_p.to(b_q0.dtype)
    b_v = _load_kv(p_v, o_n, o_0, D, b_q0.dtype)
    b_acc0 = b_acc0 * b_keep[:, None] + tl.dot(b_p, b_v, input_precision="ieee")
    if D1 > 0:
        o_1 = D0 + tl.arange(0, D1)
        b_v = _load_kv(p_v, o_n, o_1, D, b_q0.dtype)
        b_acc1 = b_acc1 * b_keep[:, None] + tl.dot(b_p, b_v, input_precision="ieee")
    return b_new, b_sum, b_acc0, b_acc1


@triton.jit
def _task(
    p_task, p_q, p_k, p_v, p_ks, p_vs, p_o, p_acc, p_max, p_sum, p_block_table, p_position, p_tree,
    q_rows, table_width, tree_width,
    SCALE: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, G: tl.constexpr,
    GROUP: tl.constexpr, TILE_Q: tl.constexpr, TILE_KV: tl.constexpr, D: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, HAS_TREE: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    i_seq = tl.load(p_task)
    q_row = tl.load(p_task + 1)
    num_rows = tl.load(p_task + 2)
    i_head = tl.load(p_task + 3)
    kv_start = tl.load(p_task + 4)
    kv_end = tl.load(p_task + 5)
    part = tl.load(p_task + 6)
    row = tl.load(p_task + 8)
    past = tl.load(p_task + 9)

    o_r = tl.arange(0, TILE_Q)
    o_n = tl.arange(0, TILE_KV)
    o_0 = tl.arange(0, D0)
    m_q = o_r < num_rows
    q = (i_head * q_rows + row).to(tl.int64) * D
    b_q0 = tl.load(p_q + q + o_r[:, None] * D + o_0[None, :], mask=m_q[:, None], other=0.0)
    b_q1 = b_q0
    b_max = tl.full([TILE_Q], -1.0e30, tl.float32)
    b_sum = tl.zeros([TILE_Q], tl.float32)
    b_acc0 = tl.zeros([TILE_Q, D0], tl.float32)
    b_acc1 = b_acc0
    if D1 > 0:
        o_1 = D0 + tl.arange(0, D1)
        b_q1 = tl.load(p_q + q + o_r[:, None] * D + o_1[None, :], mask=m_q[:, None], other=0.0)
        b_acc1 = tl.zeros([TILE_Q, D1], tl.float32)
    # Loaded, not computed from o_r: the compiler then gives half the rows to each vector core.
    b_position = tl.load(p_position + row + o_r, mask=m_q, other=0.0)
    b_first = b_position - (WINDOW - 1)

    # Blocks [first, open) may begin before a row's window, [open, close) are seen by all rows,
    # [close, last) are not.
    first = kv_start // TILE_KV
    last = (kv_end + TILE_KV - 1) // TILE_KV
    seen = past + q_row // GROUP + 1
    free = 0
    if HAS_TREE:
        tree = tl.load(p_task + 10)
        seen = seen - tree * (q_row // GROUP + 1)
        free = tree * SEEN
        tree_row = tree * (row + 1)
        tree_pitch = tree * tree_width
        tree_first = past // TILE_KV
    close = tl.minimum(tl.maximum(seen // TILE_KV, first), last)
    begin = first
    p_blocks = p_block_table + i_seq * table_width
    if WINDOW > 0:
        start = past + (q_row + num_rows - 1) // GROUP + 1 - WINDOW
        begin = tl.minimum(tl.maximum((start + TILE_KV - 1) // TILE_KV, first), close)
        for i_block in range(first, begin):
            tile = tl.load(p_blocks + i_block).to(tl.int64) * G + i_head
            b_bias = _bias(i_block, b_position, b_first, SEEN, TILE_KV, WINDOW)
            b_max, b_sum, b_acc0, b_acc1 = _block(
                b_q0, b_q1, p_k + tile * (TILE_KV * D), p_v + tile * (TILE_KV * D),
                p_ks + tile * TILE_KV, p_vs + tile * TILE_KV, b_bias, b_max, b_sum, b_acc0, b_acc1,
                SCALE, CAP, TILE_KV, D, D0, D1, True, HAS_SCALES,
            )  # fmt: skip
    for i_block in range(begin, close):
        tile = tl.load(p_blocks + i_block).to(tl.int64) * G + i_head
        b_max, b_sum, b_acc0, b_acc1 = _block(
            b_q0, b_q1, p_k + tile * (TILE_KV * D), p_v + tile * (TILE_KV * D),
            p_ks + tile * TILE_KV, p_vs + tile * TILE_KV, 0.0, b_max, b_sum, b_acc0, b_acc1,
            SCALE, CAP, TILE_KV, D, D0, D1, False, HAS_SCALES,
        )  # fmt: skip
    for i_block in range(close, last):
        tile = tl.load(p_blocks + i_block).to(tl.int64) * G + i_head
        b_bias = _bias(i_block, b_position, b_first, free, TILE_KV, WINDOW)
        if HAS_TREE:
            # int64: rows of all chunks times the width of a tree's keys.
            o_tree = tree_row.to(tl.int64) * tree_width + tree * (i_block - tree_first) * TILE_KV
            p_rows = p_tree + o_tree + o_r[:, None] * tree_pitch + o_n[None, :]
            b_bias += tl.load(p_rows, mask=m_q[:, None], other=0.0).to(tl.float32)
        b_max, b_sum, b_acc0, b_acc1 = _block(
            b_q0, b_q1, p_k + tile * (TILE_KV * D), p_v + tile * (TILE_KV * D),
            p_ks + tile * TILE_KV, p_vs + tile * TILE_KV, b_bias, b_max, b_sum, b_acc0, b_acc1,
            SCALE, CAP, TILE_KV, D, D0, D1, True, HAS_SCALES,
        )  # fmt: skip

    # Either the result or a part is stored, by row counts: a branch here costs vector memory.
    whole_rows = tl.where(part < 0, num_rows, 0)
    m_o = o_r < whole_rows
    m_part = o_r < num_rows - whole_rows
    # A part may hold no key that a row sees; its sum is 0 then, and merging gives it no weight.
    b_factor = 1.0 / tl.maximum(b_sum, 1.0e-30)
    b_o = (b_acc0 * b_factor[:, None]).to(p_o.dtype.element_ty)
    tl.store(p_o + q + o_r[:, None] * D + o_0[None, :], b_o, mask=m_o[:, None])
    o_part = part.to(tl.int64) * D
    tl.store(p_acc + o_part + o_r[:, None] * D + o_0[None, :], b_acc0, mask=m_part[:, None])
    if D1 > 0:
        o_1 = D0 + tl.arange(0, D1)
        b_o = (b_acc1 * b_factor[:, None]).to(p_o.dtype.element_ty)
        tl.store(p_o + q + o_r[:, None] * D + o_1[None, :], b_o, mask=m_o[:, None])
        tl.store(p_acc + o_part + o_r[:, None] * D + o_1[None, :], b_acc1, mask=m_part[:, None])
    tl.store(p_max + part + o_r, b_max, mask=m_part)
    tl.store(p_sum + part + o_r, b_sum, mask=m_part)


@triton.jit
def meta_attention_tasks(
    p_q, p_k, p_v, p_ks, p_vs, p_o, p_acc, p_max, p_sum, p_tasks, p_core_start, p_block_table,
    p_position, p_tree, q_rows, table_width, tree_width,
    SCALE: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, G: tl.constexpr,
    GROUP: tl.constexpr, TILE_Q: tl.constexpr, TILE_KV: tl.constexpr, D: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, FIELDS: tl.constexpr, HAS_TREE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """The tasks of one tile class; grid = cores.

    p_q, p_o       [G, q_rows, D]
    p_k, p_v       [N, G, TILE_KV, D], of q's type or int8
    p_ks, p_vs     [N, G, TILE_KV] scales of int8 keys and values; read if HAS_SCALES
    p_acc, p_max, p_sum  [part rows, D], [part rows], [part rows] float32: unfinished results
    p_tasks        [W, FIELDS], p_core_start [cores + 1], p_block_table [S, table_width]
    p_position     [q_rows] float32: position of each packed row's token (of drafts: by depth)
    p_tree         [1 + q_rows, tree_width] float16, see `tree_bias_rows`; read if HAS_TREE
    """
    i_core = tl.program_id(0)
    for i_task in range(tl.load(p_core_start + i_core), tl.load(p_core_start + i_core + 1)):
        _task(
            p_tasks + i_task * FIELDS, p_q, p_k, p_v, p_ks, p_vs, p_o, p_acc, p_max, p_sum,
            p_block_table, p_position, p_tree, q_rows, table_width, tree_width,
            SCALE, CAP, WINDOW, G, GROUP, TILE_Q, TILE_KV, D, D0, D1, HAS_TREE, HAS_SCALES,
        )  # fmt: skip


@triton.jit
def merge_parts(
    p_o, p_acc, p_max, p_sum, p_merges, p_parts, q_rows,
    D: tl.constexpr, TILE_D: tl.constexpr, TILE_R: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """The results of the tiles that were cut, from their parts; grid = vector cores.

    p_merges  [M + P, FIELDS], p_parts [3]: M is its first element; the rest as above
    """
    o_r = tl.arange(0, TILE_R)
    o_d = tl.arange(0, TILE_D)
    for i_merge in range(tl.program_id(0), tl.load(p_parts), tl.num_programs(0)):
        p_merge = p_merges + i_merge * FIELDS
        num_rows = tl.load(p_merge + 2)
        i_head = tl.load(p_merge + 3)
        part = tl.load(p_merge + 6)
        num_parts = tl.load(p_merge + 7)
        row = tl.load(p_merge + 8)
        # A shared prefix has the first parts: some rows of its tile.
        prefix = tl.load(p_merge + 9)
        p_prefix = p_merges + tl.maximum(prefix, 0) * FIELDS
        prefix_rows = tl.load(p_prefix + 2)
        prefix_part = tl.load(p_prefix + 6) + row - tl.load(p_prefix + 8)
        num_shared = tl.where(prefix < 0, 0, tl.load(p_prefix + 7))
        for r in range(0, num_rows, TILE_R):
            m_r = o_r < num_rows - r
            m = m_r[:, None] & (o_d < D)[None, :]
            b_max = tl.full([TILE_R], -1.0e30, tl.float32)
            b_sum = tl.zeros([TILE_R], tl.float32)
            b_acc = tl.zeros([TILE_R, TILE_D], tl.float32)
            for i_part in range(num_shared + num_parts):
                own = part + (i_part - num_shared) * num_rows
                at = tl.where(i_part < num_shared, prefix_part + i_part * prefix_rows, own) + r
                b_part_max = tl.load(p_max + at + o_r, mask=m_r, other=0.0)
                b_part_sum = tl.load(p_sum + at + o_r, mask=m_r, other=1.0)
                p_rows = p_acc + at.to(tl.int64) * D + o_r[:, None] * D + o_d[None, :]
                b_part = tl.load(p_rows, mask=m, other=0.0)
                b_new = tl.maximum(b_max, b_part_max)
                b_keep = tl.exp(b_max - b_new)
                b_take = tl.exp(b_part_max - b_new)
                b_sum = b_sum * b_keep + b_part_sum * b_take
                b_acc = b_acc * b_keep[:, None] + b_part * b_take[:, None]
                b_max = b_new
            o = (i_head * q_rows + row + r).to(tl.int64) * D
            b_o = (b_acc * (1.0 / b_sum)[:, None]).to(p_o.dtype.element_ty)
            tl.store(p_o + o + o_r[:, None] * D + o_d[None, :], b_o, mask=m)


@triton.jit
def tree_bias_rows(
    p_tree, p_mask, p_tasks, p_core_start, p_kv_len, p_num_draft, p_bias_start, tree_width,
    GROUP: tl.constexpr, TILE_KV: tl.constexpr, TILE_G: tl.constexpr, TILE_W: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """Rows of `p_tree` for the chunks that have a tree; grid = cores, once per tile class.

    p_tree  [1 + packed rows, tree_width] float16. Row 0 is zero and stays so. Row 1 + r belongs to
            packed row r: 0 for keys it sees, else TREE_HIDDEN; column 0 is the first key of the
            KV block that holds the chunk's first token
    p_mask  [...] int8, num_draft x num_draft per tree
    A chunk's rows are written by the tasks of KV head 0 (the parts of a cut tile write the same).
    """
    i_core = tl.program_id(0)
    o_g = tl.arange(0, TILE_G)
    o_w = tl.arange(0, TILE_W)
    b_seen = tl.zeros([TILE_G, TILE_W], tl.float32).to(tl.float16)
    b_hidden = tl.full([TILE_G, TILE_W], TREE_HIDDEN, tl.float32).to(tl.float16)
    for i_task in range(tl.load(p_core_start + i_core), tl.load(p_core_start + i_core + 1)):
        p_task = p_tasks + i_task * FIELDS
        if (tl.load(p_task + 10) > 0) & (tl.load(p_task + 3) == 0):
            i_seq = tl.load(p_task)
            q_row = tl.load(p_task + 1)
            q_end = q_row + tl.load(p_task + 2)
            row = tl.load(p_task + 8)
            past = tl.load(p_task + 9)
            num_draft = tl.load(p_num_draft + i_seq)
            mask_start = tl.load(p_bias_start + i_seq)
            base = past // TILE_KV * TILE_KV
            first_draft = tl.load(p_kv_len + i_seq) - num_draft
            for i_token in range(q_row // GROUP, (q_end + GROUP - 1) // GROUP):
                # A token's rows may lie in two tiles: these are the ones in this tile.
                low = tl.maximum(i_token * GROUP, q_row)
                m_g = (o_g < tl.minimum((i_token + 1) * GROUP, q_end) - low)[:, None]
                token = past + i_token
                i_draft = tl.maximum(token - first_draft, 0)
                # Columns [0, end) are seen, [end, after) are as the mask says, the rest hidden.
                num = tl.where(token >= first_draft, num_draft, 0)
                end = tl.where(token >= first_draft, first_draft, token + 1) - base
                after = end + num
                p_row = p_tree + (row + low - q_row + 1).to(tl.int64) * tree_width
                p_rows = p_row + o_g[:, None] * tree_width + o_w[None, :]
                tl.store(p_rows, b_seen, mask=m_g & (o_w < end)[None, :])
                p_own = p_mask + mask_start + i_draft * num_draft + o_w
                b_mask = tl.load(p_own, mask=o_w < num, other=0).to(tl.float32)
                b_own = ((1.0 - b_mask) * TREE_HIDDEN).to(tl.float16)
                b_own = tl.broadcast_to(b_own[None, :], [TILE_G, TILE_W])
                tl.store(p_rows + end, b_own, mask=m_g & (o_w < num)[None, :])
                tl.store(p_rows + after, b_hidden, mask=m_g & (o_w < tree_width - after)[None, :])
