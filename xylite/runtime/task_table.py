"""Decompose and reorder: one iteration's attention becomes small tasks, dealt to cores.

A chunk of n tokens has n * group *packed rows* per KV head (row = token * group + head of the
group: the query heads that share a KV head share a tile). Its rows are cut into query tiles, its
keys into parts if they are many, and each (tile, part, KV head) is a task. Tasks are sorted by
load, descending, and dealt in symmetric round-robin: core 1 2 3 3 2 1 1 2 3 ... (Song et al.
2026, sections 4.2 and 4.3; packing heads, cutting keys across cores and the care for the last,
incomplete round are additions).

An example, the iteration of the paper's figure 7: a prefill of 362 tokens that follow 1318 others,
a decode after 1657, a verify of 53 draft tokens after 2036, a decode after 1986; one query head
per KV head. With tile classes 16 and 128, KV tiles of 128 keys and 4 cores, one KV head gives

    chunk    tile (rows)   class  keys  load = class * keys
    prefill  0..127         128   1446  185,088
             128..255       128   1574  201,472
             256..361 (106) 128   1680  215,040
    decode   0 (1)           16   1658   26,528
    verify   0..52 (53)     128   2089  267,392
    decode   0 (1)           16   1987   31,792

The classes run one after the other, so each is shared out by itself. Class 128 has a load of
868,992 in all, 217,248 per core. The cap is a quarter of that, 54,312: a task may read 3 KV tiles
(384 keys), so the four large tiles become 4, 5, 5 and 6 parts. Class 16 has 58,320 in all; its cap
is below the least length of 2 KV tiles (256 keys), which makes 7 and 8 parts. That is 20 and 15
tasks, and the slowest core has 1.01 times the mean load. (The paper counts 6 tile blocks for this
mix and gives the verify a third class of 64 rows; a class is a compiled kernel here, so there are
two.)

Shared prefixes (an addition; cascade attention elsewhere: Juravsky et al. 2024, Hydragen; Ye et al.
2024, FlashInfer). Neighbours whose blocks are the same ones up to some key, samples of one prompt
or agents with a common system prompt, read these keys in one tile: their packed rows follow one
another already, as many as fit into the smallest class. The prefix lies before the tokens of each,
so all its rows see all its keys, and a kernel needs to know nothing. Each chunk's own tile begins
where the prefix ends, and a merge joins its rows of the prefix's parts with its own parts. With
tile class 12, KV tiles of 64 and 3 query heads per KV head, six decodes after 1030 tokens, 960 of
them in the same blocks, are a tile of 12 rows (four of them) and one of 6 rows for keys 0..511, and
six of 3 rows for keys 512..1030. A prefix ends at a multiple of PREFIX_CUT keys. Only small tiles
are shared, so the load falls by every chunk but one; on the CPU 12 rows keep the arithmetic busy,
and tiles of the large class were slower. Where results must not depend on the batch, nothing is.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from xylite.runtime.step import I32, MERGE_FIELDS, TASK_FIELDS, TaskList, TaskTable, TokenTable

I64 = NDArray[np.int64]

CAP_SHARE = 4  # a task has at most this fraction (1 / CAP_SHARE) of its class's mean core load
MIN_TILES = 2  # but keys are not cut into parts shorter than this many KV tiles
INVARIANT_CUT = 4096  # keys between cuts when results must not depend on the batch
PREFIX_CUT = 512  # keys: shared prefixes end at multiples of it, as the CPU's softmax segments do


def _starts(counts: I64) -> I64:
    """[n + 1] running sums from 0: where each group begins, and the total."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def _spread(counts: I64) -> tuple[I64, I64]:
    """For groups of these sizes: the group of each element, and its place within the group."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - _starts(counts)[owner]


def _tiles(
    table: TokenTable, group: int, window: int, tile_classes: tuple[int, ...], kv_tile: int
) -> dict[str, I64]:
    """Query tiles of all chunks, one KV head; columns named as in TASK_FIELDS."""
    q_start = table.q_start.astype(np.int64)
    kv_len = table.kv_len.astype(np.int64)
    tokens = np.diff(q_start)
    past = kv_len - tokens
    rows = tokens * group
    small, large = tile_classes[0], tile_classes[-1]
    chunk_tile = np.where(rows <= small, small, large)
    seq, place = _spread(-(-rows // chunk_tile))
    tile_q = chunk_tile[seq]
    q_row = place * tile_q
    num_rows = np.minimum(rows[seq] - q_row, tile_q)
    kv_end = past[seq] + (q_row + num_rows - 1) // group + 1
    tree = table.bias_start[seq] >= 0
    kv_start = np.zeros_like(kv_end)
    if window:
        position = past[seq] + q_row // group
        # Siblings of a tree share a position: a draft token's may be that of the first draft.
        first_draft = (kv_len - table.num_draft)[seq]
        position = np.where(tree, np.minimum(position, first_draft), position)
        kv_start = np.maximum(position + 1 - window, 0) // kv_tile * kv_tile
    return {
        "seq": seq,
        "q_row": q_row,
        "num_rows": num_rows,
        "kv_start": kv_start,
        "kv_end": kv_end,
        "tile_q": tile_q,
        "row": q_start[seq] * group + q_row,
        "past": past[seq],
        "tree": tree.astype(np.int64),
    }


def _common_keys(table: TokenTable, rows: I64, most: int, kv_tile: int) -> I64 | None:
    """[S - 1] keys that each chunk and the next have in the same blocks, before the tokens of
    either: multiples of PREFIX_CUT, 0 beside chunks with none or more than `most` of `rows`. None
    if nobody shares any, which one column mostly tells."""
    blocks = table.block_table
    cut = math.lcm(PREFIX_CUT, kv_tile)
    column = cut // kv_tile - 1
    if len(blocks) < 2 or blocks.shape[1] <= column:
        return None
    near = blocks[1:, column] == blocks[:-1, column]
    if not near.any():
        return None
    past = np.where((rows > 0) & (rows <= most), table.kv_len - np.diff(table.q_start), 0)
    common = np.where(near, np.minimum(past[1:], past[:-1]), 0).astype(np.int64)
    width = int(common.max()) // kv_tile
    same = blocks[1:, :width] == blocks[:-1, :width]
    equal = np.logical_and.accumulate(same, axis=1).sum(axis=1) * kv_tile
    common = np.minimum(equal, common) // cut * cut
    return common if common.any() else None


def _groups(common: list[int], rows: list[int], most: int) -> Iterator[tuple[int, int, int]]:
    """Neighbours with a prefix in common and no more than `most` rows in all: the first, the end,
    keys of the prefix. One more joins unless its shorter prefix costs the others more keys than it
    saves."""
    first, keys, total = 0, 0, rows[0]
    for i in range(1, len(rows)):
        joined = min(keys or common[i - 1], common[i - 1])
        if total + rows[i] <= most and joined * (i - first) > keys * (i - first - 1):
            keys, total = joined, total + rows[i]
            continue
        if keys:
            yield first, i, keys
        first, keys, total = i, 0, rows[i]
    if keys:
        yield first, len(rows), keys


def _share(
    table: TokenTable, tiles: dict[str, I64], group: int, most: int, kv_tile: int
) -> tuple[dict[str, I64], I64]:
    """The tiles, without the keys of a prefix where it is shared, and tiles of `most` rows for the
    prefixes behind them; then of each tile which has its prefix, or -1."""
    prefix = np.full(len(tiles["seq"]), -1)
    rows = np.diff(table.q_start).astype(np.int64) * group
    common = _common_keys(table, rows, most, kv_tile)
    groups = [] if common is None else list(_groups(common.tolist(), rows.tolist(), most))
    if not groups:
        return tiles, prefix
    columns = np.array(groups, np.int64)
    first, end, keys = columns[:, 0], columns[:, 1], columns[:, 2]
    owner, place = _spread(end - first)
    # Such a chunk has one tile; chunks before it may have more, or none.
    member = np.searchsorted(tiles["seq"], first[owner] + place)
    prefix[member] = len(prefix) + owner
    tiles["kv_start"][member] = keys[owner]
    more = {name: column[member[place == 0]] for name, column in tiles.items()} | {
        "num_rows": np.bincount(owner, weights=tiles["num_rows"][member]).astype(np.int64),
        "kv_start": np.zeros_like(keys),
        "kv_end": keys,
        "tree": np.zeros_like(keys),
    }
    joined = {name: np.concatenate([column, more[name]]) for name, column in tiles.items()}
    return joined, np.concatenate([prefix, np.full(len(keys), -1)])


def _caps(tiles: dict[str, I64], num_kv_heads: int, num_cores: int) -> NDArray[np.float64]:
    """Of each tile, the largest load of a task of its class."""
    loads = tiles["tile_q"] * (tiles["kv_end"] - tiles["kv_start"])
    sizes, classes = np.unique(tiles["tile_q"], return_inverse=True)
    totals = np.bincount(classes, weights=loads, minlength=len(sizes)) * num_kv_heads
    return (totals / num_cores / CAP_SHARE)[classes]


def _cut_evenly(
    tiles: dict[str, I64], kv_tile: int, cap: NDArray[np.float64]
) -> tuple[I64, I64, I64, I64]:
    """Parts of about equal length such that none's load exceeds `cap` [tiles], nor is any shorter
    than MIN_TILES KV tiles for its sake.

    Returns how many parts each tile has, the tile of each part, and where its keys start and end.
    """
    blocks = -(-(tiles["kv_end"] - tiles["kv_start"]) // kv_tile)
    most = np.maximum(cap // (tiles["tile_q"] * kv_tile), MIN_TILES).astype(np.int64)
    # A tile below the cap stays whole, though its last, part-filled KV tile may round it up.
    whole = tiles["tile_q"] * (tiles["kv_end"] - tiles["kv_start"]) <= cap
    counts = np.where(whole, 1, -(-blocks // most))
    tile, k = _spread(counts)
    share, rest = blocks // counts, blocks % counts
    first = k * share[tile] + np.minimum(k, rest[tile])
    after = first + share[tile] + (k < rest[tile])
    start = tiles["kv_start"][tile] + first * kv_tile
    end = np.minimum(tiles["kv_start"][tile] + after * kv_tile, tiles["kv_end"][tile])
    return counts, tile, start, end


def _invariant_cut(kv_tile: int) -> int:
    return max(INVARIANT_CUT // kv_tile, 1) * kv_tile


def _cut_at_multiples(tiles: dict[str, I64], cut: int) -> tuple[I64, I64, I64, I64]:
    """Parts that end at multiples of `cut` keys, whatever else is in the batch."""
    first = tiles["kv_start"] // cut
    counts = -(-tiles["kv_end"] // cut) - first
    tile, k = _spread(counts)
    edge = (first[tile] + k) * cut
    start = np.maximum(edge, tiles["kv_start"][tile])
    return counts, tile, start, np.minimum(edge + cut, tiles["kv_end"][tile])


def _deal(loads: I64, num_cores: int) -> tuple[I64, I32]:
    """Symmetric round-robin of tasks with falling `loads`: the task of each place in core order,
    and where each core's places start.

    The tasks of the last, incomplete round go to the cores with the least load so far, the longest
    to the least; where cores have equal loads that is the round-robin itself.
    """
    n = len(loads)
    rounds = n // num_cores
    dealt = np.arange(rounds * num_cores).reshape(rounds, num_cores)
    dealt[1::2] = dealt[1::2, ::-1]
    by_core = np.full((num_cores, rounds + 1), -1)
    by_core[:, :rounds] = dealt.T
    sums = loads[dealt].sum(axis=0)
    turn = np.arange(num_cores)[:: -1 if rounds % 2 else 1]
    cores = turn[np.argsort(sums[turn], kind="stable")]
    by_core[cores[: n - rounds * num_cores], rounds] = np.arange(rounds * num_cores, n)
    exists = by_core >= 0
    return by_core[exists], _starts(exists.sum(axis=1)).astype(np.int32)


def _merges(tiles: dict[str, I64], prefix: I64, counts: I64, part: I64, order: I64) -> I32:
    """[merges, len(MERGE_FIELDS)] of the tiles `order`, one per head.

    prefix  [tiles] the tile of each one's shared prefix, or -1
    part    [tiles, heads] first row in the partial results
    """
    num_kv_heads = int(part.shape[1])
    heads = np.arange(num_kv_heads)
    place = np.zeros(len(prefix), np.int64)
    place[order] = np.arange(len(order)) * num_kv_heads
    before = prefix[order, None]
    columns = {
        "head": heads,
        "part": part[order],
        "num_parts": counts[order, None],
        "prefix": np.where(before < 0, -1, place[before] + heads),
    }
    merges = np.empty((len(order), num_kv_heads, len(MERGE_FIELDS)), np.int32)
    for i, name in enumerate(MERGE_FIELDS):
        merges[:, :, i] = columns[name] if name in columns else tiles[name][order, None]
    return merges.reshape(-1, len(MERGE_FIELDS))


def build(
    table: TokenTable,
    *,
    num_kv_heads: int,
    group: int,
    window: int = 0,
    tile_classes: tuple[int, ...],
    kv_tile: int,
    num_cores: int,
    batch_invariant: bool = False,
) -> TaskTable:
    """The attention tasks of one iteration, for one attention kind.

    group            query heads per KV head
    window           keys a query sees, its own included; 0 = all
    tile_classes     one or two sizes of query tiles, in packed rows, ascending. A chunk whose rows
                     fit into the smallest gets it, any other the largest
    kv_tile          keys a kernel reads at once; parts begin at multiples of it
    num_cores        what runs tasks side by side
    batch_invariant  cut keys at multiples of INVARIANT_CUT from position 0 instead of by load, so
                     that a row's result does not depend on its batch. Where the result of a dot
                     product depends on the tile size, give one tile class only
    """
    assert 1 <= len(tile_classes) <= 2 and list(tile_classes) == sorted(tile_classes), tile_classes
    assert min(num_kv_heads, group, kv_tile, num_cores) >= 1
    tiles = _tiles(table, group, window, tile_classes, kv_tile)
    num_own = len(tiles["seq"])
    prefix = np.full(num_own, -1)
    if not batch_invariant and not window:
        tiles, prefix = _share(table, tiles, group, tile_classes[0], kv_tile)
    if batch_invariant:
        counts, tile, kv_start, kv_end = _cut_at_multiples(tiles, _invariant_cut(kv_tile))
    else:
        caps = _caps(tiles, num_kv_heads, num_cores)
        counts, tile, kv_start, kv_end = _cut_evenly(tiles, kv_tile, caps)

    # Rows of the partial results: by tile, then head, then part.
    is_cut = (counts > 1) | (prefix >= 0)
    is_cut[num_own:] = True
    rows_per_head = np.where(is_cut, tiles["num_rows"] * counts, 0)
    starts = _starts(rows_per_head * num_kv_heads)
    heads = np.arange(num_kv_heads)
    part_of_head = starts[:-1, None] + rows_per_head[:, None] * heads
    in_tile = np.arange(len(tile)) - _starts(counts)[tile]

    load = tiles["tile_q"][tile] * (kv_end - kv_start)
    classes: list[TaskList] = []
    for size in tile_classes:
        mine = np.flatnonzero(tiles["tile_q"][tile] == size)
        mine = mine[np.argsort(-load[mine], kind="stable")]
        # A (tile, part) is one task per head: neighbours in the order, as their loads are equal.
        place, core_start = _deal(np.repeat(load[mine], num_kv_heads), num_cores)
        task, head = mine[place // num_kv_heads], place % num_kv_heads
        owner = tile[task]
        part = part_of_head[owner, head] + in_tile[task] * tiles["num_rows"][owner]
        columns = {
            "head": head,
            "kv_start": kv_start[task],
            "kv_end": kv_end[task],
            "part": np.where(is_cut[owner], part, -1),
            "load": load[task],
        }
        tasks = np.empty((len(task), len(TASK_FIELDS)), np.int32)
        for i, name in enumerate(TASK_FIELDS):
            tasks[:, i] = columns[name] if name in columns else tiles[name][owner]
        classes.append(TaskList(size, tasks, core_start))
    merges = _merges(tiles, prefix, counts, part_of_head, np.flatnonzero(is_cut))
    num_shared = (len(prefix) - num_own) * num_kv_heads
    parts = np.array([len(merges) - num_shared, starts[-1], num_shared], np.int32)
    return TaskTable(tuple(classes), merges, parts)


def max_part_rows(
    *,
    tile_classes: tuple[int, ...],
    kv_tile: int,
    num_cores: int,
    num_rows: int,
    batch_invariant: bool = False,
    max_len: int = 0,
) -> int:
    """How many rows the partial results of any iteration can have, for `build`'s settings.

    By load, a tile of load > cap is cut at no less than half the cap, so into at most
    2 * load / cap + 1 parts; the loads of a class sum up to CAP_SHARE * num_cores caps. Where a
    prefix is shared, each row also has a part in the prefix's tile and one of its own.
    num_rows  packed rows of an iteration, all KV heads together
    max_len   with batch_invariant: keys of the longest sequence
    """
    if batch_invariant:
        cut = _invariant_cut(kv_tile)
        return num_rows * -(-max_len // cut) if max_len > cut else 0
    return 3 * CAP_SHARE * num_cores * sum(tile_classes) + 2 * num_rows


def core_loads(table: TaskTable) -> I64:
    """[classes, cores] load of each core."""
    column = TASK_FIELDS.index("load")
    return np.stack(
        [np.diff(_starts(c.tasks[:, column].astype(np.int64))[c.core_start]) for c in table.classes]
    )


def balance(table: TaskTable) -> float:
    """Load of the slowest core over the mean, 1 = perfect; 1 also if there is nothing to do.

    Classes run one after the other, so each has a slowest core; their loads are summed.
    """
    loads = core_loads(table)
    total = int(loads.sum())
    return float(loads.max(axis=1).sum()) * loads.shape[1] / total if total else 1.0
