"""Tables of what a machine could do at most and how much of that is reached, from the results of
bench.ops.steps and bench.compare."""

import statistics
from collections.abc import Mapping
from typing import Any, Final

from bench.compare import report

Result = Mapping[str, Any]
BEGIN, END = "<!-- possible -->\n", "<!-- /possible -->"
ALIKE: Final = ("cpu", "flags", "cores")  # of machines whose results may stand in one table
# Steps whose tokens are those of a workload of bench.compare.
WORKLOADS: Final[Mapping[str, str]] = {
    "prefill 512": "prefill 512",
    "prefill 2048": "prefill 2048",
    "decode at 1": "decode 1",
    "decode at 8": "decode 8",
    "decode at 32": "decode 32",
}
# Formats of bench.ops.steps, and dtypes where there is none, -> precision in bench.compare.
PRECISIONS: Final[Mapping[str, str]] = {
    "bfloat16": "bf16", "float16": "bf16", "float32": "float32", "int8": "int8", "int4": "int4",
}  # fmt: skip


def section(steps: Result, offline: Result, names: Mapping[str, str]) -> str:
    """What goes between BEGIN and END.

    steps    of bench.ops.steps
    offline  of bench.compare, perhaps merged; what it lacks is a dash
    names    by date of a result: how the text calls its file
    raises   ValueError: the machines differ
    """
    for name in ALIKE:
        ours, theirs = steps["machine"].get(name), offline["machine"].get(name)
        if ours != theirs:
            raise ValueError(f"the machines differ in {name}: {ours} and {theirs}")
    formats = {_format(steps, name): found for name, found in steps["formats"].items()}
    parts = [_summary(formats, offline), *(_by_op(n, f) for n, f in formats.items())]
    return "\n".join([*parts, _about(steps, formats, names)])


def between(text: str, begin: str, end: str, written: str) -> str:
    """A text with something else between two marks, which it must have."""
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{written}{end}{rest.partition(end)[2]}"


def _format(steps: Result, name: str) -> str:
    return steps["device"]["dtype"] if name == "plain" else name


def _summary(formats: Mapping[str, Result], offline: Result) -> str:
    lines = [
        "| | at most, tok/s | the step | of it | xylite | best peer, tok/s | at most / best peer |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for form, steps in formats.items():
        for name, step in steps.items():
            mine, peer = _measured(offline, form, name)
            most = step["most_tok_s"]
            cells = [
                f"{form}, {name}",
                f"{most:,.0f}",
                f"{step['tok_s']:,.0f}",
                f"{step['roofline_percent']:.0f}%",
                "-" if mine is None else report.number(mine),
                "-" if peer is None else f"{report.number(peer[1])} ({peer[0]})",
                "-" if peer is None else f"{most / peer[1]:.2f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _measured(
    offline: Result, form: str, step: str
) -> tuple[float | None, tuple[str, float] | None]:
    """tok/s of xylite at this precision, and of the peer that is fastest; None if not measured."""
    medians: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for engine in offline["engines"]:
        if engine["precision"] != PRECISIONS.get(form) or engine.get("baseline"):
            continue
        found = report.values(
            offline["samples"], engine["name"], WORKLOADS.get(step, ""), "tok_s"
        ).values()
        if found:
            medians[engine["is_ours"]][engine["name"]] = statistics.median(found)
    peers = medians[False]
    best = max(peers, key=lambda name: peers[name], default=None)
    mine = max(medians[True].values(), default=None)
    return mine, None if best is None else (best, peers[best])


def _by_op(form: str, steps: Result) -> str:
    """Milliseconds of each op in each step, and percent of what is possible."""
    lines = [f"| {form} | " + " | ".join(steps) + " |", "|---|" + "---:|" * len(steps)]
    for op in dict.fromkeys(op for step in steps.values() for op in step["ops"]):
        found = [step["ops"].get(op) for step in steps.values()]
        cells = ["-" if f is None else _cell(f) for f in found]
        lines.append("| " + " | ".join([op, *cells]) + " |")
    together = [report.number(1e3 * step["ops_seconds"]) for step in steps.values()]
    lines.append("| " + " | ".join(["all, one by one", *together]) + " |")
    lines.append("| " + " | ".join(["the step", *map(_cell, steps.values())]) + " |")
    return "\n".join(lines) + "\n"


def _cell(found: Result) -> str:
    return f"{report.number(1e3 * found['seconds'])} ({found['roofline_percent']:.0f}%)"


def _about(steps: Result, formats: Mapping[str, Result], names: Mapping[str, str]) -> str:
    machine = steps["machine"]
    roofs = [step["roofline"] for found in formats.values() for step in found.values()]
    flops: dict[str, list[float]] = {}
    for form, found in formats.items():
        for step in found.values():
            rates = step["roofline"]["flops"]
            flops.setdefault(form, []).append(rates.get(form, rates["dtype"]))
            if "float32" in rates:
                flops.setdefault("float32", []).append(rates["float32"])
    limits = [f"{form} {_range(rates)} GFLOP/s" for form, rates in flops.items()]
    limits.append(f"memory {_range([r['bytes_per_s'] for r in roofs])} GB/s")
    if all("cached_bytes_per_s" in r for r in roofs):
        limits.append(f"caches {_range([r['cached_bytes_per_s'] for r in roofs])} GB/s")
    versions = ", ".join(f"{name} {version}" for name, version in steps["versions"].items())
    named = names.get(steps["date"], "")
    return (
        f"Limits, at the moments of the steps: {', '.join(limits)}.\n\n"
        f"- {named + ', ' if named else ''}{steps['date'].partition('T')[0]}, commit "
        f"{steps['commit'] or 'unknown'}: `{steps['command']}` on {machine['cores']} cores of "
        f"{machine['cpu']} ({', '.join(machine['flags'])}), {versions}.\n"
    )


def _range(rates: list[float]) -> str:
    low, high = (f"{rate / 1e9:,.0f}" for rate in (min(rates), max(rates)))
    return low if low == high else f"{low} to {high}"
