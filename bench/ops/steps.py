"""Whole steps of a model with random weights: how fast they are, how fast they could be on this
machine, and where the time goes, op by op.

    python -m bench.ops.steps --device cpu --shape demo --format plain int8
    python -m bench.ops.steps --device cpu --out bench/results/steps-cpu.json --format plain int8

Times are the least of many runs. The least that each op can take follows from its work and traffic
(bench/ops/work.py) and from the limits of the machine, which are measured by turns with the step:
on a CPU its instructions on registers, and reading of memory and caches (bench/ops/peak.py);
elsewhere, as in bench.ops. What a step can take at least is the sum over its ops.

A whole step is run as the engine does it, as a replay. Ops are timed one by one, with
Python's call, so that their sum may be more than the whole.

On a busy machine take --cpu-time: one thread, its processor time instead of the clock.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch

from bench.ops import batches, peak, report, work
from bench.ops.batches import Chunk
from bench.ops.cases import sample_batch
from bench.ops.shapes import SHAPES, Shape
from bench.ops.timing import Clock, Roofline, roofline
from bench.ops.work import Work
from xylite import models
from xylite import ops as tables
from xylite.models import layers, weights
from xylite.ops import Batch, KVCache, Ops
from xylite.runtime.executor import LEAST_SPARED

T = TypeVar("T")
Seconds = Callable[[], float]
Step = Callable[["Ops | None"], None]
STEPS: Final = {
    "prefill 512": (Chunk(0, 512),),
    "prefill 2048": (Chunk(0, 2048),),
    "decode at 1": (Chunk(192, 1),),
    "decode at 8": (Chunk(192, 1),) * 8,
    "decode at 32": (Chunk(192, 1),) * 32,
    "mixed 8 + 56": (*(Chunk(192, 1),) * 8, Chunk(0, 56)),
}
TIMED: Final = ("embed", "linear", "add_rms_norm", "qk_norm_rope_append", "attention", "sample")
PLAIN: Final = "plain"  # the dtype itself, among formats
TURNS: Final = 5
LIMITS_S: Final = 0.15  # of one measurement of the machine's limits
FIGURE_S: Final = 0.05  # of a product that stands for a limit


class Model:
    """A model of a shape with random weights, and KV for any of STEPS."""

    def __init__(self, ops: Ops, shape: Shape, dtype: torch.dtype):
        self.ops, self.shape = ops, shape
        self.family, self.spec = models.describe(shape.llama_config())
        self.params = weights.random_params(self.spec, self.family, ops, dtype)
        size, place = ops.device.block_size, ops.device.torch_device
        most = max(sum(-(-c.kv_len // size) for c in chunks) for chunks in STEPS.values())
        self.kv = layers.make_kv(self.spec, most, size, dtype=dtype, device=place)

    def forward(self, kv: KVCache, batch: Batch) -> tuple[torch.Tensor, KVCache]:
        """As the executor's: nothing in it depends on anything but its arguments."""
        return self.family.forward(self.params, kv, batch, self.spec, self.ops)

    def step_of(self, chunks: Sequence[Chunk]) -> Step:
        """One iteration, up to the drawn ids; with other ops, those are called one by one."""
        ops, place = self.ops, self.ops.device.torch_device
        table = batches.token_table(chunks, ops.device.block_size, np.random.default_rng(0))
        batch = batches.on_device(table, self.shape, ops.device, ops.device.block_size)
        rows = table.logit_rows
        if ops.last_rows is not None and len(table.tokens) - len(chunks) >= LEAST_SPARED:
            batch = dataclasses.replace(batch, num_last=len(chunks))
            rows = table.seq_of[rows]
        last = torch.from_numpy(rows).long().to(place)
        greedy = sample_batch(len(last), place, hot=False, filtered=False)

        def step(other: Ops | None = None) -> None:
            with_ops = other or ops
            if other is not None:
                hidden, _ = self.family.forward(self.params, self.kv, batch, self.spec, other)
            elif ops.replayed is not None:
                hidden, _ = ops.replayed(self.forward, self.kv, batch)
            else:
                hidden, _ = self.forward(self.kv, batch)
            logits = self.family.logits(self.params, hidden[last], self.spec, with_ops)
            with_ops.sample(logits, greedy, None, None)
            ops.device.synchronize()

        return step


def watched(ops: Ops, seen: Callable[[str, str, Any, Any, Any, float], None], now: Seconds) -> Ops:
    """The same table; `seen` is told of each call: name, key (linear's has its shape), arguments,
    result, seconds."""

    def wrap(name: str) -> Callable[..., Any]:
        inner = getattr(ops, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            ops.device.synchronize()
            begin = now()
            out = inner(*args, **kwargs)
            ops.device.synchronize()
            took = now() - begin
            key = f"{name} {out.shape[1]} of {args[0].shape[1]}" if name == "linear" else name
            seen(name, key, args, kwargs, out, took)
            return out

        return call

    return dataclasses.replace(ops, **{name: wrap(name) for name in TIMED})


def parts_of(step: Step, ops: Ops, now: Seconds) -> dict[str, float]:
    """Seconds of one step by op."""
    spent: dict[str, float] = {}

    def seen(_name: str, key: str, _args: Any, _kwargs: Any, _out: Any, took: float) -> None:
        spent[key] = spent.get(key, 0.0) + took

    step(watched(ops, seen, now))
    return spent


def work_of(
    step: Step, ops: Ops, chunks: Sequence[Chunk], vocab: int, form: str
) -> dict[str, Work]:
    """What one step must do by op, under the keys of `parts_of`."""
    found: dict[str, Work] = {}

    def seen(name: str, key: str, args: Any, kwargs: Any, out: Any, _took: float) -> None:
        one = work.of_call(name, args, kwargs, out, chunks=chunks, vocab=vocab, form=form)
        found[key] = found[key] + one if key in found else one

    step(watched(ops, seen, time.perf_counter))
    return found


def limits_of(ops: Ops, dtype: torch.dtype, form: str) -> Callable[[], Roofline]:
    """What measures the machine's limits."""
    own = peak.instructions_of(ops)
    name = str(dtype).removeprefix("torch.")
    if own is not None and form in own.measure(name, LIMITS_S).flops:
        return lambda: own.measure(name, LIMITS_S)
    packers = {"": ops.pack_linear} | ({form: ops.packers[form]} if form else {})
    base = roofline(ops, Clock(ops.device.torch_device, FIGURE_S), dtype, packers)
    return (lambda: base) if own is None else (lambda: base.or_more(own.measure(name, LIMITS_S)))


def measure(
    ops: Ops,
    shape: Shape,
    dtype: torch.dtype,
    form: str = "",
    *,
    budget_s: float,
    now: Seconds = time.perf_counter,
) -> dict[str, dict[str, Any]]:
    """Figures of each step, as they are written. Prints as it goes.

    form      a weight format of the table, "" = the dtype
    budget_s  about how long a step is run
    """
    packed = dataclasses.replace(ops, pack_linear=ops.packers[form]) if form else ops
    limits = limits_of(ops, dtype, form)
    results: dict[str, dict[str, Any]] = {}
    with torch.inference_mode():
        model = Model(packed, shape, dtype)
        for name, chunks in STEPS.items():
            step = model.step_of(chunks)
            wanted = work_of(step, packed, chunks, shape.vocab, form)
            step(None)
            seconds, parts, roof = float("inf"), dict[str, float](), limits()
            for _ in range(TURNS):
                roof = roof.or_more(limits())
                share = budget_s / TURNS / 2
                seconds = min(seconds, *_repeated(partial(_timed, step, now), share))
                for spent in _repeated(partial(parts_of, step, packed, now), share):
                    parts = {k: min(v, parts.get(k, v)) for k, v in spent.items()}
            num_tokens = sum(c.tokens for c in chunks)
            results[name] = figures(num_tokens, seconds, parts, wanted, roof)
            print(line(name, results[name]), flush=True)
    return results


def _timed(step: Step, now: Seconds) -> float:
    begin = now()
    step(None)
    return now() - begin


def _repeated(f: Callable[[], T], budget_s: float) -> list[T]:
    end = time.perf_counter() + budget_s
    found = [f()]
    while time.perf_counter() < end:
        found.append(f())
    return found


def figures(
    num_tokens: int,
    seconds: float,
    parts: Mapping[str, float],
    wanted: Mapping[str, Work],
    roof: Roofline,
) -> dict[str, Any]:
    """One step: its time, the least possible, and the same of each op."""
    least = {key: one.seconds(roof) for key, one in wanted.items()}
    possible = sum(least.values())
    return {
        "tokens": num_tokens,
        "seconds": seconds,
        "tok_s": num_tokens / seconds,
        "least_seconds": possible,
        "most_tok_s": num_tokens / possible,
        "roofline_percent": 100 * possible / seconds,
        "ops_seconds": sum(parts.values()),
        "roofline": report.of_roofline(roof),
        "ops": {
            key: {
                "seconds": parts[key],
                "calls": one.calls,
                "flops": one.flops,
                "memory_bytes": one.memory_bytes,
                "cached_bytes": one.cached_bytes,
                "least_seconds": least[key],
                "roofline_percent": 100 * least[key] / parts[key],
            }
            for key, one in wanted.items()
        },
    }


def line(name: str, found: Mapping[str, Any]) -> str:
    """A step in words: in brackets, percent of what the machine allows."""
    ops = ", ".join(
        f"{key} {op['seconds'] * 1e3:.2f} ({op['roofline_percent']:.0f}%)"
        for key, op in found["ops"].items()
    )
    return (
        f"{name:14s} {found['tok_s']:9.1f} tok/s {found['seconds'] * 1e3:9.2f} ms "
        f"({found['roofline_percent']:.0f}% of {found['most_tok_s']:,.0f} tok/s)   "
        f"ms by op, together {found['ops_seconds'] * 1e3:.2f}: {ops}"
    )


def main(argv: Sequence[str] | None = None, ops: Ops | None = None) -> None:
    """Print the figures; --out writes them too. ops: instead of --device's."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.ops.steps",
        description="Times whole steps and each of their ops, against what the machine allows.",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument(
        "--format", nargs="+", default=[PLAIN], help="weight formats, such as int8; plain = none"
    )
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--seconds", type=float, default=3.0, help="per step")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, processor time")
    parser.add_argument("--out", type=Path, help="JSON file")
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(words)
    if args.cpu_time or args.threads:
        torch.set_num_threads(1 if args.cpu_time else args.threads)
    table = tables.load(args.device) if ops is None else ops
    known = {PLAIN, *table.packers}
    if unknown := set(args.format) - known:
        parser.error(f"format {min(unknown)!r} is not there on {table.name} "
                     f"(there is: {', '.join(sorted(known))})")  # fmt: skip
    now = time.thread_time if args.cpu_time else time.perf_counter
    shape, dtype = SHAPES[args.shape], getattr(torch, args.dtype)
    formats: dict[str, Any] = {}
    for name in args.format:
        print(f"{table.device.arch}, {table.device.num_cores} cores, {args.dtype}, {name}")
        form = "" if name == PLAIN else name
        formats[name] = measure(table, shape, dtype, form, budget_s=args.seconds, now=now)
    if args.out:
        command = ["python", "-m", "bench.ops.steps", *words]
        about = report.about(table, args.dtype, command)
        result = {**about, "model": shape.name, "formats": formats}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
