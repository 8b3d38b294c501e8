"""The reference table against formulas written out another way."""

import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.driver import Chunk, make_batch, random_schedule, tree_mask
from xylite import ops
from xylite.errors import ConfigError
from xylite.models import layers
from xylite.models.spec import Rope
from xylite.ops import AttentionKind, Batch, DenseKV, reference

G, GROUP, D, P = 2, 3, 8, 4


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pool(num_blocks: int, seed: int = 5) -> DenseKV:
    return DenseKV(randn(num_blocks, G, P, D, seed=seed), randn(num_blocks, G, P, D, seed=seed + 1))


def rows_of(x: Tensor, blocks: list[int], length: int) -> Tensor:
    """Keys or values of one sequence, [length, G, D]."""
    return torch.stack([x[blocks[j // P], :, j % P] for j in range(length)])


def one_query(q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind) -> Tensor:
    """Attention of one token's heads q [H, D] over the keys it sees, head by head; [H * D]."""
    out = []
    for h in range(q.shape[0]):
        scores = k[:, h // GROUP] @ q[h] * kind.scale
        if kind.cap:
            scores = kind.cap * torch.tanh(scores / kind.cap)
        out.append(scores.softmax(0) @ v[:, h // GROUP])
    return torch.cat(out)


def packed(q: Tensor) -> Tensor:
    """[T, H, D] -> [G, T * group, D]."""
    return torch.stack([q[:, g * GROUP : (g + 1) * GROUP].flatten(0, 1) for g in range(G)])


KINDS = [
    AttentionKind(0, 0.35),
    AttentionKind(0, 0.35, window=1),
    AttentionKind(0, 0.35, window=5),
    AttentionKind(0, 0.35, window=6, cap=0.8),
    AttentionKind(0, 0.35, cap=0.5),
]
MIX = [Chunk(0, 0, 9), Chunk(1, 12, 1), Chunk(2, 7, 4), Chunk(3, 0, 1), Chunk(4, 14, 3)]
BLOCKS = {0: [3, 9, 4], 1: [1, 5, 14, 15], 2: [8, 7, 6], 3: [2], 4: [10, 11, 12, 13, 16]}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_mix_of_stages_equals_each_query_alone(kind):
    kv = pool(20)
    for block in (0, 17, 18, 19):
        kv.k[block] = kv.v[block] = torch.nan
    batch = make_batch(MIX, {c.seq: range(40) for c in MIX}, BLOCKS, P)
    for i, c in enumerate(MIX):
        used = -(-(c.start + c.count) // P)
        batch.block_table[i, used:] = 10**6  # never read
    num_tokens = batch.tokens.shape[0]
    q = randn(num_tokens, G * GROUP, D)
    got = reference.attention(packed(q), kv, batch, kind)
    t = 0
    for c in MIX:
        k, v = (rows_of(x, BLOCKS[c.seq], c.start + c.count) for x in (kv.k, kv.v))
        for end in range(c.start + 1, c.start + c.count + 1):
            first = max(0, end - kind.window) if kind.window else 0
            expected = one_query(q[t], k[first:end], v[first:end], kind)
            torch.testing.assert_close(got[t], expected)
            t += 1
    assert t == num_tokens and got.shape == (t, G * GROUP * D)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("parents", [(-1, 0, 1), (-1, -1, 0, 1, 1, 2), (-1,)], ids=str)
def test_each_draft_token_of_a_tree_sees_its_path_as_if_it_were_alone(kind, parents):
    kv = pool(20)
    num = len(parents)
    trunk = 7
    chunks = [Chunk(1, 3, 2), Chunk(4, trunk - 2, 2 + num, parents), Chunk(3, 1, 1)]
    batch = make_batch(chunks, {c.seq: range(40) for c in chunks}, BLOCKS, P)
    q = randn(batch.tokens.shape[0], G * GROUP, D)
    got = reference.attention(packed(q), kv, batch, kind)
    k, v = (rows_of(x, BLOCKS[4], trunk + num) for x in (kv.k, kv.v))
    for i in range(-2, num):
        if i < 0:
            seen = list(range(trunk + i + 1))
        else:
            path, at = [], i
            while at >= 0:
                path.insert(0, trunk + at)
                at = parents[at]
            seen = [*range(trunk), *path]
        seen = seen[-kind.window :]
        expected = one_query(q[4 + i], k[seen], v[seen], kind)
        torch.testing.assert_close(got[4 + i], expected)


def test_two_trees_in_one_batch_use_their_own_masks():
    kv, kind = pool(20), KINDS[0]
    a, b = Chunk(1, 4, 3, (-1, -1)), Chunk(4, 6, 4, (-1, 0, 0))
    q = randn(7, G * GROUP, D)

    def run(chunks: list[Chunk], rows: Tensor) -> Tensor:
        batch = make_batch(chunks, {c.seq: range(40) for c in chunks}, BLOCKS, P)
        return reference.attention(packed(rows), kv, batch, kind)

    both = run([a, b], q)
    torch.testing.assert_close(both, torch.cat((run([a], q[:3]), run([b], q[3:]))))


def test_a_tree_mask_names_ancestors_and_self():
    assert tree_mask((-1, 0, -1, 1)).int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [1, 1, 0, 1],
    ]


def empty_batch() -> Batch:
    return make_batch([], {}, {}, P)


def test_no_tokens_are_ordinary_everywhere():
    kv, rope = (pool(3),), layers.rope_table(Rope(theta=1e4, rot=D), 10).double()
    batch = empty_batch()
    none = torch.zeros(0, dtype=torch.int32)
    q, leaf = reference.qk_norm_rope_append(
        randn(0, (G * GROUP + 2 * G) * D), batch.positions, rope, kv[0], batch.slots
    )
    assert q.shape == (G, 0, D) and torch.equal(leaf.k, pool(3).k)
    assert reference.attention(q, kv[0], batch, KINDS[0]).shape[0] == 0
    assert reference.linear(randn(0, 4), randn(6, 4), act="silu").shape == (0, 3)
    assert reference.embed(randn(5, 4), none).shape == (0, 4)
    assert reference.add_rms_norm(randn(0, 4), None, randn(4), 1e-6)[0].shape == (0, 4)
    assert reference.grouped_linear(randn(0, 4), randn(2, 6, 4), none).shape == (0, 6)
    for change in (reference.move_slots, reference.copy_blocks):
        assert torch.equal(change(kv, none, none)[0].k, pool(3).k)
    assert torch.equal(reference.zero_blocks(kv, none)[0].v, pool(3).v)


@pytest.mark.parametrize("rot", [0, 4, D])
@pytest.mark.parametrize("norm", [False, True])
def test_heads_are_normed_turned_and_written_to_their_slots(rot, norm):
    rope = layers.rope_table(Rope(theta=100.0, rot=rot), 50).double()
    kv = DenseKV(torch.full((6, G, P, D), 7.0).double(), torch.full((6, G, P, D), 7.0).double())
    positions, slots = torch.tensor([3, 40, 0]).int(), torch.tensor([5, 23, 8]).int()
    qkv = randn(3, (G * GROUP + 2 * G) * D)
    weights = (randn(D, seed=2), randn(D, seed=3)) if norm else (None, None)
    q, leaf = reference.qk_norm_rope_append(
        qkv, positions, rope, kv, slots, q_norm=weights[0], k_norm=weights[1], eps=1e-5
    )
    assert leaf.k.data_ptr() == kv.k.data_ptr()
    heads = qkv.view(3, -1, D)

    def turned(x: Tensor, w: Tensor | None, position: int) -> Tensor:
        if w is not None:
            x = x / torch.sqrt((x**2).mean() + 1e-5) * w
        y = x.clone()
        for i in range(rot // 2):
            a = position * 100.0 ** (-2 * i / rot)
            pair = torch.complex(x[i], x[i + rot // 2]) * torch.polar(
                torch.tensor(1.0).double(), torch.tensor(a).double()
            )
            y[i], y[i + rot // 2] = pair.real, pair.imag
        return y

    written = set()
    for t, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        for h in range(G * GROUP):
            expected = turned(heads[t, h], weights[0], position)
            row = q[h // GROUP, t * GROUP + h % GROUP]
            torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-5)
        for g in range(G):
            expected = turned(heads[t, G * GROUP + g], weights[1], position)
            stored = leaf.k[slot // P, g, slot % P]
            torch.testing.assert_close(stored, expected, atol=1e-5, rtol=1e-5)
            assert torch.equal(leaf.v[slot // P, g, slot % P], heads[t, G * GROUP + G + g])
        written.add((slot // P, slot % P))
    for n in range(6):
        for p in range(P):
            assert ((n, p) in written) or (leaf.k[n, :, p] == 7).all()


def test_linear_and_its_epilogues():
    x, w, bias, residual = randn(5, 4), randn(6, 4), randn(6), randn(5, 6, seed=1)
    y = x @ w.T + bias
    torch.testing.assert_close(reference.linear(x, w, bias), y)
    torch.testing.assert_close(reference.linear(x, w, bias, residual=residual), y + residual)
    torch.testing.assert_close(reference.linear(x, w, bias, cap=0.5), 0.5 * torch.tanh(y / 0.5))
    silu = y[:, :3] * torch.sigmoid(y[:, :3]) * y[:, 3:]
    torch.testing.assert_close(reference.linear(x, w, bias, act="silu"), silu)
    gelu = F.gelu(y[:, :3], approximate="tanh") * y[:, 3:]
    torch.testing.assert_close(reference.linear(x, w, bias, act="gelu_tanh"), gelu)


def test_grouped_linear_gives_each_row_its_experts_weight():
    x, w, bias = randn(7, 4), randn(3, 6, 4), randn(3, 6)
    expert = torch.tensor([2, 0, 2, 2, 0, 0, 2]).int()
    got = reference.grouped_linear(x, w, expert, bias, act="silu")
    for t, e in enumerate(expert.tolist()):
        torch.testing.assert_close(
            got[t], reference.linear(x[t : t + 1], w[e], bias[e], act="silu")[0]
        )


def test_rms_norm_adds_first_and_rounds_once():
    x, r, w = randn(5, 16), randn(5, 16, seed=1), randn(16)
    total = x + r
    expected = total / torch.sqrt((total**2).mean(-1, keepdim=True) + 1e-5) * w
    got, stream = reference.add_rms_norm(x, r, w, 1e-5)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(stream, total)
    alone, same = reference.add_rms_norm(total, None, w, 1e-5)
    torch.testing.assert_close(alone, expected)
    assert torch.equal(same, total)
    # Sums that overflow float16 are normed all the same, and the type is kept.
    big = torch.full((2, 16), 40000.0, dtype=torch.float16)
    got, stream = reference.add_rms_norm(big, big, torch.ones(16), 1e-5)
    assert got.dtype == stream.dtype == torch.float16
    torch.testing.assert_close(got, torch.ones_like(got))


def test_moves_and_copies_read_everything_before_they_write():
    before = pool(4)
    kv = (DenseKV(before.k.clone(), before.v.clone()), DenseKV(before.v.clone(), before.k.clone()))
    src, dst = torch.tensor([1, 2, 9, 15]).int(), torch.tensor([2, 9, 1, 0]).int()
    kv = reference.move_slots(kv, src, dst)
    for s, d in zip(src.tolist(), dst.tolist(), strict=True):
        assert torch.equal(kv[0].k[d // P, :, d % P], before.k[s // P, :, s % P])
        assert torch.equal(kv[1].k[d // P, :, d % P], before.v[s // P, :, s % P])
    kv = (DenseKV(before.k.clone(), before.v.clone()),)
    swapped = reference.copy_blocks(kv, torch.tensor([1, 2]).int(), torch.tensor([2, 1]).int())
    assert torch.equal(swapped[0].k[[0, 2, 1, 3]], before.k)
    cleared = reference.zero_blocks(swapped, torch.tensor([3]).int())
    assert not cleared[0].v[3].any() and torch.equal(cleared[0].v[0], before.v[0])


def test_the_table_is_found_by_name_and_has_one_index():
    assert ops.load("reference").name == "reference"
    with pytest.raises(ConfigError, match="only index 0"):
        ops.load("reference:1")


def test_random_schedules_cover_each_token_once_and_in_order():
    lengths = [1, 17, 40]
    seen = [0, 0, 0]
    for step in random_schedule(random.Random(3), lengths):
        assert len({c.seq for c in step}) == len(step)
        for c in step:
            assert c.start == seen[c.seq] and c.count > 0
            seen[c.seq] += c.count
    assert seen == lengths
