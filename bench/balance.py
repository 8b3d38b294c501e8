"""How evenly task tables load the cores: symmetric round-robin against greedy longest-first.

    python -m bench.balance [--batches 500]

Batches are drawn from the lengths of real requests (bench/traces/lengths). For each trace, kind of
mix and number of cores it prints the ratio of the slowest core's load to that of the greedy deal
(each task to the core with the least load so far, which is slower to compute), and to the mean.
"""

import argparse
import csv
import heapq
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from xylite.runtime import task_table
from xylite.runtime.step import TASK_FIELDS, TaskTable, TokenTable

LENGTHS = Path(__file__).parent / "traces" / "lengths"
TRACES = ("azure_code", "azure_conversation", "mooncake_conversation")
MIXES = ("decode", "prefill", "verify", "mixed")
BUDGET = 4096
KV_HEADS, GROUP, KV_TILE = 8, 4, 128
TILE_CLASSES = (16, 128)
LOAD = TASK_FIELDS.index("load")


@dataclass(frozen=True, slots=True)
class Row:
    """Ratios over the batches of one trace and mix: median and 95th percentile."""

    trace: str
    mix: str
    cores: int
    batches: int
    to_greedy_p50: float
    to_greedy_p95: float
    to_mean_p50: float
    to_mean_p95: float
    build_ms_p50: float


def read_lengths(trace: str) -> np.ndarray:
    """[n, 2] prompt and answer tokens."""
    with (LENGTHS / f"{trace}.csv").open() as file:
        rows = list(csv.reader(file))[1:]
    return np.array(rows, np.int64)


def draw(rng: np.random.Generator, lengths: np.ndarray, mix: str) -> TokenTable:
    """One iteration: sequences somewhere in their answer, and prompts cut to the token budget."""
    past: list[int] = []
    tokens: list[int] = []
    if mix != "prefill":
        picks = lengths[rng.integers(len(lengths), size=int(rng.integers(1, 129)))]
        for prompt, answer in picks:
            past.append(int(prompt + rng.integers(answer)))
            drafts = int(rng.integers(3, 16)) if mix == "verify" else 0
            if mix == "mixed" and rng.random() < 0.3:
                drafts = int(rng.integers(3, 16))
            tokens.append(1 + drafts)
    room = BUDGET - sum(tokens)
    while mix in ("prefill", "mixed") and room > 0:
        prompt = int(lengths[rng.integers(len(lengths)), 0])
        done = int(rng.integers(prompt)) if rng.random() < 0.5 else 0
        chunk = min(prompt - done, room)
        past.append(done)
        tokens.append(chunk)
        room -= chunk
    n = np.array(tokens, np.int32)
    none = np.zeros(0, np.int32)
    return TokenTable(
        tokens=none,
        positions=none,
        slots=none,
        seq_of=none,
        carry=none,
        q_start=np.concatenate([[0], np.cumsum(n)]).astype(np.int32),
        kv_len=(np.array(past, np.int32) + n),
        num_draft=np.zeros(len(n), np.int32),
        bias_start=np.full(len(n), -1, np.int32),
        block_table=np.zeros((len(n), 1), np.int32),
        tree_mask=np.zeros(0, np.bool_),
        logit_rows=none,
    )


def greedy(loads: np.ndarray, num_cores: int) -> int:
    """Slowest core's load if each task, longest first, goes to the core with the least load."""
    cores = [0] * num_cores
    for load in sorted(loads.tolist(), reverse=True):
        heapq.heapreplace(cores, cores[0] + load)
    return max(cores)


def slowest(table: TaskTable) -> tuple[int, int]:
    """Sum over classes of the slowest core's load: as dealt, and dealt greedily."""
    dealt = int(task_table.core_loads(table).max(axis=1).sum())
    cores = len(table.classes[0].core_start) - 1
    return dealt, sum(greedy(c.tasks[:, LOAD], cores) for c in table.classes)


def measure(trace: str, mix: str, cores: int, batches: int, seed: int = 0) -> Row:
    """One row of the table."""
    rng = np.random.default_rng([seed, TRACES.index(trace), MIXES.index(mix)])
    lengths = read_lengths(trace)
    to_greedy, to_mean, build = [], [], []
    for _ in range(batches):
        tokens = draw(rng, lengths, mix)
        began = time.perf_counter()
        table = task_table.build(
            tokens,
            num_kv_heads=KV_HEADS,
            group=GROUP,
            tile_classes=TILE_CLASSES,
            kv_tile=KV_TILE,
            num_cores=cores,
        )
        build.append(time.perf_counter() - began)
        dealt, best = slowest(table)
        to_greedy.append(dealt / best)
        to_mean.append(task_table.balance(table))
    p50, p95 = (np.percentile([to_greedy, to_mean], q, axis=1) for q in (50, 95))
    build_ms = float(np.median(build)) * 1e3
    return Row(trace, mix, cores, batches, p50[0], p95[0], p50[1], p95[1], build_ms)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; with --json also write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, default=500, help="batches per row")
    parser.add_argument("--cores", type=int, nargs="+", default=[20, 24])
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args(argv)
    rows = [measure(t, m, c, args.batches) for t in TRACES for m in MIXES for c in args.cores]
    print("| trace | mix | cores | to greedy p50 | p95 | to mean p50 | p95 | build, ms |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for r in rows:
        ratios = (r.to_greedy_p50, r.to_greedy_p95, r.to_mean_p50, r.to_mean_p95)
        cells = " | ".join(f"{x:.3f}" for x in ratios)
        print(f"| {r.trace} | {r.mix} | {r.cores} | {cells} | {r.build_ms_p50:.2f} |")
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
