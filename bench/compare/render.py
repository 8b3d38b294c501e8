"""README's performance table, and a plot, from the newest result in bench/results.

    python -m bench.compare.render [--result FILE] [--readme README.md]

The table goes between the lines `<!-- performance -->` and `<!-- /performance -->`. The plot goes
beside the result as an SVG file, if matplotlib is installed.
"""

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.compare import report
from bench.compare.peers import ROOT

RESULTS: Final = ROOT / "bench" / "results"
BEGIN, END = "<!-- performance -->\n", "<!-- /performance -->"
# What the plot shows of each workload; the table has everything.
PLOTTED: Final = ("tok_s", "ttft_p50_ms", "itl_p99_ms")


def newest(folder: Path = RESULTS) -> Path | None:
    """The newest full result by its date; quick ones do not count."""
    dated: list[tuple[str, Path]] = []
    for path in folder.glob("compare-*.json"):
        result = json.loads(path.read_text())
        if not result["quick"]:
            dated.append((result["date"], path))
    return max(dated)[1] if dated else None


def section(result: Mapping[str, Any]) -> str:
    """The table with what it was measured on."""
    machine, versions = result["machine"], result["versions"]
    told = sorted(
        {f"{k} {v}" for found in versions.values() for k, v in found.items() if k != "xylite"}
    )
    noisy = sum(not s["clean"] for s in result["samples"])
    repeats = 1 + max(s["repeat"] for s in result["samples"])
    about = [
        f"Medians of {repeats} run{'s' * (repeats > 1)} by turns, "
        f"{_plain_date(result['date'])}, commit {result['commit'] or 'unknown'}: "
        f"{result['model']} on {machine['cores']} cores of {machine['cpu']} "
        f"({', '.join(machine['flags'])}).",
        f"Versions: {', '.join(told)}." if told else "",
        f"{noisy} of {len(result['samples'])} runs were disturbed by other processes."
        if noisy
        else "",
        "Numbers after a workload's name are prompt tokens, batch size or clients.",
    ]
    return report.markdown(result) + "\n" + "\n".join(filter(None, about)) + "\n"


def _plain_date(date: str) -> str:
    return date.partition("T")[0]


def with_performance(text: str, result: Mapping[str, Any]) -> str:
    """README's text with this result's section; ValueError if it has no place for one."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"there is no place for the table: {BEGIN.strip()} and {END} are missing")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{section(result)}{END}{after}"


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Bars of the medians, one panel for each workload and figure, whiskers from least to most."""
    samples = result["samples"]
    panels = [
        (workload, figure)
        for figure in PLOTTED
        for workload in report.order(samples, "workload")
        if any(s["workload"] == workload and figure in s["figures"] for s in samples)
    ]
    columns = 4
    rows = -(-len(panels) // columns)
    names = [e["name"] for e in result["engines"]]
    # Imported here: the table needs no plots.
    drawn = importlib.import_module("matplotlib.figure").Figure(
        figsize=(3.2 * columns, (0.8 + 0.28 * len(names)) * rows), layout="constrained"
    )
    axes = drawn.subplots(rows, columns, squeeze=False)
    for axis, (workload, figure) in zip(axes.flat, panels):
        title, more = report.FIGURES[figure]
        axis.set_title(f"{workload}: {title} ({'more' if more else 'less'} is better)", fontsize=7)
        for place, engine in enumerate(reversed(result["engines"])):
            got = list(report.values(samples, engine["name"], workload, figure).values())
            if got:
                middle = statistics.median(got)
                whiskers = [[middle - min(got)], [max(got) - middle]]
                color = "tab:blue" if engine["is_ours"] else "tab:gray"
                axis.barh(place, middle, xerr=whiskers, color=color)
        axis.set_yticks(range(len(names)), reversed(names))
        axis.set_ylim(-0.6, len(names) - 0.4)
        axis.tick_params(labelsize=6)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    # No date inside: the same result gives the same file.
    drawn.savefig(path, metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 if there is no result or no place for it."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare.render",
        description="Writes README's performance table, and a plot.",
    )
    parser.add_argument("--result", type=Path, help="default: the newest in bench/results")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    args = parser.parse_args(argv)
    path = args.result or newest()
    if path is None:
        print("render: bench/results has no full result of bench.compare", file=sys.stderr)
        return 1
    result = json.loads(path.read_text())
    try:
        changed = with_performance(args.readme.read_text(), result)
    except ValueError as e:
        print(f"render: {args.readme}: {e}", file=sys.stderr)
        return 1
    args.readme.write_text(changed)
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: no plot", file=sys.stderr)
    else:
        plot(result, path.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
