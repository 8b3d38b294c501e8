"""The performance tables and plot of README.md and bench/README.md, from results in bench/results.

    python -m bench.compare.render [RESULT ...] [--steps FILE] [--readme README.md ...]
        [--plot FILE.svg]

Without a result it takes all full ones of bench/results by date. Parts that were measured in
several runs are put together: what an engine did in a workload comes from the last run that has
it, and each run is named below the tables. Runs on different machines or models do not mix. The
tables go between the lines `<!-- performance -->` and `<!-- /performance -->`; those of what the
machine could do at most, for which bench.ops.steps has measured, between `<!-- possible -->` and
`<!-- /possible -->`.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.compare import plot, possible, report
from bench.compare.peers import ROOT
from bench.compare.possible import ALIKE, between

RESULTS: Final = ROOT / "bench" / "results"
STEPS: Final = RESULTS / "steps-cpu.json"
READMES: Final = (ROOT / "README.md", ROOT / "bench" / "README.md")
PLOT: Final = RESULTS / "performance.svg"
BEGIN, END = "<!-- performance -->\n", "<!-- /performance -->"
_PLACES: Final = ((BEGIN, END), (possible.BEGIN, possible.END))


def full_results(folder: Path = RESULTS) -> list[Path]:
    """The full results of a folder by date; quick ones do not count."""
    dated: list[tuple[str, Path]] = []
    for path in folder.glob("compare-*.json"):
        result = json.loads(path.read_text())
        if not result["quick"]:
            dated.append((result["date"], path))
    return [path for _, path in sorted(dated)]


def merged(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result of several, later ones first in line; ValueError if they do not belong together.

    `runs` has, for each of them that gave something, its own fields and the samples it gave.
    """
    first = results[0]
    for other in results[1:]:
        for name in ("model", "threads"):
            if other.get(name) != first.get(name):
                raise ValueError(f"{name} differs: {first.get(name)} and {other.get(name)}")
        for name in ALIKE:
            ours, theirs = first["machine"].get(name), other["machine"].get(name)
            if ours != theirs:
                raise ValueError(f"the machines differ in {name}: {ours} and {theirs}")
    last = {(s["engine"], s["workload"]): i for i, r in enumerate(results) for s in r["samples"]}
    given = [
        [s for s in r["samples"] if last[s["engine"], s["workload"]] == i]
        for i, r in enumerate(results)
    ]
    engines = {e["name"]: e for r in results for e in r["engines"]}
    versions = {name: v for r in results for name, v in r["versions"].items()}
    return {
        "machine": first["machine"],
        "model": first["model"],
        "engines": sorted(engines.values(), key=lambda e: not e["is_ours"]),
        "versions": versions,
        "samples": [s for samples in given for s in samples],
        "runs": [
            {**r, "samples": samples} for r, samples in zip(results, given, strict=True) if samples
        ],
    }


def section(result: Mapping[str, Any], names: Mapping[str, str], picture: str) -> str:
    """Tables and plot of a merged result, with what each was measured on.

    names    by date of a run: how README calls its file
    picture  the plot's path as README sees it
    """
    machine = result["machine"]
    versions = {f"{k} {v}" for found in result["versions"].values() for k, v in found.items()}
    told = sorted(v for v in versions if not v.startswith("xylite "))
    drafts = report.drafts_markdown(result)
    tables = [report.markdown(result), drafts]
    about = [
        f"Medians, measured by turns: {result['model']} on {machine['cores']} cores of "
        f"{machine['cpu']} ({', '.join(machine['flags'])}).",
        f"Versions: {', '.join(told)}." if told else "",
        "Numbers after a workload's name are prompt tokens, batch size or clients.",
        "In brackets: the least and the greatest ratio of a turn." if drafts else "",
    ]
    runs = [_run(run, names.get(run["date"], "")) for run in result["runs"]]
    image = f"![Medians of each workload as bars, from the same results]({picture})\n"
    return "\n".join([*filter(None, tables), image, *filter(None, about), "", *runs, ""])


def _run(run: Mapping[str, Any], name: str) -> str:
    """A line on what one run gave."""
    samples = run["samples"]
    repeats = 1 + max(s["repeat"] for s in samples)
    noisy = sum(not s["clean"] for s in samples)
    disturbed = f"; {noisy} of {len(samples)} runs were disturbed by other processes"
    return (
        f"- {name + ', ' if name else ''}{run['date'].partition('T')[0]}, "
        f"commit {run['commit'] or 'unknown'}, {repeats} turn{'s' * (repeats > 1)}: "
        f"{', '.join(report.order(samples, 'engine'))} in "
        f"{', '.join(report.order(samples, 'workload'))}{disturbed if noisy else ''}."
    )


def rewritten(
    readme: Path, result: Mapping[str, Any], files: Mapping[str, Path], picture: Path, steps: Path
) -> str:
    """A README's text with the sections it has a place for.

    files    of results, by date
    picture  the plot
    steps    result of bench.ops.steps
    raises   ValueError: there is no place, or results do not belong together
    """
    text, place = readme.read_text(), readme.resolve().parent

    def seen(path: Path) -> str:
        return Path(os.path.relpath(path.resolve(), place)).as_posix()

    has = [begin in text and end in text for begin, end in _PLACES]
    if not any(has):
        raise ValueError("there is no place for tables: no " + " and no ".join(
            f"{begin.strip()} with {end}" for begin, end in _PLACES))  # fmt: skip
    names = {date: f"[{path.name}]({seen(path)})" for date, path in files.items()}
    if has[0]:
        text = between(text, BEGIN, END, section(result, names, seen(picture)))
    if has[1]:
        measured = json.loads(steps.read_text())
        names[measured["date"]] = f"[{steps.name}]({seen(steps)})"
        text = between(
            text, possible.BEGIN, possible.END, possible.section(measured, result, names)
        )
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 if a result or a place for it is missing, or results do not belong together."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare.render",
        description="Writes the performance tables and plot of README.md and bench/README.md.",
    )
    parser.add_argument("result", type=Path, nargs="*", help="default: all full ones")
    parser.add_argument("--steps", type=Path, default=STEPS, help="result of bench.ops.steps")
    parser.add_argument("--readme", type=Path, nargs="+", default=READMES)
    parser.add_argument("--plot", type=Path, default=PLOT)
    args = parser.parse_args(argv)
    paths = args.result or full_results()
    if not paths:
        print("render: bench/results has no full result of bench.compare", file=sys.stderr)
        return 1
    results = [json.loads(path.read_text()) for path in paths]
    files = {r["date"]: path for r, path in zip(results, paths, strict=True)}
    readme = args.readme[0]
    texts: dict[Path, str] = {}
    try:
        result = merged(results)
        for readme in args.readme:
            texts[readme] = rewritten(readme, result, files, args.plot, args.steps)
    except (ValueError, OSError) as e:
        print(f"render: {readme}: {e}", file=sys.stderr)
        return 1
    args.plot.write_text(plot.svg(result))
    for readme, text in texts.items():
        readme.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
