"""Whole steps of a model with random weights: tok/s, and where the time goes, op by op.

    python -m bench.ops.steps --device cpu --shape demo --format int8

Times are the least of many runs. On a busy machine take --cpu-time: one thread, its processor time
instead of the clock.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bench.ops import batches, report
from bench.ops.batches import Chunk
from bench.ops.shapes import SHAPES, Shape
from xylite import models
from xylite import ops as tables
from xylite.models import layers, weights
from xylite.ops import Batch, Ops

Clock = Callable[[], float]
STEPS: Final = {
    "prefill 512": (Chunk(0, 512),),
    "prefill 2048": (Chunk(0, 2048),),
    "decode at 1": (Chunk(192, 1),),
    "decode at 8": (Chunk(192, 1),) * 8,
    "decode at 32": (Chunk(192, 1),) * 32,
    "mixed 8 + 56": (*(Chunk(192, 1),) * 8, Chunk(0, 56)),
}
TIMED: Final = ("embed", "linear", "add_rms_norm", "qk_norm_rope_append", "attention")


def timed(ops: Ops, spent: dict[str, float], clock: Clock) -> Ops:
    """The same table; each call's time is added under its name, and linear's under its shape."""

    def wrap(name: str) -> Callable[..., Any]:
        inner = getattr(ops, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            ops.device.synchronize()
            begin = clock()
            out = inner(*args, **kwargs)
            ops.device.synchronize()
            key = f"{name} {out.shape[1]} of {args[0].shape[1]}" if name == "linear" else name
            spent[key] = spent.get(key, 0.0) + clock() - begin
            return out

        return call

    return dataclasses.replace(ops, **{name: wrap(name) for name in TIMED})


def measure(
    ops: Ops, shape: Shape, dtype: torch.dtype, budget_s: float, clock: Clock = time.perf_counter
) -> dict[str, dict[str, Any]]:
    """Per step: seconds, tok/s and seconds by op. Prints as it goes."""
    family, spec = models.describe(shape.llama_config())
    params = weights.random_params(spec, family, ops, dtype)
    size, place = ops.device.block_size, ops.device.torch_device
    most = max(sum(-(-c.kv_len // size) for c in chunks) for chunks in STEPS.values())
    kv = layers.make_kv(spec, most, size, dtype=dtype, device=place)

    def run(batch: Batch, last: torch.Tensor, with_ops: Ops) -> None:
        hidden, _ = family.forward(params, kv, batch, spec, with_ops)
        family.logits(params, hidden[last], spec, with_ops).argmax(-1)
        with_ops.device.synchronize()

    results: dict[str, dict[str, Any]] = {}
    for name, chunks in STEPS.items():
        table = batches.token_table(chunks, size, np.random.default_rng(0))
        batch = batches.on_device(table, shape, ops.device, size)
        step = partial(run, batch, torch.from_numpy(table.logit_rows).long().to(place))
        with torch.inference_mode():
            seconds = _least(partial(step, ops), budget_s, clock)
            parts: dict[str, float] = {}
            for _ in range(5):
                spent: dict[str, float] = {}
                step(timed(ops, spent, clock))
                parts = {k: min(v, parts.get(k, v)) for k, v in spent.items()}
        rate = len(table.tokens) / seconds
        results[name] = {"seconds": seconds, "tok_s": rate, "ops": parts}
        told = ", ".join(f"{k} {v * 1e3:.2f}" for k, v in parts.items())
        print(f"{name:14s} {rate:9.1f} tok/s {seconds * 1e3:9.2f} ms   {told}", flush=True)
    return results


def _least(f: Callable[[], Any], budget_s: float, clock: Clock) -> float:
    f()
    least, end = float("inf"), time.perf_counter() + budget_s
    while True:
        start = clock()
        f()
        least = min(least, clock() - start)
        if time.perf_counter() > end:
            return least


def main(argv: Sequence[str] | None = None, ops: Ops | None = None) -> None:
    """Print the figures; --out writes them too."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.ops.steps", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--format", help="a weight format of the table, such as int8")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--seconds", type=float, default=1.0, help="per step")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, processor time")
    parser.add_argument("--out", type=Path, help="JSON file")
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(words)
    if args.cpu_time or args.threads:
        torch.set_num_threads(1 if args.cpu_time else args.threads)
    table = tables.load(args.device) if ops is None else ops
    if args.format:
        table = dataclasses.replace(table, pack_linear=table.packers[args.format])
    clock = time.thread_time if args.cpu_time else time.perf_counter
    print(f"{table.device.arch}, {table.device.num_cores} cores, {args.format or args.dtype}")
    found = measure(table, SHAPES[args.shape], getattr(torch, args.dtype), args.seconds, clock)
    if args.out:
        command = ["python", "-m", "bench.ops.steps", *words]
        result = {**report.about(table, args.dtype, command), "format": args.format, "steps": found}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
