"""How fast the CPU table is, op by op, against what this machine can do.

    python bench/ops_cpu.py linear     GFLOP/s, GB/s and percent of the roofline per shape and M
    python bench/ops_cpu.py model      tok/s of whole steps (SmolLM2-135M's shapes, random weights)
                                       and where the time goes

Times are minima of many short runs. On a busy machine take `--cpu-time`: one thread, its processor
time instead of the clock. The roofline is measured
with the same kernels: the largest product that stays in cache, and one pass over a large weight.
"""

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from xylite import models
from xylite.models import layers, weights
from xylite.ops import Activation, Batch, Ops, TaskLists, cpu
from xylite.runtime import task_table
from xylite.runtime.step import TokenTable

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
SHAPES = {"qkv": (960, 576), "out": (576, 576), "gate_up": (3072, 576), "down": (576, 1536),
          "head": (49152, 576)}  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
Clock = Callable[[], float]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


def best_of(f: Callable[[], Any], budget_s: float, clock: Clock = time.perf_counter) -> float:
    """Least time of one call, tried for about `budget_s` seconds."""
    f()
    least, end = float("inf"), time.perf_counter() + budget_s
    while True:
        start = clock()
        f()
        least = min(least, clock() - start)
        if time.perf_counter() > end:
            return least


def roofline(
    ops: Ops, pack: Callable[..., Any], dtype: torch.dtype, clock: Clock
) -> tuple[float, float]:
    """(FLOP/s, bytes/s) that the table's own kernels reach at best."""
    w = pack(torch.randn(512, 512).to(dtype))
    x = torch.randn(384, 512)
    flops = 2 * x.shape[0] * 512 * 512 / best_of(lambda: ops.linear(x, w), 0.5, clock)
    large = pack(torch.randn(1 << 17, 1024).to(dtype))
    one = torch.randn(1, 1024)
    return flops, weights.weight_bytes(large) / best_of(lambda: ops.linear(one, large), 1.0, clock)


def bench_linear(
    ops: Ops, pack: Callable[..., Any], dtype: torch.dtype, budget_s: float, clock: Clock
) -> None:
    """Weights rotate through 256 MiB, as a model does: small ones are not found in cache."""
    peak, bandwidth = roofline(ops, pack, dtype, clock)
    print(f"roofline: {peak / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s")
    for name, (n, k) in SHAPES.items():
        gated = name == "gate_up"
        one = torch.randn(n, k).to(dtype)
        num_bytes = weights.weight_bytes(pack(one.clone(), gated=gated))
        copies = max(1, (256 << 20) // num_bytes)
        packed = [pack(one.clone(), gated=gated) for _ in range(copies)]
        turn = itertools.cycle(packed)
        act: Activation | None = "silu" if gated else None
        for m in ROWS:
            x = torch.randn(m, k)
            least = best_of(lambda: ops.linear(x, next(turn), act=act), budget_s, clock)  # noqa: B023
            limit = max(2 * m * n * k / peak, num_bytes / bandwidth)
            rate, traffic = 2 * m * n * k / least / 1e9, num_bytes / least / 1e9
            print(
                f"{name:8s} {n:6d} x {k:5d}  M {m:5d}  {least * 1e6:9.1f} us  "
                f"{rate:7.1f} GFLOP/s  {traffic:6.1f} GB/s  {100 * limit / least:5.1f} %",
                flush=True,
            )


def batch_of(ops: Ops, chunks: list[tuple[int, int]], spec: Any) -> Batch:
    """One iteration of chunks (tokens before, tokens now); blocks in order."""
    size = ops.device.block_size
    lengths = np.array([p + n for p, n in chunks], np.int32)
    counts = -(-lengths // size)
    start = np.concatenate(([0], np.cumsum(counts)))
    block_table = np.zeros((len(chunks), int(counts.max())), np.int32)
    positions, slots, seq_of = [], [], []
    for i, (past, n) in enumerate(chunks):
        block_table[i, : counts[i]] = np.arange(start[i], start[i + 1])
        place = np.arange(past, past + n)
        positions.append(place)
        slots.append(start[i] * size + place)
        seq_of += [i] * n
    rng = np.random.default_rng(0)
    none = np.zeros(0, np.int32)
    flat = np.concatenate(positions).astype(np.int32)
    table = TokenTable(
        tokens=rng.integers(0, spec.vocab_size, len(flat)).astype(np.int32),
        positions=flat,
        slots=np.concatenate(slots).astype(np.int32),
        seq_of=np.array(seq_of, np.int32),
        carry=np.full(len(flat), -1, np.int32),
        q_start=np.concatenate(([0], np.cumsum([n for _, n in chunks]))).astype(np.int32),
        kv_len=lengths,
        num_draft=np.zeros(len(chunks), np.int32),
        bias_start=np.full(len(chunks), -1, np.int32),
        block_table=block_table,
        tree_mask=np.zeros(0, bool),
        logit_rows=none,
    )
    tasks = task_table.build(
        table,
        num_kv_heads=spec.num_kv_heads,
        group=spec.num_heads // spec.num_kv_heads,
        tile_classes=ops.device.tile_classes,
        kv_tile=size,
        num_cores=ops.device.num_cores,
    )
    lists = TaskLists(
        tasks=tuple(torch.from_numpy(c.tasks) for c in tasks.classes),
        core_start=tuple(torch.from_numpy(c.core_start) for c in tasks.classes),
        merges=torch.from_numpy(tasks.merges),
        parts=torch.from_numpy(tasks.parts),
        tile_q=tuple(c.tile_q for c in tasks.classes),
    )
    names = [f.name for f in dataclasses.fields(Batch) if f.name != "tasks"]
    return Batch(**{n: torch.from_numpy(getattr(table, n)) for n in names}, tasks=(lists,))


def timed(ops: Ops, spent: dict[str, float], clock: Clock) -> Ops:
    """The same table; each call's time is added under its name."""

    def wrap(name: str) -> Callable[..., Any]:
        inner = getattr(ops, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = clock()
            out = inner(*args, **kwargs)
            key = f"{name} {args[1].n}x{args[1].k}" if name == "linear" else name
            spent[key] = spent.get(key, 0.0) + clock() - begin
            return out

        return call

    names = ("embed", "linear", "add_rms_norm", "qk_norm_rope_append", "attention")
    return dataclasses.replace(ops, **{n: wrap(n) for n in names})


def bench_model(
    ops: Ops, dtype: torch.dtype, budget_s: float, clock: Clock, out: str | None
) -> None:
    family, spec = models.describe(SMOLLM2)
    params = weights.random_params(spec, family, ops, dtype)
    num_blocks = 32 * 5 + 40
    kv = layers.make_kv(
        spec, num_blocks, ops.device.block_size, dtype=dtype, device=torch.device("cpu")
    )
    cases = {
        "prefill 512": [(0, 512)],
        "prefill 2048": [(0, 2048)],
        "decode at 1": [(192, 1)],
        "decode at 8": [(192, 1)] * 8,
        "decode at 32": [(192, 1)] * 32,
        "mixed 8 + 56": [(192, 1)] * 8 + [(0, 56)],
    }
    results = {}
    for name, chunks in cases.items():
        batch = batch_of(ops, chunks, spec)
        last = batch.q_start[1:].long() - 1

        def step(table: Ops) -> None:
            hidden, _ = family.forward(params, kv, batch, spec, table)  # noqa: B023
            family.logits(params, hidden[last], spec, table).argmax(-1)  # noqa: B023

        with torch.inference_mode():
            least = best_of(lambda: step(ops), budget_s, clock)
            profile: dict[str, float] = {}
            for _ in range(5 if least > 0.1 else 15):
                spent: dict[str, float] = {}
                step(timed(ops, spent, clock))
                profile = {k: min(v, profile.get(k, v)) for k, v in spent.items()}
        rate = len(batch.tokens) / least
        results[name] = rate
        print(f"{name:14s} {rate:8.1f} tok/s  {least * 1e3:8.2f} ms   " +
              ", ".join(f"{k} {v * 1e3:.2f}" for k, v in profile.items()), flush=True)  # fmt: skip
    if out:
        with open(out, "w") as f:
            json.dump({"arch": ops.device.arch, "threads": ops.device.num_cores, **results}, f)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("linear", "model"))
    parser.add_argument("--dtype", choices=(*DTYPES, "int8", "int4"), default="bf16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--budget", type=float, default=0.2, help="seconds per figure")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, processor time")
    parser.add_argument("--out", help="JSON file for the model's figures")
    a = parser.parse_args()
    clock = time.thread_time if a.cpu_time else time.perf_counter
    torch.set_num_threads(1 if a.cpu_time else a.threads)
    torch.manual_seed(0)
    ops = cpu.table(0)
    print(f"{ops.device.arch}, {ops.device.num_cores} threads, {a.dtype}")
    if a.dtype in ops.packers:
        ops = dataclasses.replace(ops, pack_linear=ops.packers[a.dtype])
    dtype = DTYPES.get(a.dtype, torch.bfloat16)
    if a.what == "linear":
        bench_linear(ops, ops.pack_linear, dtype, a.budget, clock)
    else:
        bench_model(ops, dtype, max(a.budget, 1.0), clock, a.out)


if __name__ == "__main__":
    main()
