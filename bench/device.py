"""Everything that is to be seen on an accelerator, in one run of less than 8 minutes.

    python -m bench.device --out device.json            on the GPU or NPU here
    python -m bench.device --stand-in --out device.json on the CPU, kernels interpreted, tiny shapes

It checks every Triton kernel against xylite/ops/reference.py on that device, measures each op
(bench/ops), and runs an engine end to end on random weights of a real shape, with and without
recorded graphs. Each part is a process of its own, so that what breaks one does not break the
others; checks are shared among several, because most of their time is compiling. The end is a
summary of one screen. Exit code 1 if a check failed or a part did not come to its end.

Needs Python 3.11 or newer, torch 2.10 or newer with triton 3.6 or newer (or torch-npu with
triton-ascend), and numpy: this is enough for checks and ops. The engine needs msgspec, gguf and
tqdm too; where they are missing, that part says so. Nothing is downloaded. Compiled kernels are
kept in Triton's cache, so a second run is quicker.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
PARTS: Final = ("checks", "ops", "decode")
# Of --seconds, what each part may take; what a part leaves goes to those after it.
SHARES: Final = {"checks": 0.35, "ops": 0.35, "decode": 0.3}
MAX_JOBS: Final = 12
GRACE_S: Final = 60.0  # a part ends by itself; it may finish what it has begun
WORST_SHOWN: Final = 8


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.device", description=(__doc__ or "").splitlines()[0]
    )
    made.add_argument("--device", default="auto", help="cuda:1, npu:0, ...; default: the best here")
    made.add_argument("--stand-in", action="store_true", help="the CPU in a GPU's place, tiny")
    made.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    made.add_argument("--shape", default="llama-3-8b", help="model of the end-to-end run")
    made.add_argument("--seconds", type=float, default=450, help="for everything")
    jobs = min(MAX_JOBS, os.cpu_count() or 1)
    made.add_argument("--jobs", type=int, default=jobs, help="processes that check and compile")
    made.add_argument("--out", type=Path, help="JSON")
    made.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # in its own process
    made.add_argument("--share", default="0/1", help=argparse.SUPPRESS)  # i/n of the checks
    return made


# In the process of a part


def supply_config() -> None:
    """Where msgspec is not installed, give kernels the two functions of xylite.config they use:
    with the settings' structs, that module cannot be imported."""
    if importlib.util.find_spec("msgspec") is not None:
        return
    import xylite

    made: Any = types.ModuleType("xylite.config")
    made.cpu_threads = lambda: os.cpu_count() or 1
    made.cache_dir = lambda: str(Path(tempfile.gettempdir()) / "xylite")
    sys.modules["xylite.config"] = made
    xylite.config = made  # pyright: ignore[reportAttributeAccessIssue] (as an import does)


def load(args: argparse.Namespace) -> Any:
    """The Ops table; before anything else is imported, because it may choose the interpreter."""
    if args.stand_in:
        from tests.kernels_triton.stand_in import stand_in

        return stand_in("cuda", capture=lambda run: run)
    from xylite import ops

    return ops.load(args.device)


def check(args: argparse.Namespace) -> dict[str, Any]:
    """A share of the checks; {"errors": {name: error against what is allowed, or what went wrong}}.

    Results go to the file as they come: a kernel that kills the process leaves those before it.
    """
    table = load(args)
    import torch

    from bench.ops import checks, exact

    dtypes = [torch.float16] if args.stand_in else [torch.bfloat16, torch.float16, torch.float32]
    made = [
        one
        for dtype in dtypes
        for one in checks.make_checks(table, dtype, checks.SMALL if args.stand_in else checks.FULL)
    ]
    first, step = map(int, args.share.split("/"))
    errors: dict[str, float | str] = {}
    deadline = time.monotonic() + args.seconds
    with exact.poisoned(), torch.inference_mode():
        for one in checks.share_of(made, first, step):
            if time.monotonic() > deadline:
                errors[one.name] = "no time was left"
                continue
            errors[one.name] = "the process died"
            _write(args.out, {"errors": errors})
            try:
                errors[one.name] = one.run()
            except Exception as e:  # noqa: BLE001 - of one check, so that the others run
                errors[one.name] = f"{type(e).__name__}: {e}"[:300]
    return {"errors": errors}


def measure_ops(args: argparse.Namespace) -> dict[str, Any]:
    """`bench.ops` as it is, with the time there is."""
    table = load(args)
    from bench.ops import __main__ as bench_ops

    words = ["--device", args.device, "--seconds", str(args.seconds), "--out", str(args.out)]
    if args.stand_in:
        words += ["--shapes", "tiny", "--dtype", "float16", "--figure-seconds", "0"]
        words += ["--rows", "5", "--formats", "plain", "--rivals", "torch", "tutorial"]
    else:
        words += ["--figure-seconds", "0.1", "--jobs", str(args.jobs)]
    bench_ops.main(words, table)
    return json.loads(args.out.read_text())


def run_engine(args: argparse.Namespace) -> dict[str, Any]:
    """Prefill and decode through the engine; see bench/decode.py."""
    table = load(args)
    from bench import decode
    from bench.ops.shapes import SHAPES

    if args.stand_in:
        return decode.measure(table, SHAPES["tiny"], decode.TINY, "float32")
    return decode.measure(table, SHAPES[args.shape], decode.FULL, "bfloat16")


# In the process that was called


def run_part(name: str, args: argparse.Namespace, seconds: float, folder: Path) -> dict[str, Any]:
    """The part's result, or {"error": why there is none}; "seconds" in either case."""
    began = time.monotonic()
    jobs = args.jobs if name == "checks" and not args.stand_in else 1
    files = [folder / f"{name}-{i}.json" for i in range(jobs)]
    running = [
        subprocess.Popen(_command(name, args, seconds, file, f"{i}/{jobs}"), cwd=ROOT)
        for i, file in enumerate(files)
    ]
    result: dict[str, Any] = {}
    for process, file in zip(running, files, strict=True):
        try:
            code = process.wait(max(began + seconds + GRACE_S - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if file.exists():
            found = json.loads(file.read_text())
            errors = result.get("errors", {}) | found.get("errors", {})
            result |= found | ({"errors": errors} if errors else {})
        if code:
            result["error"] = f"its process ended with {code}, see above"
    return result | {"seconds": round(time.monotonic() - began, 1)}


def _command(
    name: str, args: argparse.Namespace, seconds: float, file: Path, share: str
) -> list[str]:
    words = [sys.executable, "-m", "bench.device", "--part", name, "--out", str(file)]
    words += ["--device", args.device, "--shape", args.shape, "--jobs", str(args.jobs)]
    words += ["--seconds", f"{seconds:.0f}", "--share", share]
    return words + ["--stand-in"] * args.stand_in


def _write(path: Path, content: Any) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def failures(result: dict[str, Any]) -> list[str]:
    """What went wrong, one line each: parts, checks, ops of ours."""
    found = [f"{name}: {part['error']}" for name, part in result.items() if "error" in part]
    for name, error in result.get("checks", {}).get("errors", {}).items():
        if isinstance(error, str):
            found.append(f"check {name}: {error}")
        elif not error <= 1:
            found.append(f"check {name}: {error:.3g} times the error that is allowed")
    found += [
        f"op {row['op']} {row['model']} {row['name']}: {row['error']}"
        for row in result.get("ops", {}).get("rows", ())
        if "error" in row
    ]
    decode = result.get("decode", {})
    if not decode.get("same_ids", True):
        found.append("decode: ids with graphs differ from those without")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 if something failed."""
    args = parser().parse_args(argv)
    supply_config()
    if args.part:
        run = {"checks": check, "ops": measure_ops, "decode": run_engine}[args.part]
        _write(args.out, run(args))
        return 0
    began = time.monotonic()
    result: dict[str, Any] = {}
    left = dict(SHARES)
    with tempfile.TemporaryDirectory(prefix="xylite-device-") as folder:
        for name in args.parts:
            rest = args.seconds - (time.monotonic() - began)
            seconds = rest * left[name] / sum(left[p] for p in args.parts if p not in result)
            print(f"== {name}, at most {seconds:.0f} s", flush=True)
            result[name] = run_part(name, args, seconds, Path(folder))
    from bench.device_summary import summary

    failed = failures(result)
    print(summary(result))
    for text in failed[:WORST_SHOWN]:
        print(f"FAILED {text}")
    if len(failed) > WORST_SHOWN:
        print(f"FAILED {len(failed) - WORST_SHOWN} more")
    seconds = round(time.monotonic() - began, 1)
    print(f"{'FAILED' if failed else 'ok'} after {seconds:.0f} s")
    if args.out:
        _write(args.out, {"failed": failed, "total_seconds": seconds, **result})
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
