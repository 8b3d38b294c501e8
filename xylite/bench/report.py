"""Outcomes to numbers, a table and JSON, in the words of vLLM's `bench serve`."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from xylite.bench.client import Outcome

METRICS: Final[Mapping[str, tuple[str, str]]] = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
WIDTH: Final = 50


def measure(
    outcomes: Sequence[Outcome],
    duration_s: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """All numbers of a run, by vLLM's JSON names; latencies in ms.

    goodput  limits in ms by metric; a request that keeps them all counts as good
    """
    good = [o for o in outcomes if not o.error]
    tokens_in = sum(o.input_tokens for o in good)
    tokens_out = sum(o.output_tokens for o in good)
    peak_tokens, peak_requests = _peaks(good, duration_s)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "total_cached_tokens": sum(o.cached_tokens for o in good),
        "request_throughput": len(good) / duration_s,
        "request_goodput": (
            sum(_is_good(o, goodput) for o in good) / duration_s if goodput else None
        ),
        "output_throughput": tokens_out / duration_s,
        "total_token_throughput": (tokens_in + tokens_out) / duration_s,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
    }
    values: Mapping[str, list[float]] = {
        "ttft": [o.ttft for o in good],
        "tpot": [o.tpot for o in good if o.tpot is not None],
        "itl": [gap for o in good for gap in o.itls],
        "e2el": [o.latency for o in good],
    }
    for name in metrics:
        ms = np.asarray(values[name] or [0.0]) * 1e3
        result[f"mean_{name}_ms"] = float(ms.mean())
        result[f"median_{name}_ms"] = float(np.median(ms))
        result[f"std_{name}_ms"] = float(ms.std())
        for p in percentiles:
            result[f"p{p:g}_{name}_ms"] = float(np.percentile(ms, p))
    return result


def _is_good(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    ms = {
        "ttft": outcome.ttft * 1e3,
        "tpot": (outcome.tpot or 0.0) * 1e3,
        "e2el": outcome.latency * 1e3,
    }
    return all(ms[name] <= limit for name, limit in limits.items())


def _peaks(outcomes: Sequence[Outcome], duration_s: float) -> tuple[float, int]:
    """Most tokens per second in a part of the run, and most requests open at the same time.

    The parts are equal, of a second or little more, and a shorter run is one part: so the peak is
    never below the mean, and a short rest at the end is not blown up.
    """
    if not outcomes:
        return 0.0, 0
    begin = min(o.start for o in outcomes)
    parts = max(1, int(duration_s))
    width = duration_s / parts
    tokens: dict[int, float] = defaultdict(float)
    for o in outcomes:
        at = o.start - begin + o.ttft
        # A chunk may hold several tokens; the answer's mean is taken for each.
        per_chunk = o.output_tokens / (len(o.itls) + 1)
        for gap in (0.0, *o.itls):
            at += gap
            tokens[min(int(at / width), parts - 1)] += per_chunk
    opened = sorted(o.start for o in outcomes)
    closed = sorted(o.start + o.latency for o in outcomes)
    most = max(i + 1 - bisect_right(closed, at) for i, at in enumerate(opened))
    return max(tokens.values()) / width, most


def table(
    result: Mapping[str, Any], *, metrics: Sequence[str], percentiles: Sequence[float]
) -> str:
    """The text table of a result as `measure` and the run's settings made it."""
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]

    def row(label: str, value: Any) -> None:
        text = f"{value:<10.2f}" if isinstance(value, float) else f"{value:<10}"
        lines.append(f"{label:<40} {text}".rstrip())

    row("Successful requests:", result["completed"])
    row("Failed requests:", result["failed"])
    if result["max_concurrency"] is not None:
        row("Maximum request concurrency:", result["max_concurrency"])
    if result["request_rate"] != "inf":
        row("Request rate configured (RPS):", float(result["request_rate"]))
    row("Benchmark duration (s):", result["duration"])
    row("Total input tokens:", result["total_input_tokens"])
    row("Total cached input tokens:", result["total_cached_tokens"])
    row("Total generated tokens:", result["total_output_tokens"])
    row("Request throughput (req/s):", result["request_throughput"])
    if result["request_goodput"] is not None:
        row("Request goodput (req/s):", result["request_goodput"])
    row("Output token throughput (tok/s):", result["output_throughput"])
    row("Peak output token throughput (tok/s):", float(result["max_output_tokens_per_s"]))
    row("Peak concurrent requests:", float(result["max_concurrent_requests"]))
    row("Total token throughput (tok/s):", result["total_token_throughput"])
    for name in metrics:
        short, title = METRICS[name]
        lines.append(title.center(WIDTH, "-"))
        row(f"Mean {short} (ms):", result[f"mean_{name}_ms"])
        row(f"Median {short} (ms):", result[f"median_{name}_ms"])
        for p in percentiles:
            if p == 50:
                continue  # the median
            row(f"P{p:g} {short} (ms):", result[f"p{p:g}_{name}_ms"])
    if "spec_decode_num_drafts" in result:
        lines.append("Speculative Decoding".center(WIDTH, "-"))
        row("Acceptance rate (%):", result["spec_decode_acceptance_rate"])
        row("Acceptance length:", result["spec_decode_acceptance_length"])
        row("Drafts:", result["spec_decode_num_drafts"])
        row("Draft tokens:", result["spec_decode_draft_tokens"])
        row("Accepted tokens:", result["spec_decode_accepted_tokens"])
        rates = result["spec_decode_per_position_acceptance_rates"]
        if rates:
            lines.append("Per-position acceptance (%):")
        for i, rate in enumerate(rates):
            row(f"  Position {i}:", rate * 100)
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def errors(outcomes: Sequence[Outcome], most: int = 5) -> str:
    """The kinds of failure and how often each happened; "" if there was none."""
    kinds = Counter(o.error for o in outcomes if o.error)
    lines = [f"{count} x {error}" for error, count in kinds.most_common(most)]
    if len(kinds) > most:
        lines.append(f"and {len(kinds) - most} other kinds")
    return "\n".join(lines)
