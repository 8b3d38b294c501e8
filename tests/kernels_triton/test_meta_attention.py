"""Meta-Attention in the interpreter, against float64.

Tolerances: in float32 the interpreter rounds each product and sum once, so errors stay below 1e-5.
In float16 the probabilities are rounded before the second product and so is the result, 2^-11
each, of values up to about 4.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels_triton.cases import Case, Chunk, Shape, make_case, mixes, random_tree
from xylite.errors import ConfigError
from xylite.kernels_triton import attention
from xylite.kernels_triton.attention_tiles import HEAD_SIZES, attention_tiles
from xylite.ops import DenseKV, TaskLists
from xylite.runtime import task_table
from xylite.runtime.step import MERGE_FIELDS, TaskTable

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
SENTINEL = 12345.0
CORES = 3


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float64)


def on_device(table: TaskTable) -> TaskLists:
    """The table as tensors with room to spare, filled with what must never be read."""

    def roomy(a: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([a, np.full((2, *a.shape[1:]), 1 << 30, np.int32)]))

    return TaskLists(
        tasks=tuple(roomy(c.tasks) for c in table.classes),
        core_start=tuple(torch.from_numpy(c.core_start) for c in table.classes),
        merges=roomy(table.merges),
        parts=torch.from_numpy(table.parts),
        tile_q=tuple(c.tile_q for c in table.classes),
    )


def run(
    case: Case,
    dtype: torch.dtype,
    *,
    classes: tuple[int, ...] = (16, 32),
    trees: bool = True,
    invariant: bool = False,
    cores: int = CORES,
    quantise: bool = False,
) -> tuple[torch.Tensor, TaskTable]:
    """The kernel's result as float64, [G, rows, D], and the task table it ran."""
    shape, t = case.shape, case.table
    table = task_table.build(
        t,
        num_kv_heads=shape.heads,
        group=shape.group,
        window=shape.window,
        tile_classes=classes,
        kv_tile=shape.block_size,
        num_cores=cores,
        batch_invariant=invariant,
    )
    tasks = on_device(table)
    rows = case.q.shape[1]
    spare = 5  # rows of a bucket that this iteration does not fill
    q = torch.full((shape.heads, rows + spare, shape.dim), torch.nan, dtype=dtype)
    q[:, :rows] = torch.from_numpy(case.q)
    k, v = (torch.from_numpy(x) for x in (case.k, case.v))
    scales = None
    if quantise:
        ks, vs = (x.abs().amax(-1).nan_to_num(1.0).float() / 127 for x in (k, v))
        k, v = (
            (x / s[..., None]).round().nan_to_num().to(torch.int8) for x, s in ((k, ks), (v, vs))
        )
        scales = (ks, vs)
    else:
        k, v = k.to(dtype), v.to(dtype)
    position = torch.full((rows + spare,), torch.nan)
    position[:rows] = attention.row_positions(torch.from_numpy(t.positions), shape.group)
    tree = None
    if trees:
        longest = int(np.diff(t.q_start).max(initial=1))
        width = attention.tree_width(longest, shape.block_size)
        tree = attention.make_tree(rows + spare, width, q.device)
        tree[1:] = torch.nan
        attention.tree_bias(
            tree,
            tasks,
            tree_mask=torch.from_numpy(t.tree_mask),
            kv_len=torch.from_numpy(t.kv_len),
            num_draft=torch.from_numpy(t.num_draft),
            bias_start=torch.from_numpy(t.bias_start),
            group=shape.group,
            tile_kv=shape.block_size,
        )
    parts = attention.make_parts(int(table.parts[1]) + 1, shape.dim, q.device)
    for x in parts:
        x.fill_(torch.nan)
    parts.acc[-1] = SENTINEL
    tiles = attention_tiles("interpreter", shape.dim, size=shape.block_size)
    empty_like = torch.empty_like
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda x: empty_like(x).fill_(torch.nan))
        out = attention.meta_attention(
            q,
            DenseKV(k=k, v=v),
            tasks,
            block_table=torch.from_numpy(t.block_table),
            position=position,
            group=shape.group,
            scale=shape.scale,
            window=shape.window,
            cap=shape.cap,
            tree=tree,
            scales=scales,
            parts=parts,
            tiles=replace(tiles, tile_q=classes, options=({},) * len(classes)),
            vector_cores=2,
        )
    assert bool((parts.acc[-1] == SENTINEL).all()), "wrote beyond its parts"
    assert bool(out[:, rows:].isnan().all()), "wrote rows that no task names"
    return out[:, :rows].double(), table


def error(out: torch.Tensor, case: Case) -> float:
    if not case.expected.size:
        return 0.0
    return float((out - torch.from_numpy(case.expected)).abs().nan_to_num(np.inf).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("mix", ["one token", "decode", "prefill", "verify", "everything"])
def test_mixed_batches_match_float64(mix, group, dtype):
    rng = np.random.default_rng(group)
    shape = Shape(group=group)
    rounded = half if dtype == torch.float16 else lambda x: x.astype(np.float32).astype(np.float64)
    case = make_case(rng, shape, mixes(rng, shape.block_size)[mix], rounded)
    out, _ = run(case, dtype)
    assert error(out, case) < TOLERANCE[dtype]


@pytest.mark.parametrize("cores", [1, 40])
@pytest.mark.parametrize("quantise", [False, True])
def test_neighbours_that_share_a_prefix_match_float64(cores, quantise, monkeypatch):
    monkeypatch.setattr(task_table, "PREFIX_CUT", 32)
    rng = np.random.default_rng(cores)
    chunks = [
        Chunk(70, 1), Chunk(75, 1, shared=4), Chunk(64, 2, random_tree(rng, 1), shared=3),
        Chunk(100, 20), Chunk(400, 1), Chunk(390, 3, shared=24), Chunk(5, 1),
    ]  # fmt: skip
    case = make_case(rng, Shape(), chunks, half)
    out, table = run(case, torch.float16, quantise=quantise, cores=cores)
    assert error(out, case) < (0.1 if quantise else TOLERANCE[torch.float16])
    assert table.parts[2] == 2 * 2  # prefixes, of two heads each
    is_cut = table.merges[table.parts[0] :, MERGE_FIELDS.index("num_parts")] > 1
    assert is_cut.all() == (cores > 1)


@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_every_head_size_serves_a_mixed_batch(dim):
    rng = np.random.default_rng(dim)
    chunks = [Chunk(0, 18), Chunk(40, 1), Chunk(20, 6, random_tree(rng, 5))]
    case = make_case(rng, Shape(dim=dim, heads=1), chunks, half)
    out, table = run(case, torch.float16)
    assert error(out, case) < TOLERANCE[torch.float16]
    assert len(table.merges) > 0


@pytest.mark.parametrize("window", [1, 16, 24, 33])
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_windows_and_soft_caps_in_a_mixed_batch_match_float64(window, cap):
    rng = np.random.default_rng(window)
    # A tree is never deeper than the window, so its keys are all within it.
    chunks = [
        c
        for c in mixes(rng, 16)["everything"]
        if c.parents is None or len(c.parents) < max(window, 2)
    ]
    case = make_case(rng, Shape(window=window, cap=cap, group=3), chunks, half)
    out, _ = run(case, torch.float16)
    assert error(out, case) < TOLERANCE[torch.float16]


def test_a_server_without_trees_runs_the_kernel_without_their_bias():
    rng = np.random.default_rng(0)
    chunks = [c for c in mixes(rng, 16)["everything"] if c.parents is None]
    case = make_case(rng, Shape(), chunks, half)
    out, _ = run(case, torch.float16, trees=False)
    assert error(out, case) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_tiles_and_blocks_of_other_sizes_match_float64(block_size):
    rng = np.random.default_rng(block_size)
    case = make_case(rng, Shape(block_size=block_size), mixes(rng, block_size)["everything"], half)
    out, _ = run(case, torch.float16, classes=(16, 64))
    assert error(out, case) < TOLERANCE[torch.float16]


def test_an_empty_batch_writes_nothing():
    case = make_case(np.random.default_rng(0), Shape(), [])
    out, table = run(case, torch.float32)
    assert out.shape[1] == 0 and table.parts.tolist() == [0, 0, 0]


def test_int8_keys_and_values_with_scales_match_what_they_stand_for():
    rng = np.random.default_rng(5)
    case = make_case(rng, Shape(), mixes(rng, 16)["everything"], half)
    out, _ = run(case, torch.float16, quantise=True)
    # 127 steps per largest element: half a step of values up to about 4, twice.
    assert 1e-3 < error(out, case) < 0.1


@pytest.mark.parametrize("window", [0, 40])
def test_batch_invariant_cuts_give_the_same_bits_alone_and_in_a_mixed_batch(window, monkeypatch):
    monkeypatch.setattr(task_table, "INVARIANT_CUT", 32)
    shape = Shape(window=window)
    chunk = Chunk(70, 9)
    alone = make_case(np.random.default_rng(1), shape, [chunk], half)
    a, _ = run(alone, torch.float16, classes=(16,), invariant=True)

    # The same sequence, one token at a time, beside other work.
    rows = a.shape[1] // chunk.tokens
    for i in (0, 4, 8):
        step = Chunk(chunk.past + i, 1)
        single = make_case(np.random.default_rng(2), shape, [Chunk(90, 5), step], half)
        used = alone.table.block_table[0][: -(-(chunk.past + chunk.tokens) // 16)]
        k, v = (np.concatenate([x, y[used]]) for x, y in ((single.k, alone.k), (single.v, alone.v)))
        table = single.table.block_table.copy()
        table[1, :] = 0
        length = -(-(step.past + 1) // 16)
        table[1, :length] = single.k.shape[0] + np.arange(length)
        q = single.q.copy()
        q[:, -rows:] = alone.q[:, i * rows : (i + 1) * rows]
        again = replace(single, q=q, k=k, v=v, table=replace(single.table, block_table=table))
        b, _ = run(again, torch.float16, classes=(16,), invariant=True, cores=5)
        assert torch.equal(b[:, -rows:], a[:, i * rows : (i + 1) * rows])


def test_a_tree_too_large_for_its_mask_is_refused_with_both_numbers():
    assert attention.tree_width(17, 128) == 256
    with pytest.raises(ConfigError, match=r"2000 draft tokens needs a mask 2176 keys wide.*1024"):
        attention.tree_width(2001, 128)
