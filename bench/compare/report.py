"""Samples to medians, ratios with their spread, and tables."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

# Figure -> title, whether more is better. Only these are compared; samples may hold others.
FIGURES: Final[Mapping[str, tuple[str, bool]]] = {
    "tok_s": ("tok/s", True),
    "ttft_p50_ms": ("TTFT p50, ms", False),
    "tpot_p50_ms": ("TPOT p50, ms", False),
    "itl_p99_ms": ("ITL p99, ms", False),
    "tpot_mean_ms": ("TPOT mean, ms", False),
    "accepted": ("draft tokens accepted, %", True),
    "per_verify": ("tokens per verify", True),
    "first_token_s": ("first token after, s", False),
    "idle_rss_mib": ("idle memory, MiB", False),
}

# What a workload with and without drafts is called: its kind, and requests at once.
DRAFTING_WORKLOAD: Final = "{}, {} at once"

Sample = Mapping[str, Any]  # engine, workload, repeat, figures, others, clean


def values(samples: Iterable[Sample], engine: str, workload: str, figure: str) -> dict[int, float]:
    """A figure of an engine by repeat. Samples taken while others used the machine count only if
    there is no clean one of that repeat."""
    found: dict[int, float] = {}
    for sample in sorted(samples, key=lambda s: s["clean"]):
        is_it = sample["engine"] == engine and sample["workload"] == workload
        if is_it and figure in sample["figures"]:
            found[sample["repeat"]] = sample["figures"][figure]
    return found


def order(samples: Iterable[Sample], key: str) -> list[str]:
    """Distinct values of a field in the order they first came."""
    return list(dict.fromkeys(str(s[key]) for s in samples))


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[float, float, float]:
    """Ratio of medians, and the least and greatest ratio of a pair of the same repeat."""
    pairs = [ours[i] / theirs[i] for i in ours.keys() & theirs.keys()]
    assert pairs, f"no repeat has both: {sorted(ours)} and {sorted(theirs)}"
    middle = statistics.median(ours.values()) / statistics.median(theirs.values())
    return middle, min(pairs), max(pairs)


def ratios(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each variant of xylite against each peer of its precision, or one that drafts against the
    same without drafts, by workload and figure; `best` marks the peer that does best."""
    samples, engines = result["samples"], result["engines"]
    rows: list[dict[str, Any]] = []
    for workload in order(samples, "workload"):
        for figure, (_, more) in FIGURES.items():
            for ours in (e for e in engines if e["is_ours"]):
                mine = values(samples, ours["name"], workload, figure)
                group = _against(samples, engines, ours, workload, figure)
                group = {n: v for n, v in group.items() if v.keys() & mine.keys()}
                if not group:
                    continue
                pick: Callable[..., str] = max if more else min
                best = pick(group, key=lambda n: statistics.median(group[n].values()))
                for name, theirs in group.items():
                    middle, low, high = ratio(mine, theirs)
                    rows.append(
                        {
                            "workload": workload,
                            "figure": figure,
                            "engine": ours["name"],
                            "peer": name,
                            "ratio": middle,
                            "low": low,
                            "high": high,
                            "best": name == best and not ours.get("baseline"),
                        }
                    )
    return rows


def _against(
    samples: Sequence[Sample],
    engines: Sequence[Mapping[str, Any]],
    ours: Mapping[str, Any],
    workload: str,
    figure: str,
) -> dict[str, dict[int, float]]:
    """The figure of each peer of the same precision, or of what the engine is compared with."""
    names = [e["name"] for e in engines if not e["is_ours"] and e["precision"] == ours["precision"]]
    if ours.get("baseline"):
        names = [ours["baseline"]]
    return {name: values(samples, name, workload, figure) for name in names}


def text(result: Mapping[str, Any]) -> str:
    """Medians with their spread, then ratios, one workload after the other."""
    samples = result["samples"]
    lines: list[str] = []
    found = ratios(result)
    for workload in order(samples, "workload"):
        for figure, (title, more) in FIGURES.items():
            cells = {
                name: got
                for name in order(samples, "engine")
                if (got := values(samples, name, workload, figure))
            }
            if not cells:
                continue
            lines.append(f"{workload}, {title} ({'more' if more else 'less'} is better)")
            for name, got in cells.items():
                middle = statistics.median(got.values())
                spread = f"{number(min(got.values()))} to {number(max(got.values()))}"
                lines.append(f"  {name:<32} {number(middle):>9}   {spread}")
            for row in found:
                if row["workload"] == workload and row["figure"] == figure:
                    best = "  <- best peer" if row["best"] else ""
                    lines.append(
                        f"    {row['engine']} / {row['peer']} = {row['ratio']:.2f} "
                        f"({row['low']:.2f} to {row['high']:.2f}){best}"
                    )
    noisy = sum(not s["clean"] for s in samples)
    if noisy:
        lines.append(f"{noisy} of {len(samples)} runs were disturbed by other processes")
    return "\n".join(lines)


def number(value: float) -> str:
    """Three digits that count, no exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def markdown(result: Mapping[str, Any]) -> str:
    """The table of a README: a row for each workload and figure, a column for each engine, the
    best of each row in bold. Drafts have a table of their own."""
    speculated = drafting_workloads(result)
    samples = [s for s in result["samples"] if s["workload"] not in speculated]
    names = [e["name"] for e in result["engines"] if e["name"] in order(samples, "engine")]
    if not names:
        return ""
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for workload in order(samples, "workload"):
        for figure, (title, more) in FIGURES.items():
            medians = {
                name: statistics.median(got.values())
                for name in names
                if (got := values(samples, name, workload, figure))
            }
            if not medians:
                continue
            best = (max if more else min)(medians.values())
            cells = [
                "-"
                if name not in medians
                else f"**{number(medians[name])}**"
                if medians[name] == best
                else number(medians[name])
                for name in names
            ]
            lines.append(f"| {workload}: {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Drafted:
    """What drafts did for one workload; ratio as `ratio` gives it, of tokens per second."""

    engine: str
    kind: str
    at_once: str
    plain: float
    drafting: float
    ratio: tuple[float, float, float]
    accepted: float
    per_verify: float


def drafting_workloads(result: Mapping[str, Any]) -> list[str]:
    """Workloads that were measured with and without drafts."""
    names = {e["name"] for e in result["engines"] if e.get("baseline")}
    return order([s for s in result["samples"] if s["engine"] in names], "workload")


def drafted(result: Mapping[str, Any]) -> list[Drafted]:
    """Every engine that drafts against the same without drafts, in each workload of both."""
    samples = result["samples"]
    found: list[Drafted] = []
    for engine in (e for e in result["engines"] if e.get("baseline")):
        name = engine["name"]
        for workload in drafting_workloads(result):
            plain = values(samples, engine["baseline"], workload, "tok_s")
            drafting = values(samples, name, workload, "tok_s")
            if not plain.keys() & drafting.keys():
                continue
            kind, _, at_once = workload.removesuffix(" at once").partition(", ")
            accepted, per_verify = (
                statistics.median(values(samples, name, workload, f).values())
                for f in ("accepted", "per_verify")
            )
            found.append(
                Drafted(
                    engine=name,
                    kind=kind,
                    at_once=at_once,
                    plain=statistics.median(plain.values()),
                    drafting=statistics.median(drafting.values()),
                    ratio=ratio(drafting, plain),
                    accepted=accepted,
                    per_verify=per_verify,
                )
            )
    return found


def drafts_markdown(result: Mapping[str, Any]) -> str:
    """README's table of drafts: a row for each workload and drafter; "" if none was measured."""
    rows = drafted(result)
    if not rows:
        return ""
    head = "| | text | at once | tok/s without drafts | with | times as fast | accepted, % "
    lines = [head + "| tokens per verify |", "|---|---|" + "---:|" * 6]
    for r in rows:
        middle, low, high = r.ratio
        faster = f"**{middle:.2f}** ({low:.2f} to {high:.2f})"
        figures = [number(x) for x in (r.plain, r.drafting)]
        figures += [faster, number(r.accepted), number(r.per_verify)]
        lines.append("| " + " | ".join([r.engine, r.kind, r.at_once, *figures]) + " |")
    return "\n".join(lines) + "\n"
