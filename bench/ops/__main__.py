"""How fast each op of a device table is.

    python -m bench.ops                                on the best device here
    python -m bench.ops --device cpu --shapes demo --out ops.json
    python -m bench.ops --op attention --shapes llama-3-8b qwen3-32b

For each op and shape it prints the median time, FLOP/s and bytes/s, the percent of the device's
roofline (measured in the same run: the largest product and the longest copy, on a CPU also its
instructions and reading), and how many times as long torch takes, and kernels written as in
Triton's tutorials. On accelerators, caches are
flushed before each call, and calls are replays of a recorded graph. The most telling cases come
first; what does not fit into --seconds is left out, and how many that are is said.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from bench.compare import machine
from bench.ops import peak, report
from bench.ops.batches import Limits
from bench.ops.cases import Case, Setting, make_cases
from bench.ops.shapes import SHAPES
from bench.ops.timing import Clock, Roofline, roofline
from xylite import ops as tables
from xylite.ops import Ops

OPS: Final = (
    "linear", "attention", "grouped_linear", "add_rms_norm", "qk_norm_rope_append", "gated_act",
    "sample",
)  # fmt: skip
ROWS: Final = (1, 4, 16, 64, 256, 1024, 4096, 8192)
HOST_ROWS: Final = (1, 4, 16, 64, 256, 1024)
LARGE: Final = ("llama-3-8b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b")
QUIET: Final = 0.08  # cores that others may use while the CPU is measured
PEAK_S: Final = 1.0  # for what a CPU's instructions can do
RIVALS: Final = ("torch", "flex", "tutorial")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.ops", description=(__doc__ or "").splitlines()[0]
    )
    made.add_argument("--device", default="auto", help="as `xylite serve --device`")
    made.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: what suits the device")
    made.add_argument("--op", nargs="+", choices=OPS, default=(), help="default: all")
    made.add_argument("--rows", nargs="+", type=int, help="tokens of a call")
    made.add_argument("--formats", nargs="+", help="weight formats; plain = none. Default: all")
    made.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    made.add_argument("--rivals", nargs="*", choices=RIVALS, help="default: what runs there")
    made.add_argument("--iterations", type=int, default=1, help="drawn per trace and kind of mix")
    made.add_argument("--seconds", type=float, default=600, help="for everything")
    made.add_argument("--figure-seconds", type=float, default=0.2, help="of repeats, per figure")
    made.add_argument("--jobs", type=int, help="processes that compile first (accelerators)")
    made.add_argument("--out", type=Path, help="JSON; the plot goes beside it, with matplotlib")
    made.add_argument("--share", help=argparse.SUPPRESS)  # i/n: compile every n-th case from i
    return made


def setting_of(args: argparse.Namespace, ops: Ops, clock: Clock) -> Setting:
    """What the arguments ask for, with the device's defaults; ValueError names a wrong one."""
    known: dict[str, Callable[..., Any]] = {"plain": ops.pack_linear, **ops.packers}
    unknown = set(args.formats or ()) - known.keys()
    if unknown:
        raise ValueError(f"format {min(unknown)!r} is not there on {ops.name} "
                         f"(there is: {', '.join(known)})")  # fmt: skip
    formats = {n: p for n, p in known.items() if n in (args.formats or known)}
    formats = {"" if n == "plain" else n: p for n, p in formats.items()}
    on_host = ops.device.torch_device.type == "cpu"
    rivals = args.rivals
    if rivals is None:
        rivals = ("torch",) if on_host else RIVALS
    if importlib.util.find_spec("triton") is None:
        rivals = [r for r in rivals if r != "tutorial"]
    if args.shapes == ["tiny"]:
        limits, rows = Limits(3, 24, 48), (1, 5, 20)
    elif on_host:
        limits, rows = Limits(16, 512, 2048), HOST_ROWS
    else:
        limits, rows = Limits(64, 4096, 8192), ROWS
    return Setting(
        ops=ops,
        clock=clock,
        dtype=getattr(torch, args.dtype),
        formats=formats,
        rows=args.rows or rows,
        limits=limits,
        rivals=frozenset(rivals),
        tune=not on_host,
        iterations=args.iterations,
    )


def measure(case: Case, setting: Setting, roof: Roofline) -> dict[str, Any]:
    """One row: ours, then each rival; what fails is said in its place."""
    row: dict[str, Any] = {
        "op": case.op, "model": case.model, "name": case.name, "format": case.form,
        "rows": case.rows, "rivals": {},
    }  # fmt: skip
    clock = setting.clock
    try:
        made = case.prepare()
        ours = clock.time(made.run)
    except Exception as e:  # noqa: BLE001 - of one case, so that the others are measured
        return row | {"error": _first_line(e)}
    least = roof.seconds(made.flops, made.num_bytes, case.form)
    row |= {
        "seconds": ours.median, "least_seconds": ours.least, "repeats": ours.repeats,
        "replayed": ours.replayed, "flops": made.flops, "bytes": made.num_bytes,
        "roofline_percent": 100 * least / ours.median,
    }  # fmt: skip
    for name, make in made.rivals.items():
        try:
            timing = clock.time(make(), replay=not made.waits)
            row["rivals"][name] = {"seconds": timing.median, "replayed": timing.replayed}
        except Exception as e:  # noqa: BLE001 - a rival that does not run here is no rival
            row["rivals"][name] = {"error": _first_line(e)}
    return row


def _first_line(e: BaseException) -> str:
    return f"{type(e).__name__}: {e}".splitlines()[0][:200]


def warm(cases: Iterable[Case], deadline: float) -> None:
    """Run every case once, so that what it compiles lies in the compiler's cache."""
    for case in cases:
        if time.monotonic() > deadline:
            return
        try:
            made = case.prepare()
            made.run()
            for make in made.rivals.values():
                make()()
        except Exception as e:  # noqa: BLE001 - it is measured later, and said then
            print(f"{case.op} {case.name}: {_first_line(e)}", file=sys.stderr)


def compile_first(argv: Sequence[str], jobs: int, deadline: float) -> None:
    """Processes that run a share of the cases each; kernels compile side by side that way."""
    # One thread each: they only wait for compilers.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.ops", *argv, "--share", f"{i}/{jobs}"],
            cwd=report.ROOT, env=environment,
        )
        for i in range(jobs)
    ]  # fmt: skip
    for process in running:
        try:
            process.wait(max(deadline - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run(args: argparse.Namespace, ops: Ops, argv: Sequence[str]) -> dict[str, Any]:
    """Measure what the arguments ask for; the result as it is written. Prints as it goes."""
    began = time.monotonic()
    end = began + args.seconds
    on_host = ops.device.torch_device.type == "cpu"
    torch.manual_seed(0)
    clock = Clock(ops.device.torch_device, args.figure_seconds)
    names = args.shapes or (("demo",) if on_host else LARGE)
    setting = setting_of(args, ops, clock)
    cases = make_cases([SHAPES[name] for name in names], setting, args.op)
    if args.share:
        first, step = map(int, args.share.split("/"))
        setting.clock.budget_s = 0.0
        warm(cases[first::step], end)
        return {}
    jobs = args.jobs if args.jobs is not None else 0 if on_host else min(8, os.cpu_count() or 1)
    if jobs:
        compile_first(
            [*argv, "--seconds", str(0.5 * args.seconds)], jobs, began + 0.5 * args.seconds
        )
    watch = machine.Watch() if on_host and sys.platform == "linux" else None
    roof = roofline(ops, clock, setting.dtype, {"": ops.pack_linear, **setting.formats})
    if (own := peak.instructions_of(ops)) is not None:
        roof = roof.or_more(own.measure(args.dtype, PEAK_S).only(roof.flops))
    peaks = ", ".join(f"{f or args.dtype} {v / 1e9:,.0f}" for f, v in roof.flops.items())
    print(
        f"{ops.device.arch}, {ops.device.num_cores} cores, {args.dtype}: at most {peaks} GFLOP/s, "
        f"{roof.bandwidth / 1e9:,.0f} GB/s"
    )
    print(report.HEADER, flush=True)
    rows: list[dict[str, Any]] = []
    for case in cases:
        if time.monotonic() > end:
            break
        rows.append(measure(case, setting, roof))
        print(report.line(rows[-1]), flush=True)
    left_out = len(cases) - len(rows)
    if left_out:
        print(f"{left_out} of {len(cases)} cases did not fit into {args.seconds:g} s")
    others = watch.others() if watch else 0.0
    if others > QUIET:
        print(f"other processes used {others:.2f} cores meanwhile: these figures are disturbed")
    return {
        **report.about(ops, args.dtype, ["python", "-m", "bench.ops", *argv]),
        "limits": dataclasses.asdict(setting.limits),
        "roofline": report.of_roofline(roof),
        "rows": rows,
        "left_out": left_out,
        "others": others,
        "seconds": round(time.monotonic() - began, 1),
    }


def main(argv: Sequence[str] | None = None, ops: Ops | None = None) -> int:
    """0; 1 if an op of ours failed; 2 if an argument is wrong. ops: instead of --device's."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(words)
    table = tables.load(args.device) if ops is None else ops
    try:
        with torch.inference_mode():
            result = run(args, table, words)
    except ValueError as e:
        print(f"bench.ops: {e}", file=sys.stderr)
        return 2
    if args.share:
        return 0
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(report.plot(result, args.out.with_suffix(".svg")), file=sys.stderr)
    return int(any("error" in row for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
