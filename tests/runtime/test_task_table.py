"""Task tables: every key is read once, tasks are small, cores get equal loads."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from xylite.runtime import task_table
from xylite.runtime.step import MERGE_FIELDS, TASK_FIELDS, TaskTable, TokenTable

EMPTY = np.zeros(0, np.int32)
FIELDS_OF_LOAD = ("kv_start", "kv_end", "load")


def make_table(
    past: list[int],
    tokens: list[int],
    trees: dict[int, list[int]] | None = None,
    block_table: np.ndarray | None = None,
) -> TokenTable:
    """A token table with these chunks; `trees` gives the parents of a chunk's last tokens. They
    share no blocks unless `block_table` says so."""
    trees = trees or {}
    n = np.array(tokens, np.int32)
    kv_len = np.array(past, np.int32) + n
    num_draft, bias_start = np.zeros(len(n), np.int32), np.full(len(n), -1, np.int32)
    positions = [np.arange(p, p + k, dtype=np.int32) for p, k in zip(past, tokens, strict=True)]
    masks, size = [], 0
    for s, parents in trees.items():
        d = len(parents)
        mask, depth = np.eye(d, dtype=bool), np.zeros(d, np.int32)
        for i, parent in enumerate(parents):
            if parent >= 0:
                mask[i] |= mask[parent]
                depth[i] = depth[parent] + 1
        num_draft[s], bias_start[s] = d, size
        positions[s][-d:] = kv_len[s] - d + depth
        masks.append(mask.ravel())
        size += d * d
    return TokenTable(
        tokens=EMPTY,
        positions=np.concatenate([*positions, EMPTY]),
        slots=EMPTY,
        seq_of=np.repeat(np.arange(len(n), dtype=np.int32), n),
        carry=EMPTY,
        q_start=np.concatenate([[0], np.cumsum(n)]).astype(np.int32),
        kv_len=kv_len,
        num_draft=num_draft,
        bias_start=bias_start,
        block_table=np.arange(len(n), dtype=np.int32)[:, None]
        if block_table is None
        else block_table,
        tree_mask=np.concatenate([*masks, np.zeros(0, bool)]),
        logit_rows=EMPTY,
    )


def shared_blocks(rng: np.random.Generator, past: list[int], kv_tile: int) -> np.ndarray:
    """A block table in which some chunks have blocks of the one before, of these at times more
    than either has keys."""
    width = max(past) // kv_tile + 8
    table = np.arange(len(past) * width, dtype=np.int32).reshape(-1, width)
    for s in range(1, len(past)):
        n = int(rng.choice([0, 2, width // 2, width, width]))
        table[s, :n] = table[s - 1, :n]
    return table


def random_table(rng: np.random.Generator, kv_tile: int = 0) -> TokenTable:
    """Some chunks of every kind; with `kv_tile`, some share blocks of so many keys."""
    past, tokens, trees = [], [], {}
    for s in range(int(rng.integers(1, 9))):
        past.append(int(rng.choice([0, 1, 15, 16, 17, 31, 32, rng.integers(0, 400)])))
        stage = rng.choice(["prefill", "decode", "chain", "tree", *["decode"] * bool(kv_tile)])
        if stage == "prefill":
            tokens.append(int(rng.choice([1, 15, 16, 17, rng.integers(1, 150)])))
        elif stage == "decode":
            tokens.append(1)
        else:
            draft = int(rng.integers(1, 12))
            tokens.append(draft + int(rng.integers(1, 4)))
            if stage == "tree":
                trees[s] = [int(rng.integers(-1, i)) if i else -1 for i in range(draft)]
    if kv_tile:
        past = [int(p + rng.choice([0, 200, 200])) for p in past]
    return make_table(past, tokens, trees, shared_blocks(rng, past, kv_tile) if kv_tile else None)


def visible(table: TokenTable, seq: int, window: int) -> np.ndarray:
    """[tokens, kv_len] which keys each token of a chunk sees, straight from the definitions."""
    first, last = table.q_start[seq : seq + 2]
    n, kv_len = int(last - first), int(table.kv_len[seq])
    past = kv_len - n
    key_position = np.concatenate([np.arange(past), table.positions[first:last]])
    see = np.arange(kv_len) <= past + np.arange(n)[:, None]
    if table.bias_start[seq] >= 0:
        d = int(table.num_draft[seq])
        mask = table.tree_mask[table.bias_start[seq] :][: d * d].reshape(d, d)
        see[n - d :, kv_len - d :] = mask
    if window:
        see &= key_position > table.positions[first:last, None] - window
    return see


def all_tasks(table: TaskTable) -> list[dict[str, int]]:
    return [
        dict(zip(TASK_FIELDS, map(int, row), strict=True)) for c in table.classes for row in c.tasks
    ]


def reads_every_key_once(
    table: TaskTable, tokens: TokenTable, heads: int, group: int, window: int, kv_tile: int
) -> None:
    """Assert that the tasks of each row read the keys it sees, once."""
    sequences = range(len(tokens.kv_len))
    chunk_rows = np.diff(tokens.q_start) * group
    chunk_of = np.repeat(sequences, chunk_rows)
    count = [np.zeros((heads, chunk_rows[s], tokens.kv_len[s]), int) for s in sequences]
    for t in all_tasks(table):
        for row in range(t["row"], t["row"] + t["num_rows"]):
            s = chunk_of[row]
            keys = slice(t["kv_start"], t["kv_end"])
            count[s][t["head"], row - tokens.q_start[s] * group, keys] += 1
            blocks = slice(t["kv_start"] // kv_tile, -(-t["kv_end"] // kv_tile))
            mine, read = (tokens.block_table[i, blocks] for i in (s, t["seq"]))
            assert np.array_equal(mine, read)
        assert t["kv_start"] % kv_tile == 0 < t["kv_end"] - t["kv_start"]
        assert t["row"] == tokens.q_start[t["seq"]] * group + t["q_row"]
        assert t["past"] + chunk_rows[t["seq"]] // group == tokens.kv_len[t["seq"]]
        of_many = t["q_row"] + t["num_rows"] > chunk_rows[t["seq"]]
        assert t["tree"] == (tokens.bias_start[t["seq"]] >= 0 and not of_many)
        assert not of_many or t["kv_end"] <= t["past"]
    for s in sequences:
        see = np.repeat(visible(tokens, s, window), group, axis=0)
        assert np.all(count[s][:, see] == 1)
        assert np.all(count[s] <= 1)


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


def agents(lengths: list[int], shared: list[int], tokens: list[int] | None = None) -> TokenTable:
    """Decodes (or chunks of `tokens`) after `lengths` tokens, chunk i + 1 with the first shared[i]
    blocks of chunk i; blocks of 64."""
    table = np.arange(len(lengths) * 200, dtype=np.int32).reshape(-1, 200)
    for i, n in enumerate(shared):
        table[i + 1, :n] = table[i, :n]
    return make_table(lengths, tokens or [1] * len(lengths), block_table=table)


SHARING = {"num_kv_heads": 1, "group": 3, "tile_classes": (12, 96), "kv_tile": 64, "num_cores": 1}


def shared_of(table: TaskTable) -> list[tuple[int, int, int]]:
    """First chunk, rows and keys of the shared prefixes."""
    return [(m[0], m[2], m[5]) for m in table.merges[table.parts[0] :].tolist()]


def test_neighbours_with_a_common_prefix_read_it_in_tiles_of_all_their_rows():
    table = task_table.build(agents([1030] * 6, [15] * 5), **SHARING)
    assert shared_of(table) == [(0, 12, 512), (4, 6, 512)]
    one = agents([1030] * 6, [15] * 5, [4] * 6)
    assert shared_of(task_table.build(one, **SHARING)) == []  # their tiles are full


def test_a_prefix_ends_before_the_tokens_of_everyone_and_at_a_multiple_of_its_cut():
    for length, keys in ((511, 0), (512, 512), (1023, 512), (1024, 1024)):
        got = shared_of(task_table.build(agents([2000, length], [20]), **SHARING))
        assert got == ([(0, 6, keys)] if keys else [])
    for blocks, keys in ((7, 0), (8, 512), (15, 512), (16, 1024)):
        got = shared_of(task_table.build(agents([2000, 2000], [blocks]), **SHARING))
        assert got == ([(0, 6, keys)] if keys else [])


def test_a_block_that_differs_ends_the_prefix_whatever_follows():
    tokens = agents([2000, 2000], [20])
    tokens.block_table[1, 3] += 7000
    assert shared_of(task_table.build(tokens, **SHARING)) == []


def test_one_that_shares_little_joins_only_where_that_saves_keys():
    long = task_table.build(agents([4096] * 3, [64, 8]), **SHARING)
    assert shared_of(long) == [(0, 6, 4096)]
    even = task_table.build(agents([4096] * 3, [64, 40]), **SHARING)
    assert shared_of(even) == [(0, 9, 2560)]


def test_without_a_common_prefix_the_table_is_as_if_there_was_none(monkeypatch):
    tokens = agents([1030] * 5, [7] * 4)
    table = task_table.build(tokens, **SHARING)
    monkeypatch.setattr(task_table, "_share", lambda *args: 1 / 0)
    alone = task_table.build(tokens, **SHARING, batch_invariant=True)
    assert np.array_equal(table.classes[0].tasks, alone.classes[0].tasks)


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


DECODES = {"num_kv_heads": 2, "group": 3, "tile_classes": (4, 64), "num_cores": 4}


def arrays_of(table: TaskTable) -> list[list]:
    lists = [x.tolist() for c in table.classes for x in (c.tasks, c.core_start)]
    return [*lists, table.merges.tolist(), table.parts.tolist()]


@pytest.mark.parametrize("seed", range(4))
def test_tasks_that_grow_with_their_sequences_read_every_key_once(seed):
    rng = np.random.default_rng(seed)
    past = rng.integers(0, 600, int(rng.integers(1, 9))).tolist()
    decomposition = task_table.Decomposition(kv_tile=16, **DECODES)
    for step in range(40):
        tokens = make_table([n + step for n in past], [1] * len(past))
        table = decomposition(tokens)
        reads_every_key_once(table, tokens, heads=2, group=3, window=0, kv_tile=16)
        for c in table.classes:
            fields = dict(zip(TASK_FIELDS, c.tasks.T, strict=True))
            load = c.tile_q * (fields["kv_end"] - fields["kv_start"])
            assert fields["load"].tolist() == load.tolist()
        built = task_table.build(tokens, kv_tile=16, **DECODES)
        if step % 5 == 0:  # a quarter of a KV tile after the one before
            assert arrays_of(table) == arrays_of(built)
        assert len(table.merges) == 0 or table.parts[1] <= task_table.max_part_rows(
            tile_classes=(4, 64), kv_tile=16, num_cores=4, num_rows=6 * len(past)
        )


def test_tasks_are_cut_anew_when_other_chunks_come():
    decomposition = task_table.Decomposition(kv_tile=64, **DECODES)
    for past, tokens in [
        ([300, 90], [1, 1]),
        ([301, 91], [1, 1]),  # these grow
        ([302, 92], [1, 2]),
        ([303, 94], [1, 1]),
        ([304, 95, 7], [1, 1, 1]),
        ([305, 96], [1, 1]),
        ([307, 97], [1, 1]),
        ([], []),
        ([40], [1]),
    ]:
        made = make_table(past, tokens)
        built = task_table.build(made, kv_tile=64, **DECODES)
        assert arrays_of(decomposition(made)) == arrays_of(built)


def test_tasks_of_shared_prefixes_grow_only_with_the_same_blocks():
    settings = {**SHARING, "num_cores": 4}
    decomposition = task_table.Decomposition(**settings)
    growing = 0
    for step in range(40):
        # From step 10 on the last sequence is another one of the same length.
        tokens = agents([1030 + step] * 3, [15, 15 if step < 10 else 3])
        table = decomposition(tokens)
        reads_every_key_once(table, tokens, heads=1, group=3, window=0, kv_tile=64)
        assert shared_of(table) == [(0, 9 if step < 10 else 6, 512)]
        ends = table.merges[: table.parts[0], MERGE_FIELDS.index("kv_end")]
        assert np.all(ends == 1031 + step)
        growing += decomposition._grown > 0
    assert growing > 30


@pytest.mark.parametrize("settings", [{"window": 100}, {"batch_invariant": True}])
def test_tasks_of_windows_and_fixed_cuts_are_always_cut_anew(settings, monkeypatch):
    monkeypatch.setattr(task_table, "INVARIANT_CUT", 64)
    decomposition = task_table.Decomposition(kv_tile=64, **DECODES, **settings)
    for step in range(70):
        made = make_table([300 + step, 90 + step], [1, 1])
        built = task_table.build(made, kv_tile=64, **DECODES, **settings)
        assert arrays_of(decomposition(made)) == arrays_of(built)
