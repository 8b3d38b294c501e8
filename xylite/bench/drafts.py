"""What a server's metrics say about its drafts during a run, in the words of vLLM's `bench serve`.

The counters `vllm:spec_decode_*` are read before and after; a server without them is measured all
the same.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

TIMEOUT_S: Final = 10.0

# One line of the exposition; the counter's name ends with _total except in old versions of vLLM.
_SAMPLE: Final = re.compile(
    r"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)"
    r"(?:_total)?(\{.*\})?[ \t]+(\S+)",
    re.MULTILINE,
)
_POSITION: Final = re.compile(r'[{,]\s*position="(\d+)"')


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counters of all engines of a server together.

    accepted_per_pos  accepted tokens by place in the draft
    """

    drafts: float
    draft_tokens: float
    accepted_tokens: float
    accepted_per_pos: Mapping[int, float]


def read(text: str) -> DraftCounts | None:
    """The counts in a text of metrics; None if it has none."""
    totals: dict[str, float] = {}
    places: dict[int, float] = {}
    for name, labels, number in _SAMPLE.findall(text):
        try:
            value = float(number)
        except ValueError:
            continue
        if name == "accepted_tokens_per_pos":
            place = _POSITION.search(labels)
            if place is not None:
                at = int(place.group(1))
                places[at] = places.get(at, 0.0) + value
        else:
            totals[name] = totals.get(name, 0.0) + value
    if not totals:
        return None
    return DraftCounts(
        totals.get("drafts", 0.0),
        totals.get("draft_tokens", 0.0),
        totals.get("accepted_tokens", 0.0),
        places,
    )


async def fetch(
    session: aiohttp.ClientSession, base: str, headers: Mapping[str, str]
) -> DraftCounts | None:
    """The counts of a server now; None if it has no such metrics, or does not show them."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with session.get(f"{base}/metrics", headers=headers, timeout=timeout) as response:
            if response.status != 200:
                return None
            return read(await response.text(errors="replace"))
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


def figures(before: DraftCounts | None, after: DraftCounts | None) -> dict[str, Any]:
    """A run's numbers by vLLM's JSON names; {} if nothing was drafted, or nobody knows.

    The rate is in percent, the length counts the token that each verify gives in any case, and the
    rates of positions are shares of all drafts.
    """
    if before is None or after is None:
        return {}
    drafts = int(after.drafts - before.drafts)
    tokens = int(after.draft_tokens - before.draft_tokens)
    accepted = int(after.accepted_tokens - before.accepted_tokens)
    # Fewer than before: the server was started anew meanwhile.
    if drafts <= 0 or tokens <= 0 or accepted < 0:
        return {}
    places = max((*before.accepted_per_pos, *after.accepted_per_pos), default=-1) + 1
    return {
        "spec_decode_acceptance_rate": accepted / tokens * 100,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": tokens,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": [
            (after.accepted_per_pos.get(i, 0.0) - before.accepted_per_pos.get(i, 0.0)) / drafts
            for i in range(places)
        ],
    }
