"""xylite and other engines by turns, on the same machine, weights and workloads.

    python -m bench.compare [--only start|offline|online|speculation] [--repeats 3] [--quick]
        [--variant auto|float32|int8 ...] [--transformers-python PYTHON]
        [--vllm-python PYTHON] [--llama-server FILE --llama-gguf PRECISION=FILE ...]
        [--ct2-python PYTHON --ct2-model DIR] [--speculative-config JSON ...]

Prints medians, and ratios of medians with the least and greatest ratio of a repeat; writes
everything as JSON to bench/results/. Engines that are not there are left out, and it is said why.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.compare import machine, offline, peers, plan, report
from bench.compare.online import LOADS, Load
from bench.compare.peers import ROOT, Engine

RESULTS: Final = ROOT / "bench" / "results"
PARTS: Final = ("start", "offline", "online", "speculation")


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 if an engine failed; 2 if the machine is not quiet or there is nothing to compare."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(words)
    with tempfile.TemporaryDirectory(prefix="xylite-compare-") as folder:
        model = args.model or _demo_model(Path(folder) / "smollm2-135m-instruct")
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        try:
            return _compare(args, words, model, logs)
        except plan.Disturbed as e:
            print(f"bench.compare: {e}", file=sys.stderr)
            return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare",
        description="Measures xylite and other engines by turns, and prints ratios of medians.",
    )
    add = parser.add_argument
    add("--only", action="append", choices=PARTS, help="this part only; may be repeated")
    add("--repeats", type=int, default=3)
    add("--quick", action="store_true", help="one repeat, fewer requests and tokens")
    add("--variant", action="append", choices=peers.VARIANTS, help="of xylite; default: all")
    add("--model", type=Path, help="directory of the weights; default: the demo model")
    add("--transformers-python", type=Path, default=Path(sys.executable))
    add("--transformers-dtype", action="append", help="default: bfloat16")
    add("--vllm-python", type=Path)
    add("--vllm-args", action="append", help="words for its server; repeated: one engine for each")
    add("--llama-server", type=Path)
    add("--llama-gguf", action="append", default=[], metavar="PRECISION=FILE")
    add("--llama-args", default="-fa off", help="words for llama.cpp")
    add("--ct2-python", type=Path, help="where ctranslate2 is; with --ct2-model")
    add("--ct2-model", type=Path, help="directory that its converter made of the model")
    add("--ct2-type", action="append", help="default: float32 and int8_float32")
    add("--no-peers", action="store_true", help="xylite's variants only")
    add("--threads", type=int, default=0, help="0: all cores")
    add("--prefill", type=int, nargs="*", default=[512, 2048], metavar="TOKENS")
    add("--decode", type=int, nargs="*", default=[1, 8, 32], metavar="BATCH")
    add("--new-tokens", type=int, help="per sequence; default: 128 offline, the trace's online")
    add(
        "--speculative-config",
        action="append",
        type=_drafter,
        metavar="JSON",
        help="default: ngram",
    )
    add("--workloads", nargs="*", choices=plan.WORKLOADS, default=plan.WORKLOADS, help="of drafts")
    add("--at-once", type=int, nargs="*", default=[1, 8, 32], help="requests, with drafts")
    add("--requests", type=int, help="per online workload; default: 8, 40, 12, 64")
    add("--noise", type=float, default=0.08, help="cores others may use in a clean run")
    add("--tries", type=int, default=3, help="runs at most to get a clean one")
    add("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine")
    add("--allow-noise", action="store_true")
    add("--logs", type=Path, help="folder for the engines' logs; default: a temporary one")
    add("--output", type=Path, help="JSON file; default: by date in bench/results")
    return parser


def _drafter(text: str) -> Mapping[str, Any]:
    """A --speculative-config; ValueError makes it a usage error."""
    config = json.loads(text)
    if not isinstance(config, dict):
        raise ValueError(text)
    return config


def _demo_model(path: Path) -> Path:
    """Made in a process of its own, so that this one stays small."""
    subprocess.run([sys.executable, "-m", "bench.model_dir", str(path)], check=True, cwd=ROOT)
    return path


def engines(args: argparse.Namespace, model: Path) -> list[Engine]:
    """xylite's variants and the peers that were named, available or not."""
    found = [peers.xylite(v, model, args.threads) for v in args.variant or peers.VARIANTS]
    if "speculation" in (args.only or PARTS):
        configs = args.speculative_config or [{"method": "ngram"}]
        named = [e for e in found if args.variant or e.name == "xylite auto"]
        found += [peers.drafting(plain, config) for plain in named for config in configs]
    if args.no_peers:
        return found
    dtypes = args.transformers_dtype or ["bfloat16"]
    found += [peers.transformers(args.transformers_python, dtype) for dtype in dtypes]
    if args.vllm_python is not None:
        for words in args.vllm_args or [""]:
            options = shlex.split(words)
            found.append(peers.vllm(args.vllm_python, model, args.threads, options))
    if args.ct2_python is not None:
        if args.ct2_model is None:
            raise SystemExit("--ct2-python needs --ct2-model")
        for compute_type in args.ct2_type or ["float32", "int8_float32"]:
            found.append(peers.ctranslate2(args.ct2_python, args.ct2_model, compute_type))
    for pair in args.llama_gguf:
        precision, sign, file = pair.partition("=")
        if not sign or args.llama_server is None:
            raise SystemExit("--llama-gguf takes PRECISION=FILE and needs --llama-server")
        found.append(
            peers.llama_cpp(args.llama_server, Path(file), precision, args.threads, args.llama_args)
        )
    return found


def _compare(args: argparse.Namespace, words: list[str], model: Path, logs: Path) -> int:
    parts = args.only or PARTS
    recorder = plan.Recorder(args.noise, args.tries, args.patience, args.allow_noise)
    recorder.require_quiet()
    setting = plan.Setting(
        model=model,
        threads=args.threads,
        logs=logs,
        repeats=1 if args.quick else args.repeats,
        vocab_size=json.loads((model / "config.json").read_text())["vocab_size"],
        recorder=recorder,
    )
    named = engines(args, model)
    lacking = _check(setting, named, parts)
    for name, why in lacking.items():
        print(f"left out: {name}: {why}", file=sys.stderr)
    ready = [e for e in named if e.name not in lacking]
    if not ready:
        return 2
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": "python -m bench.compare " + shlex.join(map(_without_folder, words)),
        "quick": args.quick,
        "model": model.name,
        "threads": args.threads or machine.describe()["cores"],
        "machine": machine.describe(),
        "commit": machine.commit(ROOT),
        "engines": [_described(e) for e in ready],
        "left_out": lacking,
        "versions": {},
        "failures": recorder.failures,
        "samples": recorder.samples,
    }
    path = args.output or RESULTS / time.strftime("compare-%Y%m%d-%H%M%S.json", time.gmtime())
    try:
        _measure(args, setting, ready, parts, result)
    finally:
        if recorder.samples:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=1) + "\n")
            print(f"\n{report.text(result)}\n\nwritten to {path}")
    return 1 if recorder.failures else 0


def _check(setting: plan.Setting, named: Sequence[Engine], parts: Sequence[str]) -> dict[str, str]:
    """Engines that cannot run and why. Each is started once, so that what a first start makes
    (compiled kernels, tuned tables, the file cache) is there for all."""
    lacking: dict[str, str] = {}
    for engine in named:
        why = engine.available()
        part = "offline" if engine.baseline is None else "speculation"
        if why is None and part in parts and (engine.child or engine.tools):
            why = plan.check_child(setting, engine)
        if why is None and {"online", "start"} & set(parts) and engine.server is not None:
            why = plan.check_start(setting, engine)
        if why is not None:
            lacking[engine.name] = why
    return lacking


def _measure(
    args: argparse.Namespace,
    setting: plan.Setting,
    ready: Sequence[Engine],
    parts: Sequence[str],
    result: dict[str, Any],
) -> None:
    new = args.new_tokens
    servers = [e for e in ready if e.server is not None]
    if "start" in parts:
        for repeat in range(setting.repeats):
            plan.run_start(setting, servers, repeat)
    if "offline" in parts:
        cases = offline.cases(args.prefill, args.decode, new or (32 if args.quick else 128))
        able = [e for e in ready if e.baseline is None and (e.child or e.tools)]
        result["versions"] |= plan.run_offline(setting, able, cases)
    if "online" in parts:
        loads = [_fewer(load, args) for load in LOADS]
        plan.run_online(setting, servers, loads, new)
    if "speculation" in parts:
        cases = plan.speculation_cases(
            args.workloads, args.at_once, new or (32 if args.quick else 96), args.requests
        )
        by_name = {e.name: e for e in ready}
        for engine in (e for e in ready if e.baseline in by_name):
            assert engine.baseline is not None
            told = plan.run_speculation(setting, by_name[engine.baseline], engine, cases)
            result["versions"][engine.name] = told


def _fewer(load: Load, args: argparse.Namespace) -> Load:
    limit = args.requests or load.limit
    if args.quick and not args.requests:
        limit = max(load.concurrency, load.limit // 4)
    return Load(load.trace, load.concurrency, limit)


def _described(engine: Engine) -> Mapping[str, Any]:
    """How an engine is run, for the result; folders of this machine are left out."""
    return {
        "name": engine.name,
        "precision": engine.precision,
        "is_ours": engine.is_ours,
        "baseline": engine.baseline,
        "settings": dict(engine.settings),
        "server": " ".join(map(_without_folder, engine.server or ())),
        "env": {
            name: ":".join(map(_without_folder, value.split(":")))
            for name, value in engine.env.items()
        },
    }


def _without_folder(word: str) -> str:
    """A path's last name; other words as they are."""
    head, sign, tail = word.rpartition("=")
    return f"{head}{sign}{Path(tail).name}" if "/" in tail else word


if __name__ == "__main__":
    sys.exit(main())
