"""Ratios of what the host adds; absolute times are for `python -m bench.host` to show."""

import asyncio

import pytest

from bench import host

pytestmark = pytest.mark.alone


def test_planning_four_times_the_sequences_costs_at_most_five_times_as_much():
    ratios = [host.host_seconds(256, 60) / host.host_seconds(64, 60) for _ in range(3)]
    assert min(ratios) <= 5, ratios


@pytest.mark.model
def test_two_hundred_streams_hardly_slow_an_iteration_down():
    ratios: list[float] = []
    while len(ratios) < 3 and min(ratios, default=2.0) > 1.15:  # another process may disturb one
        ratios.append(asyncio.run(host.streams(rounds=3))["step_ratio"])
    assert min(ratios) <= 1.15, ratios
