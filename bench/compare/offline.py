"""Prefill and decode without HTTP: a fresh process for each engine and repeat."""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.compare.peers import ROOT, Engine

CONTEXT: Final = 128
WARM_UP: Final[Mapping[str, int]] = {"decode": 1, "context": 16, "new": 4}


class EngineFailed(Exception):
    """A process of an engine ended or answered what it should not; holds the end of its log."""


@dataclass(frozen=True)
class Case:
    """One offline workload; `asked` is what the child's protocol calls it."""

    name: str
    asked: Mapping[str, Any]

    def warm_up(self) -> dict[str, Any]:
        """The same shapes with few new tokens."""
        return {k: min(v, 4) if k == "new" else v for k, v in self.asked.items()}


def cases(prefills: list[int], batches: list[int], new: int) -> list[Case]:
    """Prompts of these lengths alone, and batches that decode `new` tokens."""
    return [
        *(Case(f"prefill {n}", {"prefill": n}) for n in prefills),
        *(Case(f"decode {b}", {"decode": b, "context": CONTEXT, "new": new + 1}) for b in batches),
    ]


Figures = dict[str, float]
Measure = Callable[[Mapping[str, Any]], Figures]


@contextmanager
def session(
    engine: Engine, model: Path, threads: int, log: Path
) -> Iterator[tuple[Measure, dict[str, str]]]:
    """A function from a case to its figures, and versions; each case is warmed up by a first call
    that nobody counts (the caller's business). The process ends with the block."""
    env = engine.environment(threads)
    if engine.child is None:
        yield (lambda asked: _tool(engine, asked, env)), _tool_version(engine, env)
        return
    weights = str(engine.weights or model)
    start = {"model": weights, "settings": dict(engine.settings), "threads": threads}
    with log.open("ab") as errors:
        child = subprocess.Popen(
            [*engine.child, json.dumps(start)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env=env,
        )
        try:
            versions = _answer(child, engine, log)["ready"]

            def measure(asked: Mapping[str, Any]) -> Figures:
                assert child.stdin is not None
                try:
                    child.stdin.write(json.dumps(dict(asked)) + "\n")
                    child.stdin.flush()
                except BrokenPipeError:
                    raise EngineFailed(f"{engine.name} ended:\n{tail(log)}") from None
                return _answer(child, engine, log)

            yield measure, versions
        finally:
            _end(child)


def _answer(child: "subprocess.Popen[str]", engine: Engine, log: Path) -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise EngineFailed(f"{engine.name} ended:\n{tail(log)}")
    return json.loads(line)


def _end(child: "subprocess.Popen[str]", patience_s: float = 20.0) -> None:
    """End of its input ends a child; one that does not go is killed."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.close()
    except BrokenPipeError:
        pass
    try:
        child.wait(patience_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    child.stdout.close()


def tail(log: Path, lines: int = 8) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


# llama.cpp's own tools


def _tool(engine: Engine, asked: Mapping[str, int], env: dict[str, str]) -> Figures:
    """Tokens per second as llama-bench (prefill) or llama-batched-bench (decode) has it."""
    assert engine.tools is not None
    common = ("-m", str(engine.weights), *engine.options)
    if "prefill" in asked:
        words = ("-p", str(asked["prefill"]), "-n", "0", "-r", "1", "-o", "json")
        printed = _run([str(engine.tools / "llama-bench"), *common, *words], engine, env)
        return {"tok_s": json.loads(printed)[0]["avg_ts"]}
    batch, context, new = asked["decode"], asked["context"], asked["new"] - 1
    threads = engine.options[engine.options.index("-t") + 1]
    words = (
        *("-tb", threads, "-c", str(batch * (context + new) + 256)),
        *("-npp", str(context), "-ntg", str(new), "-npl", str(batch), "--output-format", "jsonl"),
    )
    printed = _run([str(engine.tools / "llama-batched-bench"), *common, *words], engine, env)
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return {"tok_s": rows[-1]["speed_tg"]}


def _tool_version(engine: Engine, env: dict[str, str]) -> dict[str, str]:
    """llama.cpp's build as its server says it: "version: NUMBER (COMMIT)"."""
    assert engine.server is not None
    done = subprocess.run(
        [engine.server[0], "--version"], capture_output=True, text=True, env=env, check=False
    )
    lines = (done.stdout + done.stderr).splitlines()
    told = next((x for x in lines if x.startswith("version")), "version: unknown")
    return {"llama.cpp": told.partition(":")[2].strip()}


def _run(command: list[str], engine: Engine, env: dict[str, str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise EngineFailed(f"{engine.name}: {Path(command[0]).name}: {done.stderr[-1500:]}")
    return done.stdout
