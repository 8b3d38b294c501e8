"""From logits to tokens: penalties, temperature, min_p, top_k, top_p, the draw, and verification.

No sort: what top_k and top_p keep is {x >= cut}, and the cut is found exactly by an eight-way
search over the bit patterns of float32, at most 11 walks over the row. A row is one program's work
from beginning to end. Uniforms are passed in. The meaning is `ops/reference.py`.
"""

import triton
import triton.language as tl

WAYS = tl.constexpr(8)


@triton.jit
def penalise(
    p_logits, p_count, p_prompt, p_repetition, p_frequency, p_presence, p_rows,
    V: tl.constexpr, PITCH: tl.constexpr, TILE_V: tl.constexpr,
):  # fmt: skip
    """Repetition, frequency and presence penalties, in place; grid = cores.

    p_logits         [R, V] float32, PITCH from row to row
    p_count          [R, V] int32, times the token was generated
    p_prompt         [R, V] int8, 1 = the token is in the prompt
    p_repetition ..  [R] float32
    p_rows           [1] int32: R
    """
    PIECES: tl.constexpr = (V + TILE_V - 1) // TILE_V
    o_v = tl.arange(0, TILE_V)
    for i_task in range(tl.program_id(0), tl.load(p_rows) * PIECES, tl.num_programs(0)):
        i_row = i_task // PIECES
        v = (i_task - i_row * PIECES) * TILE_V
        m = o_v < V - v
        at = tl.cast(i_row, tl.int64) * V + v
        p = p_logits + tl.cast(i_row, tl.int64) * PITCH + v
        b_x = tl.load(p + o_v, mask=m, other=0.0)
        b_n = tl.load(p_count + at + o_v, mask=m, other=0).to(tl.float32)
        b_p = tl.load(p_prompt + at + o_v, mask=m, other=0).to(tl.float32)
        repetition = tl.load(p_repetition + i_row)
        b_y = tl.where(b_x > 0.0, b_x / repetition, b_x * repetition)
        b_y = tl.where(b_n + b_p > 0.0, b_y, b_x)
        b_y = b_y - tl.load(p_frequency + i_row) * b_n
        b_y = b_y - tl.load(p_presence + i_row) * tl.where(b_n > 0.0, 1.0, 0.0)
        tl.store(p + o_v, b_y, mask=m)


@triton.jit
def _best(p_row, V: tl.constexpr, TILE_V: tl.constexpr):
    """(largest value, lowest id that has it) of a row; (-inf, 0) if there is none."""
    o_v = tl.arange(0, TILE_V)
    top = -float("inf")
    best = 0
    for v in range(0, V, TILE_V):
        b_x = tl.load(p_row + v + o_v, mask=o_v < V - v, other=-float("inf"))
        here = tl.max(b_x, 0)
        at = v + tl.argmax(b_x, 0)
        best = tl.where(here > top, at, best)
        top = tl.maximum(top, here)
    return top, best


@triton.jit
def _scaled(p_row, v, o_v, top, heat, V: tl.constexpr):
    """A piece of the row after temperature, at most 0; -inf beyond the row."""
    b_x = tl.load(p_row + v + o_v, mask=o_v < V - v, other=-float("inf"))
    return (b_x - top) / heat


@triton.jit
def _mass(p_row, top, heat, cut, V: tl.constexpr, TILE_V: tl.constexpr):
    """Sum of exp(x) over x >= cut."""
    o_v = tl.arange(0, TILE_V)
    total = 0.0
    for v in range(0, V, TILE_V):
        b_x = _scaled(p_row, v, o_v, top, heat, V)
        total += tl.sum(tl.where(b_x >= cut, tl.exp(b_x), 0.0), 0)
    return total


@triton.jit
def _cut(
    p_row, top, heat, floor, goal, V: tl.constexpr, TILE_S: tl.constexpr, BY_MASS: tl.constexpr
):
    """The largest value c such that the x >= c (of those >= floor) weigh at least `goal`.

    They weigh 1 each, or exp(x) with BY_MASS. -inf if all of them together weigh less. x <= 0, so
    -x orders as its bit pattern does: (low, high] always holds the pattern of c.
    """
    o_s = tl.arange(0, TILE_S)
    o_w = tl.arange(0, WAYS) + 1
    low = -1
    high = 0x7F800000  # infinity
    while high - low > 1:
        step = (high - low + WAYS - 1) // WAYS
        b_bits = tl.minimum(low + o_w * step, high)
        b_try = -(b_bits.to(tl.float32, bitcast=True))
        b_weight = tl.zeros([WAYS], tl.float32)
        for v in range(0, V, TILE_S):
            b_x = _scaled(p_row, v, o_s, top, heat, V)
            if BY_MASS:
                b_e = tl.where(b_x >= floor, tl.exp(b_x), 0.0)
            else:
                b_e = tl.where(b_x >= floor, 1.0, 0.0)
            b_in = b_x[None, :] >= b_try[:, None]
            b_weight += tl.sum(tl.where(b_in, b_e[None, :], 0.0), 1)
        short = tl.sum(tl.where(b_weight < goal, 1.0, 0.0), 0).to(tl.int32)
        low = tl.minimum(low + short * step, high - 1)
        high = low + tl.minimum(step, high - low)
        if not BY_MASS:
            # Exactly `goal` elements are in: which of them is the last one no longer matters.
            reached = tl.sum(tl.where(o_w == short + 1, b_weight, 0.0), 0)
            low = tl.where(reached == goal, high - 1, low)
    return -(tl.cast(high, tl.float32, bitcast=True))


@triton.jit
def _find(
    p_row, top, heat, cut, goal, run, start, size, V: tl.constexpr, TILE_V: tl.constexpr
):  # fmt: skip
    """Of the tiles of [start, start + size): the first where the cumulated mass exceeds `goal`, and
    the mass before it. Rounding may leave no such tile: then the last one with any mass.

    run  mass before `start`
    """
    o_v = tl.arange(0, TILE_V)
    found = 0
    place = start
    before = run
    for v in range(start, tl.minimum(start + size, V), TILE_V):
        b_x = _scaled(p_row, v, o_v, top, heat, V)
        here = tl.sum(tl.where(b_x >= cut, tl.exp(b_x), 0.0), 0)
        take = (found == 0) & (here > 0.0)
        place = tl.where(take, v, place)
        before = tl.where(take, run, before)
        run += here
        found = tl.where(run > goal, 1, found)
    return place, before


@triton.jit
def _draw(p_row, top, heat, cut, uniform, V: tl.constexpr, TILE_V: tl.constexpr):
    """The first id whose cumulated mass, in id order over x >= cut, exceeds uniform * all of it.

    Tile, piece, element: sums of sums keep the rounding near that of the uniform itself.
    """
    PIECE: tl.constexpr = 128 if TILE_V > 128 else TILE_V
    o_p = tl.arange(0, PIECE)
    goal = uniform * _mass(p_row, top, heat, cut, V, TILE_V)
    v = tl.full([], 0, tl.int32)  # not 0: Triton 3.2 would take a literal for a constant
    run = tl.full([], 0.0, tl.float32)
    v, run = _find(p_row, top, heat, cut, goal, run, v, V, V, TILE_V)
    v, run = _find(p_row, top, heat, cut, goal, run, v, TILE_V, V, PIECE)
    b_x = _scaled(p_row, v, o_p, top, heat, V)
    b_e = tl.where(b_x >= cut, tl.exp(b_x), 0.0)
    b_ids = o_p.to(tl.float32)
    b_over = tl.where(run + tl.cumsum(b_e, 0) > goal, b_ids, 1.0 * PIECE)
    first = tl.min(tl.where(b_e > 0.0, b_over, 1.0 * PIECE), 0)
    last = tl.max(tl.where(b_e > 0.0, b_ids, 0.0), 0)
    return v + tl.minimum(first.to(tl.int32), last.to(tl.int32))


@triton.jit
def sample(
    p_logits, p_temperature, p_top_k, p_top_p, p_floor, p_uniform, p_ids, p_rows,
    V: tl.constexpr, PITCH: tl.constexpr, TILE_V: tl.constexpr, TILE_S: tl.constexpr,
    GREEDY: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """The token of each row of logits; grid = cores.

    p_logits       [R, V] float32, PITCH from row to row
    p_temperature  [R] float32; 0 = the largest logit, the lowest id among equals
    p_top_k        [R] int32; <= 0 or > V: off
    p_top_p        [R] float32; >= 1: off
    p_floor        [R] float32, log(min_p); -inf: off
    p_uniform      [R] float32 in [0, 1)
    p_ids          [R] int32
    p_rows         [1] int32: R
    GREEDY         every temperature is 0; FILTERED: some row has top_k, top_p or min_p
    """
    for i_row in range(tl.program_id(0), tl.load(p_rows), tl.num_programs(0)):
        p_row = p_logits + tl.cast(i_row, tl.int64) * PITCH
        top, token = _best(p_row, V, TILE_V)
        if not GREEDY:
            temperature = tl.load(p_temperature + i_row)
            if temperature > 0.0:
                top = tl.where(top > -float("inf"), top, 0.0)
                cut = -float("inf")
                if FILTERED:
                    cut = tl.load(p_floor + i_row)
                    top_k = tl.load(p_top_k + i_row)
                    if (top_k > 0) & (top_k < V):
                        goal = top_k.to(tl.float32)
                        found = _cut(p_row, top, temperature, cut, goal, V, TILE_S, False)
                        cut = tl.maximum(cut, found)
                    top_p = tl.load(p_top_p + i_row)
                    if top_p < 1.0:
                        goal = top_p * _mass(p_row, top, temperature, cut, V, TILE_V)
                        found = _cut(p_row, top, temperature, cut, goal, V, TILE_S, True)
                        cut = tl.maximum(cut, found)
                uniform = tl.load(p_uniform + i_row)
                token = _draw(p_row, top, temperature, cut, uniform, V, TILE_V)
        tl.store(p_ids + i_row, token)


@triton.jit
def verify(p_ids, p_parent, p_draft_token, p_accepted, p_rows):
    """accepted = the row is its chunk's first, or its parent is accepted and drew its draft token.

    p_ids, p_parent, p_draft_token, p_accepted  [R] int32; p_rows [1] int32: R; grid = cores
    """
    for i_row in range(tl.program_id(0), tl.load(p_rows), tl.num_programs(0)):
        accepted = 1
        i_at = i_row
        i_up = tl.load(p_parent + i_at)
        while i_up >= 0:
            drew = tl.load(p_ids + i_up) == tl.load(p_draft_token + i_at)
            accepted = tl.where(drew, accepted, 0)
            i_at = i_up
            i_up = tl.load(p_parent + i_at)
        tl.store(p_accepted + i_row, accepted)
