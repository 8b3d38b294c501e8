"""Figures as a table, as JSON with what they were measured on, and as a plot."""

import importlib
import importlib.util
import platform
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import xylite
from bench.compare import machine
from bench.ops.timing import Roofline
from xylite.ops import Ops

ROOT: Final = Path(__file__).parent.parent.parent
PACKAGES: Final = ("torch", "triton", "triton-ascend", "torch-npu", "numpy")
HEADER: Final = (
    f"{'op':<20}{'model':<14}{'what':<22}{'format':<7}{'rows':>5} {'us':>10} {'GFLOP/s':>9} "
    f"{'GB/s':>7} {'roof':>6} {'torch':>7} {'tutorial':>8}"
)

Row = Mapping[str, Any]


def ratio(row: Row, rival: str) -> float | None:
    """How many times as long as ours a rival takes: the quickest of those whose names begin so."""
    seconds = [
        r["seconds"] for n, r in row["rivals"].items() if n.startswith(rival) and "seconds" in r
    ]
    return min(seconds) / row["seconds"] if seconds and "seconds" in row else None


def line(row: Row) -> str:
    """One line of the table under HEADER."""
    begin = (
        f"{row['op']:<20}{row['model']:<14}{row['name']:<22}{row['format'] or '-':<7}"
        f"{row['rows']:>5} "
    )
    if "error" in row:
        return f"{begin} failed: {row['error']}"
    ratios = (ratio(row, "torch"), ratio(row, "tutorial"))
    torch_cell, tutorial_cell = ("-" if r is None else f"{r:.2f}" for r in ratios)
    return (
        f"{begin}{row['seconds'] * 1e6:>10.1f} {row['flops'] / row['seconds'] / 1e9:>9.1f} "
        f"{row['bytes'] / row['seconds'] / 1e9:>7.1f} {row['roofline_percent']:>5.1f}% "
        f"{torch_cell:>7} {tutorial_cell:>8}"
    )


def about(ops: Ops, dtype: str, command: Sequence[str]) -> dict[str, Any]:
    """What the figures were measured on, with and by; no paths of this machine."""
    versions = {"python": platform.python_version(), "xylite": xylite.__version__}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    try:
        host, commit = machine.describe(), machine.commit(ROOT)
    except OSError:  # no git, or not Linux
        host, commit = {"system": platform.platform()}, ""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "command": shlex.join(_without_folders(command)),
        "machine": host,
        "versions": versions,
        "device": {
            "table": ops.name,
            "kind": ops.device.kind,
            "arch": ops.device.arch,
            "num_cores": ops.device.num_cores,
            "block_size": ops.device.block_size,
            "dtype": dtype,
        },
    }


def _without_folders(command: Iterable[str]) -> list[str]:
    return [Path(word).name if Path(word).is_absolute() else word for word in command]


def of_roofline(roof: Roofline) -> dict[str, Any]:
    """The measured limits, as JSON."""
    return {
        "flops": {form or "dtype": value for form, value in roof.flops.items()},
        "bytes_per_s": roof.bandwidth,
        **({"cached_bytes_per_s": roof.cache} if roof.cache else {}),
    }


def plot(result: Mapping[str, Any], path: Path) -> str:
    """Percent of the roofline against rows, a panel for each model and op with a curve for each
    weight; what there is to say about it."""
    rows = [r for r in result["rows"] if "seconds" in r]
    if not rows:
        return "no plot: there are no figures"
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed (pip install -e '.[bench]')"
    panels = list(dict.fromkeys((r["model"], r["op"], r["format"]) for r in rows))
    columns = 4
    drawn = importlib.import_module("matplotlib.figure").Figure(
        figsize=(3.6 * columns, 2.6 * -(-len(panels) // columns)), layout="constrained"
    )
    axes = drawn.subplots(-(-len(panels) // columns), columns, squeeze=False)
    for axis, (model, op, form) in zip(axes.flat, panels):
        mine = [r for r in rows if (r["model"], r["op"], r["format"]) == (model, op, form)]
        axis.set_title(f"{model}: {op} {form}", fontsize=7)
        names = list(dict.fromkeys(r["name"] for r in mine))
        for name in names:
            points = sorted((r["rows"], r["roofline_percent"]) for r in mine if r["name"] == name)
            axis.plot(*zip(*points, strict=True), marker="o", markersize=2, label=name)
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, None)
        axis.set_ylabel("% of the roofline", fontsize=6)
        axis.set_xlabel("tokens", fontsize=6)
        axis.tick_params(labelsize=6)
        if any(names):  # ops without weights have one curve and no name for it
            axis.legend(fontsize=5)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    # No date inside and no random names: the same result gives the same file.
    with importlib.import_module("matplotlib").rc_context({"svg.hashsalt": "bench.ops"}):
        drawn.savefig(path, metadata={"Date": None})
    return f"plot: {path}"
