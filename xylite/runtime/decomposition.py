"""The attention tasks of one iteration after the other: mostly those of the one before, longer."""

from typing import Any

import numpy as np

from xylite.runtime import task_table
from xylite.runtime.step import I32, MERGE_FIELDS, TASK_FIELDS, TaskList, TaskTable, TokenTable


class Decomposition:
    """`task_table.build` for one attention kind, iteration after iteration.

    While the same chunks of one token go on, each sequence has a key more than before, and the
    tasks that read its last keys are lengthened by it. They are cut and dealt anew when that has
    gone on for a quarter of a KV tile: that takes an event loop twenty times as long. Lengths alone
    decide about tasks, but shared prefixes depend on the blocks: these must be the same too.

    settings  as `task_table.build` takes them
    """

    def __init__(self, **settings: Any):
        self._settings = settings
        self._can_grow = not (settings.get("window") or settings.get("batch_invariant"))
        self._longest_growth = settings["kv_tile"] // 4
        self._table: TaskTable | None = None
        self._grown = 0
        self._next_len: I32 = np.zeros(0, np.int32)  # of the keys, if the same chunks go on
        self._growth: list[I32] = []  # what a key more adds to the tasks of each class, and merges
        self._prefix: I32 = np.zeros((0, 0), np.int32)  # [S, blocks] where prefixes are shared

    def __call__(self, table: TokenTable) -> TaskTable:
        """The attention tasks of an iteration."""
        is_decode = self._can_grow and len(table.positions) == len(table.kv_len)
        if (
            is_decode
            and self._table is not None
            and self._grown < self._longest_growth
            and np.array_equal(table.kv_len, self._next_len)
            and np.array_equal(table.block_table[:, : self._prefix.shape[1]], self._prefix)
        ):
            self._grown += 1
            made = self._grow(self._table)
        else:
            self._grown = 0
            made = task_table.build(table, **self._settings)
            if is_decode:
                self._growth = [_growth(c, table.kv_len) for c in made.classes]
                self._growth.append(_merge_growth(made.merges, table.kv_len))
                shared = made.merges[made.parts[0] :, MERGE_FIELDS.index("kv_end")]
                num_blocks = int(shared.max(initial=0)) // self._settings["kv_tile"]
                self._prefix = table.block_table[:, :num_blocks].copy()
        self._table = made if is_decode else None
        self._next_len = table.kv_len + 1
        return made

    def _grow(self, before: TaskTable) -> TaskTable:
        """The same tasks, with one key more of each sequence."""
        *of_tasks, of_merges = self._growth
        lists = zip(before.classes, of_tasks, strict=True)
        classes = tuple(TaskList(c.tile_q, c.tasks + more, c.core_start) for c, more in lists)
        return TaskTable(classes, before.merges + of_merges, before.parts)


def _growth(tasks: TaskList, kv_len: I32) -> I32:
    """[W, len(TASK_FIELDS)] what one key more adds to the tasks of chunks of one token."""
    seq, kv_end = (tasks.tasks[:, TASK_FIELDS.index(name)] for name in ("seq", "kv_end"))
    added = np.zeros_like(tasks.tasks)
    is_last = kv_end == kv_len[seq]
    added[:, TASK_FIELDS.index("kv_end")] = is_last
    added[:, TASK_FIELDS.index("load")] = is_last * tasks.tile_q
    added[:, TASK_FIELDS.index("past")] = 1
    return added


def _merge_growth(merges: I32, kv_len: I32) -> I32:
    """[merges, len(MERGE_FIELDS)] the same of merges; a shared prefix stays as it is."""
    seq, kv_end = (merges[:, MERGE_FIELDS.index(name)] for name in ("seq", "kv_end"))
    added = np.zeros_like(merges)
    added[:, MERGE_FIELDS.index("kv_end")] = kv_end == kv_len[seq]
    return added
