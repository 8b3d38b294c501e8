"""Moving, copying and clearing KV: slots, blocks, both through a buffer.

"All sources are read before any destination is written" holds because a move is two launches:
gather into a buffer, scatter from it. A piece is a run of elements that lie together in the pool.
"""

import triton
import triton.language as tl


@triton.jit
def move_pieces(
    p_from_k, p_from_v, p_to_k, p_to_v, p_index, p_num,
    ROWS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, STEP: tl.constexpr,
    TILE_C: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Copy n items of PIECES pieces each, k and v alike, between pool and buffer; grid = cores.

    GATHER     from the pool into the buffer, else from the buffer into the pool
    p_index    [n] int32: where item i starts in the pool, in units of PIECE elements, as
               (index // ROWS) * ROWS * PIECES + index % ROWS
    p_num      [1] int32: n
    ROWS       items that lie side by side: P for slots, 1 for blocks
    PIECE      elements of a piece: D for slots, G * P * D for blocks
    PIECES     pieces of an item: G for slots, 1 for blocks
    STEP       elements from one piece of an item to the next: P * D for slots
    """
    TILES: tl.constexpr = (PIECE + TILE_C - 1) // TILE_C
    o_c = tl.arange(0, TILE_C)
    num = tl.load(p_num)
    for i_task in range(tl.program_id(0), num * PIECES * TILES, tl.num_programs(0)):
        i_piece = i_task // TILES
        c = (i_task - i_piece * TILES) * TILE_C
        i = i_piece // PIECES
        i_in = i_piece - i * PIECES
        at = tl.load(p_index + i)
        i_block = at // ROWS
        pool = tl.cast(i_block, tl.int64) * (ROWS * PIECES * PIECE)
        pool += (at - i_block * ROWS) * PIECE + i_in * STEP + c
        buffer = tl.cast(i_piece, tl.int64) * PIECE + c
        m = o_c < PIECE - c
        source = pool if GATHER else buffer
        target = buffer if GATHER else pool
        b_k = tl.load(p_from_k + source + o_c, mask=m, other=0.0)
        b_v = tl.load(p_from_v + source + o_c, mask=m, other=0.0)
        tl.store(p_to_k + target + o_c, b_k, mask=m)
        tl.store(p_to_v + target + o_c, b_v, mask=m)


@triton.jit
def zero_blocks(p_k, p_v, p_blocks, p_num, SIZE: tl.constexpr, TILE_C: tl.constexpr):
    """k and v of these blocks become 0; grid = cores.

    p_blocks [n] int32, p_num [1] int32: n, SIZE elements of a block: G * P * D
    """
    TILES: tl.constexpr = (SIZE + TILE_C - 1) // TILE_C
    o_c = tl.arange(0, TILE_C)
    b_zero = tl.zeros([TILE_C], p_k.dtype.element_ty)
    for i_task in range(tl.program_id(0), tl.load(p_num) * TILES, tl.num_programs(0)):
        i = i_task // TILES
        c = (i_task - i * TILES) * TILE_C
        at = tl.load(p_blocks + i).to(tl.int64) * SIZE + c
        m = o_c < SIZE - c
        tl.store(p_k + at + o_c, b_zero, mask=m)
        tl.store(p_v + at + o_c, b_zero, mask=m)
