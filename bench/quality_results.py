"""Results of bench.quality that were measured in several runs."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

# What must be the same in an earlier result that variants are added to.
SAME: Final = (
    *("model", "texts", "window", "stride", "prompts", "new_tokens", "questions"),
    *("answer_tokens", "compared_with"),
)
STEADY: Final = 1e-3  # relative change of the first variant's perplexity that is none


def require_same(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """ValueError unless a result of `new` can be added to one of `old`."""
    for name in SAME:
        if old[name] != new[name]:
            raise ValueError(f"{name} differs: {old[name]!r} there, {new[name]!r} here")
    for name in ("cpu", "flags"):
        there, here = old["machine"][name], new["machine"][name]
        if there != here:
            raise ValueError(f"the machine's {name} differs: {there!r} there, {here!r} here")


def added(old: Mapping[str, Any], new: Mapping[str, Any], order: Iterable[str]) -> dict[str, Any]:
    """`old` with the variants of `new`, each with the run that it comes from.

    order   in which variants stand, the first one before all
    raises  ValueError: they do not belong together, or the first variant says something else now
    """
    require_same(old, new)
    first = old["compared_with"]
    there, here = (result["variants"][first]["texts"] for result in (old, new))
    for text, figures in there.items():
        then, now = figures["perplexity"], here[text]["perplexity"]
        if abs(now / then - 1) > STEADY:
            raise ValueError(f"{first} has a perplexity of {now} on {text} now, and had {then}")
    run = {name: new[name] for name in ("date", "command", "commit", "versions")}
    fresh = {v: {**found, "run": run} for v, found in new["variants"].items() if v != first}
    variants = {**old["variants"], **fresh}
    names = [first, *(v for v in order if v in variants and v != first)]
    return {**old, "variants": {name: variants[name] for name in names}}
