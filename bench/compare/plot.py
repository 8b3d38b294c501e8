"""A result as one SVG picture: bars of medians, whiskers from the least to the greatest value.

Written by hand, so that it needs nothing that is not there and the same result gives the same file.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from bench.compare import report

# What is drawn of each workload; the tables have everything.
FIGURES: Final = ("tok_s", "ttft_p50_ms", "itl_p99_ms")
COLUMNS: Final = 3
# Pixels.
WIDTH, GAP, ROW, TITLE, FONT = 300, 14, 15, 20, 10
NAMES, NUMBERS = 118, 42  # room left of the bars, and right of the longest
LETTER: Final = 5.4  # mean width of one
OURS, DRAFTS, PEER, INK = "#2f6fb3", "#2e8b57", "#a9a9a9", "#222"


@dataclass(frozen=True)
class Bar:
    """One line of a panel."""

    name: str
    middle: float
    low: float
    high: float
    color: str


@dataclass(frozen=True)
class Panel:
    """Bars with a title; `mark` is where a line is drawn across them."""

    title: str
    bars: Sequence[Bar]
    mark: float | None = None

    @property
    def height(self) -> int:
        return TITLE + ROW * len(self.bars)


def panels(result: Mapping[str, Any]) -> list[Panel]:
    """One for each workload and figure, and one for each number of requests with drafts."""
    samples = result["samples"]
    speculated = report.drafting_workloads(result)
    found: list[Panel] = []
    for figure in FIGURES:
        title, more = report.FIGURES[figure]
        for workload in report.order(samples, "workload"):
            bars = [
                Bar(
                    e["name"],
                    statistics.median(got.values()),
                    min(got.values()),
                    max(got.values()),
                    OURS if e["is_ours"] else PEER,
                )
                for e in result["engines"]
                if (got := report.values(samples, e["name"], workload, figure))
            ]
            if bars and workload not in speculated:
                better = "more" if more else "less"
                found.append(Panel(f"{workload}: {title} ({better} is better)", bars))
    return found + _drafts(report.drafted(result))


def _drafts(rows: Sequence[report.Drafted]) -> list[Panel]:
    bars: dict[tuple[str, str], list[Bar]] = {}
    for r in rows:
        bars.setdefault((r.engine, r.at_once), []).append(Bar(r.kind, *r.ratio, DRAFTS))
    return [
        Panel(f"{engine}, {at_once} at once: times as fast", found, mark=1.0)
        for (engine, at_once), found in bars.items()
    ]


def svg(result: Mapping[str, Any]) -> str:
    """The picture as the text of an SVG file."""
    drawn = panels(result)
    rows = [drawn[i : i + COLUMNS] for i in range(0, len(drawn), COLUMNS)]
    parts: list[str] = []
    y = GAP
    for row in rows:
        for column, panel in enumerate(row):
            parts += _panel(panel, GAP + column * (WIDTH + GAP), y)
        y += max(p.height for p in row) + GAP
    width = GAP + COLUMNS * (WIDTH + GAP)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" '
        f'viewBox="0 0 {width} {y}" font-family="sans-serif" font-size="{FONT}" fill="{INK}">'
    )
    back = f'<rect width="{width}" height="{y}" fill="#fff"/>'
    return "\n".join([head, back, *parts, "</svg>"]) + "\n"


def _panel(panel: Panel, x: int, y: int) -> list[str]:
    parts = [f'<text x="{x}" y="{y + FONT}" font-weight="bold">{escape(panel.title)}</text>']
    left = x + NAMES
    longest = max(b.high for b in panel.bars)
    scale = (WIDTH - NAMES - NUMBERS) / max(longest, panel.mark or 0.0, 1e-9)
    for i, bar in enumerate(panel.bars):
        top = y + TITLE + i * ROW
        base, middle = top + FONT, top + (ROW - 3) / 2
        low, high = (left + scale * v for v in (bar.low, bar.high))
        name = _short(bar.name, NAMES - 6)
        length = scale * bar.middle
        parts += [
            f'<text x="{left - 5}" y="{base}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{left}" y="{top}" width="{length:.1f}" height="{ROW - 3}" '
            f'fill="{bar.color}"/>',
            f'<path d="M{low:.1f} {middle:.1f}H{high:.1f}" stroke="{INK}"/>',
            f'<text x="{max(high, left + length) + 4:.1f}" y="{base}">'
            f"{report.number(bar.middle)}</text>",
        ]
    if panel.mark is not None:
        at = left + scale * panel.mark
        parts.append(
            f'<path d="M{at:.1f} {y + TITLE - 2}V{y + panel.height - 1}" stroke="{INK}" '
            'stroke-dasharray="3 2"/>'
        )
    return parts


def _short(text: str, width: float) -> str:
    """As much of a text as fits."""
    most = int(width / LETTER)
    return text if len(text) <= most else text[: most - 1] + "…"
