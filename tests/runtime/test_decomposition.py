"""Task tables from one iteration to the next: what grows, and when it is made anew."""

import numpy as np
import pytest

from tests.runtime.tables import SHARING, agents, make_table, reads_every_key_once, shared_of
from xylite.runtime import task_table
from xylite.runtime.decomposition import Decomposition
from xylite.runtime.step import MERGE_FIELDS, TASK_FIELDS, TaskTable

DECODES = {"num_kv_heads": 2, "group": 3, "tile_classes": (4, 64), "num_cores": 4}


def arrays_of(table: TaskTable) -> list[list]:
    lists = [x.tolist() for c in table.classes for x in (c.tasks, c.core_start)]
    return [*lists, table.merges.tolist(), table.parts.tolist()]


@pytest.mark.parametrize("seed", range(4))
def test_tasks_that_grow_with_their_sequences_read_every_key_once(seed):
    rng = np.random.default_rng(seed)
    past = rng.integers(0, 600, int(rng.integers(1, 9))).tolist()
    decomposition = Decomposition(kv_tile=16, **DECODES)
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
    decomposition = Decomposition(kv_tile=64, **DECODES)
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
    decomposition = Decomposition(**settings)
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
    decomposition = Decomposition(kv_tile=64, **DECODES, **settings)
    for step in range(70):
        made = make_table([300 + step, 90 + step], [1, 1])
        built = task_table.build(made, kv_tile=64, **DECODES, **settings)
        assert arrays_of(decomposition(made)) == arrays_of(built)
