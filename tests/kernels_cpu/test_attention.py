"""Attention over blocked KV against the reference in float64.

KV is written by each table's own append, because a table may order a tile as it likes.
"""

import pytest
import torch
from torch import Tensor

from tests.kernels_cpu.tables import Chunk, batch_of, poisoned_kv, tasks_of, token_table
from xylite.ops import AttentionKind, Batch, DenseKV, Ops, reference
from xylite.runtime import task_table
from xylite.runtime.step import TokenTable

NO_TURN = torch.stack((torch.ones(4096, 0), torch.zeros(4096, 0)), 1)

# Against float64: float32 chains over D and over the keys, of scores up to 30; with bf16 KV the
# queries and the
# weights of the softmax are rounded to bf16 too (2^-9 each, averaged over many keys).
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1.5e-2}


def tree_of(parents: list[int]) -> Tensor:
    mask = torch.eye(len(parents), dtype=torch.bool)
    for i, p in enumerate(parents):
        if p >= 0:
            mask[i] |= mask[p]
    return mask


TREE = tree_of([-1, -1, 0, 0, 1, 2, 5])
MIX = [
    Chunk(0, 1),
    Chunk(1500, 1),
    Chunk(700, 9, TREE, 7),
    Chunk(0, 150),
    Chunk(64, 64),
    Chunk(130, 1),
    Chunk(511, 2, None, 1),
    Chunk(1023, 70),
]


def filled(
    ops: Ops, table: TokenTable, values: tuple[Tensor, ...], dtype: torch.dtype, size: int
) -> tuple[Tensor, DenseKV]:
    """(q, kv) of the table's chunks: history first, then this iteration's tokens, by append.

    values  (q [T, H, D], k, v per chunk [kv_len, G, D] one after the other)
    """
    q, k, v = values
    num_kv, dim = k.shape[1:]
    kv = poisoned_kv(table, num_kv, size, dim, dtype)
    starts, at = table.q_start.tolist(), 0
    q_out = None
    slots, positions, rows, new = [], [], [], []
    for i, length in enumerate(table.kv_len.tolist()):
        place = torch.arange(length)
        block = torch.from_numpy(table.block_table[i])[place // size]
        slots.append(block * size + place % size)
        positions.append(place)
        rows.append(torch.arange(at, at + length))
        new.append(torch.arange(at + length - (starts[i + 1] - starts[i]), at + length))
        at += length
    slot, new_rows = torch.cat(slots), torch.cat(new)
    old = torch.ones(at, dtype=torch.bool)
    old[new_rows] = False
    for pick, query in ((torch.where(old)[0], None), (new_rows, q)):
        query = q.new_zeros(len(pick), q.shape[1], dim) if query is None else query
        qkv = torch.cat((query.flatten(1), k[pick].flatten(1), v[pick].flatten(1)), 1)
        q_out, kv = ops.qk_norm_rope_append(
            qkv, torch.cat(positions)[pick].int(), NO_TURN, kv, slot[pick].int()
        )
    assert q_out is not None
    return q_out, kv


def values_of(table: TokenTable, heads: tuple[int, int], dim: int, dtype: torch.dtype):
    num_kv, group = heads
    generator = torch.Generator().manual_seed(3)
    total, length = int(table.q_start[-1]), int(table.kv_len.sum())

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).float()

    return (
        some(total, num_kv * group, dim) * 2,
        some(length, num_kv, dim),
        some(length, num_kv, dim),
    )


def batch(ops: Ops, table: TokenTable, heads: tuple[int, int], window: int, size: int, cores: int):
    return batch_of(table, tasks_of(ops, table, heads, window, size, cores))


def expected(
    table: TokenTable, made: Batch, values: tuple[Tensor, ...], size: int, kind: AttentionKind
) -> Tensor:
    wide = tuple(x.double() for x in values)
    q, kv = filled(reference.TABLE, table, wide, torch.float64, size)
    return reference.attention(q, kv, made, kind)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("heads", "dim", "size", "window", "cap"),
    [
        ((3, 3), 64, 64, 0, 0.0),
        ((1, 1), 32, 32, 0, 0.0),
        ((2, 4), 96, 96, 0, 30.0),
        ((1, 16), 64, 64, 100, 0.0),
        ((2, 1), 128, 128, 3, 20.0),
    ],
)
def test_any_mix_of_stages_agrees_with_the_reference(
    ops: Ops,
    heads: tuple[int, int],
    dim: int,
    size: int,
    window: int,
    cap: float,
    dtype: torch.dtype,
) -> None:
    table = token_table(MIX, size)
    values = values_of(table, heads, dim, dtype)
    kind = AttentionKind(0, dim**-0.5, window, cap)
    q, kv = filled(ops, table, values, dtype, size)
    for cores in (1, 2, 7):
        made = batch(ops, table, heads, window, size, cores)
        got = ops.attention(q, kv, made, kind)
        want = expected(table, made, values, size, kind)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("heads", "size", "window"), [((2, 3), 64, 0), ((2, 3), 64, 300), ((1, 7), 96, 0)]
)
def test_a_result_depends_neither_on_the_batch_nor_on_cuts(
    ops: Ops, heads: tuple[int, int], size: int, window: int, dtype: torch.dtype
) -> None:
    """Bit for bit, at every dtype."""
    dim = 64
    table = token_table(MIX, size)
    values = values_of(table, heads, dim, dtype)
    kind = AttentionKind(0, 0.125, window)
    q, kv = filled(ops, table, values, dtype, size)
    runs = [
        ops.attention(q, kv, batch(ops, table, heads, window, size, n), kind) for n in (1, 2, 5, 40)
    ]
    assert all(torch.equal(runs[0], r) for r in runs[1:])
    # The last chunk token by token, each alone in its iteration.
    past, tokens = MIX[-1].past, MIX[-1].tokens
    first = int(table.q_start[-2])
    row = table.block_table[-1:]
    for i in (0, 1, 31, tokens - 1):
        alone = token_table([Chunk(past + i, 1)], size)
        object.__setattr__(alone, "block_table", row)
        mine = q.unflatten(1, (-1, heads[1]))[:, first + i].reshape(heads[0], heads[1], dim)
        one = ops.attention(mine, kv, batch(ops, alone, heads, window, size, 2), kind)
        assert torch.equal(one[0], runs[0][first + i])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("heads", "size", "blocks"), [((2, 3), 64, 17), ((1, 5), 96, 33)])
def test_a_result_is_the_same_bits_whether_a_prefix_is_shared_or_not(
    ops: Ops,
    heads: tuple[int, int],
    size: int,
    blocks: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    past, dim = blocks * size, 64
    chunks = [
        Chunk(past + 30, 1), Chunk(past + 200, 3, tree_of([-1, -1]), 2), Chunk(0, 40),
        Chunk(past, 2, None, 1), Chunk(past - 1, 1), Chunk(past + size, 1),
    ]  # fmt: skip
    table = token_table(chunks, size)
    q, k, v = values_of(table, heads, dim, dtype)
    at = table.kv_len.cumsum().tolist()
    for of, to in ((0, 1), (3, 4), (4, 5)):
        n = (blocks - 1) * size
        table.block_table[to, : blocks - 1] = table.block_table[of, : blocks - 1]
        for x in (k, v):
            start, first = (at[i] - int(table.kv_len[i]) for i in (to, of))
            x[start : start + n] = x[first : first + n]
    values, kind = (q, k, v), AttentionKind(0, 0.125)
    q, kv = filled(ops, table, values, dtype, size)
    made = [batch(ops, table, heads, 0, size, n) for n in (1, 2, 40)]
    monkeypatch.setattr(task_table, "PREFIX_CUT", 1 << 20)
    alone = batch(ops, table, heads, 0, size, 2)
    fitting = 2 if heads[1] == 3 else 1  # groups of chunks whose rows fit into one tile
    assert all(int(m.tasks[0].parts[2]) == fitting * heads[0] for m in made)
    assert int(alone.tasks[0].parts[2]) == 0
    got = [ops.attention(q, kv, m, kind) for m in (alone, *made)]
    assert all(torch.equal(got[0], r) for r in got[1:])
    want = expected(table, alone, values, size, kind)
    torch.testing.assert_close(got[0].double(), want, rtol=0, atol=TOLERANCE[dtype])


def test_nothing_to_attend_gives_nothing(ops: Ops) -> None:
    table = token_table([], 64)
    kv = DenseKV(*(torch.zeros(1, 2, 64, 64) for _ in "kv"))
    q, kv = ops.qk_norm_rope_append(
        torch.zeros(0, 8 * 64), torch.zeros(0, dtype=torch.int32), NO_TURN, kv,
        torch.zeros(0, dtype=torch.int32),
    )  # fmt: skip
    made = batch(ops, table, (2, 2), 0, 64, 2)
    assert ops.attention(q, kv, made, AttentionKind(0, 1.0)).shape[0] == 0


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rows_that_are_not_finite_stay_alone(ops: Ops, dtype: torch.dtype) -> None:
    heads, dim, size = (1, 3), 64, 64
    table = token_table([Chunk(100, 1), Chunk(10, 30)], size)
    values = values_of(table, heads, dim, dtype)
    made, kind = batch(ops, table, heads, 0, size, 2), AttentionKind(0, 0.125)
    q, kv = filled(ops, table, values, dtype, size)
    clean = ops.attention(q, kv, made, kind)
    q[0, 3 * 7 + 1] = torch.nan
    got = ops.attention(q, kv, made, kind)
    bad = torch.zeros_like(clean, dtype=torch.bool)
    bad[7, dim : 2 * dim] = True
    assert bool(got[bad].isnan().all())
    assert torch.equal(got[~bad], clean[~bad])


@pytest.mark.parametrize("size", [16, 24])
def test_blocks_that_do_not_suit_the_kernels_take_the_reference_path(ops: Ops, size: int) -> None:
    heads, dim = (2, 2), 64
    table = token_table([Chunk(50, 3), Chunk(0, 5)], size)
    values = values_of(table, heads, dim, torch.float32)
    kind = AttentionKind(0, 0.125)
    made = batch(ops, table, heads, 0, size, 2)
    q, kv = filled(ops, table, values, torch.float32, size)
    want = expected(table, made, values, size, kind)
    torch.testing.assert_close(ops.attention(q, kv, made, kind).double(), want, rtol=0, atol=1e-5)
