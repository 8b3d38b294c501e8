"""What bench/device.py found, on one screen."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from bench.ops.report import ratio

Result = Mapping[str, Any]


def summary(result: Result) -> str:
    """A few lines for each part that has a result."""
    lines: list[str] = []
    for name, describe in (("checks", _checks), ("ops", _ops), ("decode", _decode)):
        part = result.get(name)
        if part is not None:
            lines.append(f"-- {name}, {part['seconds']:.0f} s")
            lines += describe(part)
    return "\n".join(lines)


def _checks(part: Result) -> Iterable[str]:
    errors = part.get("errors", {})
    numbers = [e for e in errors.values() if not isinstance(e, str)]
    right = sum(e <= 1 for e in numbers)
    worst = f", the worst at {max(numbers):.2f} of the error that is allowed" if numbers else ""
    yield f"{right} of {len(errors)} right{worst}"


def _ops(part: Result) -> Iterable[str]:
    """Per op and format: the median and best share of the roofline, and ratios to the rivals."""
    if "device" not in part or not part["rows"]:
        return
    device, roof = part["device"], part["roofline"]
    peaks = ", ".join(f"{name} {value / 1e12:.4g}" for name, value in roof["flops"].items())
    yield f"{device['arch']}: {peaks} TFLOP/s, {roof['bytes_per_s'] / 1e9:,.0f} GB/s"
    yield f"{'':<27}{'cases':>5} {'roofline':>9} {'best':>6} {'torch':>7} {'tutorial':>9}"
    rows = [row for row in part["rows"] if "seconds" in row]
    for op, form in dict.fromkeys((row["op"], row["format"]) for row in rows):
        mine = [row for row in rows if (row["op"], row["format"]) == (op, form)]
        percents = [row["roofline_percent"] for row in mine]
        ratios = [_mean(ratio(row, rival) for row in mine) for rival in ("torch", "tutorial")]
        cells = ["-" if r is None else f"{r:.2f}" for r in ratios]
        yield (
            f"{op:<20}{form:<7}{len(mine):>5} {statistics.median(percents):>8.1f}% "
            f"{max(percents):>5.1f}% {cells[0]:>7} {cells[1]:>9}"
        )
    if part["left_out"]:
        yield f"{part['left_out']} cases had no time"


def _mean(ratios: Iterable[float | None]) -> float | None:
    known = [r for r in ratios if r]
    return statistics.geometric_mean(known) if known else None


def _decode(part: Result) -> Iterable[str]:
    if "model" not in part:
        return
    yield (
        f"{part['model']}, {part['layers']} layers, {part['weight_gib']:.1f} GiB of {part['dtype']}"
        f"; ids {'the same' if part['same_ids'] else 'NOT the same'} both ways"
    )
    ways = [way for way in ("graphs", "launches") if way in part]
    yield f"{'tok/s':<16}" + "".join(f"{way:>12}" for way in ways)
    for kind in ("prefill", "decode"):
        for size in part[ways[0]][kind]:
            cells = "".join(f"{part[way][kind][size]:>12,.0f}" for way in ways)
            yield f"{kind + ' ' + size:<16}{cells}"
