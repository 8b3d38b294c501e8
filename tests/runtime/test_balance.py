"""Balance on batches drawn from real lengths; bench/balance.py prints the whole table."""

import numpy as np
import pytest

from bench.balance import MIXES, TRACES, draw, greedy, measure, read_lengths, slowest
from xylite.runtime import task_table


@pytest.mark.parametrize("cores", [20, 24])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("trace", TRACES)
def test_symmetric_round_robin_stays_close_to_greedy_on_real_lengths(trace, mix, cores):
    row = measure(trace, mix, cores, batches=40)
    assert row.to_greedy_p50 <= 1.03, row
    assert row.to_greedy_p95 <= 1.08, row


def test_an_uneven_deal_shows_in_the_measure():
    tokens = draw(np.random.default_rng(0), read_lengths("azure_conversation"), "mixed")
    table = task_table.build(
        tokens, num_kv_heads=8, group=4, tile_classes=(16, 128), kv_tile=128, num_cores=20
    )
    for c in table.classes:
        c.core_start[1:-1] = c.core_start[-1]  # everything on core 0
    dealt, best = slowest(table)
    assert dealt / best > 15 and task_table.balance(table) == pytest.approx(20)


def test_greedy_gives_each_task_to_the_core_with_least_load():
    assert greedy(np.array([5, 4, 3, 3, 3]), 2) == 10
    assert greedy(np.array([7, 1, 1, 1]), 2) == 7
