"""Which neighbours in a batch read a common prefix together, and how much of it."""

import numpy as np

from tests.runtime.tables import SHARING, agents, shared_of
from xylite.runtime import task_table


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
