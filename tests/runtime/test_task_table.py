"""Task tables: every key is read once, tasks are small, cores get equal loads."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.tables import (
    all_tasks,
    make_table,
    random_table,
    reads_every_key_once,
    shared_blocks,
)
from xylite.runtime import task_table
from xylite.runtime.step import MERGE_FIELDS, TASK_FIELDS

FIELDS_OF_LOAD = ("kv_start", "kv_end", "load")


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("window", [0, 20, 130])
@pytest.mark.parametrize("invariant", [False, True])
def test_every_visible_key_is_read_once_in_random_mixes(group, window, invariant, monkeypatch):
    monkeypatch.setattr(task_table, "INVARIANT_CUT", 64)
    monkeypatch.setattr(task_table, "PREFIX_CUT", 32)
    rng = np.random.default_rng(100 * group + window)
    heads, num_shared = 2, 0
    for _ in range(12):
        kv_tile = int(rng.choice([16, 32, 48]))
        tokens = random_table(rng, kv_tile)
        table = task_table.build(
            tokens,
            num_kv_heads=heads,
            group=group,
            window=window,
            tile_classes=(16, 64) if rng.random() < 0.7 else (32,),
            kv_tile=kv_tile,
            num_cores=int(rng.integers(1, 7)),
            batch_invariant=invariant,
        )
        num_shared += int(table.parts[2])
        reads_every_key_once(table, tokens, heads, group, window, kv_tile)
    assert (num_shared > 0) == (not window and not invariant)


@pytest.mark.parametrize("seed", range(8))
def test_merges_name_every_row_of_the_partial_results_once(seed, monkeypatch):
    monkeypatch.setattr(task_table, "PREFIX_CUT", 16)
    rng = np.random.default_rng(seed)
    tokens = random_table(rng, 4)
    table = task_table.build(
        tokens, num_kv_heads=3, group=4, tile_classes=(16, 64), kv_tile=4, num_cores=32
    )
    tasks = all_tasks(table)
    filled = np.zeros(table.parts[1], int)
    for t in tasks:
        if t["part"] >= 0:
            filled[t["part"] : t["part"] + t["num_rows"]] += 1
    assert np.all(filled == 1)
    num_results, _, num_shared = table.parts.tolist()
    assert num_results + num_shared == len(table.merges)
    assert sum(t["part"] >= 0 for t in tasks) > 0 and np.all(np.diff(table.merges[:, 6]) > 0)
    merges = [dict(zip(MERGE_FIELDS, map(int, row), strict=True)) for row in table.merges]
    parts_of = []
    for m in merges:
        same = ("seq", "q_row", "num_rows", "head", "row")
        parts = [t for t in tasks if t["part"] >= 0 and all(t[f] == m[f] for f in same)]
        parts = sorted(parts, key=lambda t: t["kv_start"])
        parts_of.append([t["part"] for t in parts])
        assert parts_of[-1] == [m["part"] + k * m["num_rows"] for k in range(m["num_parts"])]
        assert (parts[0]["kv_start"], parts[-1]["kv_end"]) == (m["kv_start"], m["kv_end"])
        for a, b in itertools.pairwise(parts):
            assert a["kv_end"] == b["kv_start"]
    read = np.zeros(table.parts[1], int)
    for m, parts in zip(merges[:num_results], parts_of, strict=False):
        for part in parts:
            read[part : part + m["num_rows"]] += 1
        if m["prefix"] < 0:
            assert m["kv_start"] == 0
            continue
        assert m["prefix"] >= num_results
        prefix = merges[m["prefix"]]
        assert prefix["head"] == m["head"] and prefix["kv_end"] == m["kv_start"]
        for part in parts_of[m["prefix"]]:
            at = part + m["row"] - prefix["row"]
            assert part <= at <= part + prefix["num_rows"] - m["num_rows"]
            read[at : at + m["num_rows"]] += 1
    assert np.all(read == 1)


@pytest.mark.parametrize("invariant", [False, True])
def test_partial_results_never_have_more_rows_than_the_limit(invariant, monkeypatch):
    monkeypatch.setattr(task_table, "PREFIX_CUT", 128)
    rng = np.random.default_rng(7)
    most = 0.0
    for _ in range(150):
        cores, kv_tile = int(rng.integers(1, 12)), int(rng.choice([16, 64, 128]))
        classes = (16, 64) if rng.random() < 0.5 else (16,)
        n = int(rng.integers(1, 12))
        past = rng.integers(0, int(rng.choice([100, 9000])), n).tolist()
        chunks = rng.choice([1, 1, 3, 40], n).tolist()
        shares = rng.random() < 0.5
        table = task_table.build(
            make_table(past, chunks, None, shared_blocks(rng, past, kv_tile) if shares else None),
            num_kv_heads=2,
            group=2,
            tile_classes=classes,
            kv_tile=kv_tile,
            num_cores=cores,
            batch_invariant=invariant,
        )
        limit = task_table.max_part_rows(
            tile_classes=classes,
            kv_tile=kv_tile,
            num_cores=cores,
            batch_invariant=invariant,
            num_rows=4 * sum(chunks),
            max_len=max(p + c for p, c in zip(past, chunks, strict=True)),
        )
        assert table.parts[1] <= limit
        most = max(most, table.parts[1] / max(limit, 1))
    assert most > 0.3  # the limit is not absurdly high


def test_no_task_exceeds_a_quarter_of_the_mean_core_load():
    table = task_table.build(
        make_table([0, 9000, 20_000, 50], [700, 1, 40, 1]),
        num_kv_heads=8,
        group=4,
        tile_classes=(16, 128),
        kv_tile=64,
        num_cores=20,
    )
    for c, loads in zip(table.classes, task_table.core_loads(table), strict=True):
        kv_start, kv_end, load = (c.tasks[:, TASK_FIELDS.index(f)] for f in FIELDS_OF_LOAD)
        assert np.array_equal(load, c.tile_q * (kv_end - kv_start))
        assert load.sum() == loads.sum() and load.max() <= loads.mean() / 4
        assert (load > loads.mean() / 16).any()  # nor are they cut without need


def test_short_ranges_are_not_cut_for_balance_alone():
    table = task_table.build(
        make_table([999], [1]),
        num_kv_heads=1,
        group=1,
        tile_classes=(16,),
        kv_tile=100,
        num_cores=64,
    )
    assert sorted(table.classes[0].tasks[:, 4].tolist()) == [0, 200, 400, 600, 800]


def test_chunks_that_fit_the_small_class_get_it_and_others_the_large():
    table = task_table.build(
        make_table([5, 5, 5, 5], [1, 4, 5, 40]),
        num_kv_heads=1,
        group=4,
        tile_classes=(16, 64),
        kv_tile=16,
        num_cores=1,
        batch_invariant=True,
    )
    small, large = table.classes
    rows = [small.tasks[:, 0].tolist(), large.tasks[:, 0].tolist()]
    assert sorted(rows[0]) == [0, 1] and sorted(rows[1]) == [2, 3, 3, 3]
    assert sorted(large.tasks[large.tasks[:, 0] == 3, 2].tolist()) == [32, 64, 64]


def test_tasks_are_dealt_in_symmetric_round_robin_by_falling_load():
    past = [1000 - 10 * i for i in range(11)]
    table = task_table.build(
        make_table(past, [1] * 11),
        num_kv_heads=1,
        group=1,
        tile_classes=(16,),
        kv_tile=1024,
        num_cores=3,
    )
    (tasks,) = table.classes
    dealt = [
        tasks.tasks[a:b, 0].tolist()
        for a, b in zip(tasks.core_start, tasks.core_start[1:], strict=False)
    ]
    assert dealt == [[0, 5, 6], [1, 4, 7, 10], [2, 3, 8, 9]]


def test_cuts_at_fixed_multiples_do_not_depend_on_the_batch(monkeypatch):
    monkeypatch.setattr(task_table, "INVARIANT_CUT", 256)
    kwargs = {"num_kv_heads": 1, "group": 2, "tile_classes": (16,), "kv_tile": 64, "num_cores": 4}

    def ranges(table, seq):
        built = task_table.build(table, batch_invariant=True, **kwargs)
        return sorted(
            (t["q_row"], t["kv_start"], t["kv_end"]) for t in all_tasks(built) if t["seq"] == seq
        )

    alone = ranges(make_table([700], [1]), 0)
    beside = ranges(make_table([5000, 700, 3], [90, 1, 400]), 1)
    assert alone == beside == [(0, 0, 256), (0, 256, 512), (0, 512, 701)]


def test_an_empty_table_gives_empty_lists():
    for tokens in (make_table([], []), make_table([7], [0])):
        table = task_table.build(
            tokens, num_kv_heads=8, group=4, tile_classes=(16, 128), kv_tile=128, num_cores=20
        )
        assert [c.tasks.shape for c in table.classes] == [(0, len(TASK_FIELDS))] * 2
        assert [c.core_start.tolist() for c in table.classes] == [[0] * 21] * 2
        assert table.merges.shape == (0, len(MERGE_FIELDS)) and table.parts.tolist() == [0, 0, 0]
        assert task_table.balance(table) == 1.0


def test_the_worked_example_of_the_docstring_holds():
    doc = task_table.__doc__ or ""
    tokens = make_table([1318, 1657, 2036, 1986], [362, 1, 53, 1])
    settings = {
        "num_kv_heads": 1,
        "group": 1,
        "tile_classes": (16, 128),
        "kv_tile": 128,
        "num_cores": 4,
    }
    whole = task_table._tiles(tokens, 1, 0, (16, 128), 128)
    loads = whole["tile_q"] * whole["kv_end"]
    for rows, tile, keys, load in zip(
        whole["num_rows"], whole["tile_q"], whole["kv_end"], loads, strict=True
    ):
        assert f"{tile:>4}{keys:>7}  {load:>7,}" in doc, (rows, tile, keys, load)
    total = int(loads[whole["tile_q"] == 128].sum())
    assert f"{total:,} in all, {total // 4:,} per core" in " ".join(doc.split())
    assert f"a quarter of that, {total // 16:,}" in doc
    assert f"Class 16 has {int(loads.sum()) - total:,} in all" in doc
    table = task_table.build(tokens, **settings)
    keys = [int((c.tasks[:, 5] - c.tasks[:, 4]).max()) for c in table.classes]
    assert f"({keys[1]} keys), so" in doc and f"({keys[0]} keys), which" in doc
    assert "become 4, 5, 5 and 6 parts" in doc and "makes 7 and 8 parts" in doc
    parts = table.merges[:, MERGE_FIELDS.index("num_parts")].tolist()
    assert parts == [4, 5, 5, 7, 6, 8]
    assert f"{len(table.classes[1].tasks)} and {len(table.classes[0].tasks)} tasks" in " ".join(
        doc.split()
    )
    assert f"{task_table.balance(table):.2f} times the mean load" in doc


def test_the_table_in_the_readme_is_what_is_made():
    readme = (Path(__file__).parent.parent.parent / "README.md").read_text()
    tokens = make_table([1318, 1657, 2036, 1986], [362, 1, 53, 1])
    table = task_table.build(
        tokens, num_kv_heads=1, group=1, tile_classes=(16, 128), kv_tile=128, num_cores=4
    )
    tiles = task_table._tiles(tokens, 1, 0, (16, 128), 128)
    parts = table.merges[:, MERGE_FIELDS.index("num_parts")].tolist()
    names = ("prefill", "decode", "verify", "decode")
    lines = []
    for i, num in enumerate(parts):
        seq, row, rows, tile, keys = (
            int(tiles[name][i]) for name in ("seq", "q_row", "num_rows", "tile_q", "kv_end")
        )
        span = f"{row} to {row + rows - 1}" if rows > 1 else f"{row}"
        lines.append(f"| {names[seq]} | {span} | {tile} | {keys} | {tile * keys:,} | {num} |")
    shown = readme.split("<!-- tasks -->")[1].split("<!-- /tasks -->")[0]
    assert [x for x in shown.splitlines() if x][2:] == lines
    slowest = f"the slowest core here has {task_table.balance(table):.2f} times the mean"
    assert slowest in " ".join(readme.split())
