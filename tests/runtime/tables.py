"""Token tables of any chunks, and what must hold for the task tables made of them."""

import numpy as np

from xylite.runtime.step import TASK_FIELDS, TaskTable, TokenTable

EMPTY = np.zeros(0, np.int32)
# Settings under which chunks of few tokens share prefixes.
SHARING = {"num_kv_heads": 1, "group": 3, "tile_classes": (12, 96), "kv_tile": 64, "num_cores": 1}


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


def agents(lengths: list[int], shared: list[int], tokens: list[int] | None = None) -> TokenTable:
    """Decodes (or chunks of `tokens`) after `lengths` tokens, chunk i + 1 with the first shared[i]
    blocks of chunk i; blocks of 64."""
    table = np.arange(len(lengths) * 200, dtype=np.int32).reshape(-1, 200)
    for i, n in enumerate(shared):
        table[i + 1, :n] = table[i, :n]
    return make_table(lengths, tokens or [1] * len(lengths), block_table=table)


def shared_of(table: TaskTable) -> list[tuple[int, int, int]]:
    """First chunk, rows and keys of the shared prefixes."""
    return [(m[0], m[2], m[5]) for m in table.merges[table.parts[0] :].tolist()]
