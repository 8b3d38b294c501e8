"""Requests to send: made at random, read from a workload file, or after a recorded trace.

Prompts are token ids wherever the API takes them, so that lengths are exact without a tokenizer.
Everything random comes from one seed; no prompt shares a beginning with another unless the data
says so.
"""

import csv
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from xylite.errors import ConfigError, file_reason

# Byte and control tokens sit at the low end of most vocabularies.
FIRST_ID: Final = 300

_WORDS: Final = (
    "the of and to in is that was for on are with they at this have from one had word but not what "
    "all were when we there can an your which their said if do will each about how up out them "
    "then she many some so these would other into has more her two like him see time could no make "
    "than first been its who now people my made over did down only way find use may water long "
    "little"
)


@dataclass(frozen=True, slots=True)
class Item:
    """One request.

    prompt      token ids, or text
    max_tokens  tokens to ask for
    arrival_s   when it arrives, from the first one; None = the data says nothing about it
    messages    the chat, for APIs that take one; the prompt is its last message then
    """

    prompt: str | tuple[int, ...]
    max_tokens: int
    arrival_s: float | None = None
    messages: tuple[Mapping[str, Any], ...] = ()


def random_items(
    count: int,
    rng: random.Random,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float,
    prefix_len: int,
    vocab_size: int,
) -> list[Item]:
    """Random prompts behind a common prefix; lengths uniform within +- range_ratio."""

    def around(length: int) -> int:
        low, high = int(length * (1 - range_ratio)), int(length * (1 + range_ratio))
        return max(1, rng.randint(low, high))

    prefix = _ids(rng, prefix_len, vocab_size)
    return [
        Item((*prefix, *_ids(rng, around(input_len), vocab_size)), around(output_len))
        for _ in range(count)
    ]


def read_workload(path: Path) -> list[Item]:
    """A JSON Lines file of requests.

    Either a first line {"workload": NAME, "prefixes": {NAME: [ids]}} and then lines of {"prefix",
    "ids", "max_tokens", "arrival"}; or lines of {"prompt": text or ids, "max_tokens" or
    "output_tokens", "arrival"}, with a chat's "messages" for "prompt" if it is one.
    """
    rows = list(_json_lines(path))
    prefixes: Mapping[str, list[int]] = {}
    if rows and "workload" in rows[0] and not rows[0].keys() & {"prompt", "messages"}:
        prefixes = rows.pop(0).get("prefixes", {})
    items: list[Item] = []
    for number, row in enumerate(rows, 2 if prefixes else 1):
        messages: tuple[Any, ...] = ()
        try:
            if "messages" in row:
                messages = tuple(row["messages"])
                prompt: Any = str(messages[-1]["content"])
            elif "ids" in row:
                prompt = (
                    (*prefixes[row["prefix"]], *row["ids"]) if row.get("prefix") else row["ids"]
                )
            else:
                prompt = row["prompt"]
            prompt = prompt if isinstance(prompt, str) else tuple(prompt)
            max_tokens = int(row.get("max_tokens") or row.get("output_tokens") or 128)
            arrival = None if row.get("arrival") is None else float(row["arrival"])
        except (IndexError, KeyError, TypeError, ValueError) as e:
            raise ConfigError(f"{path}: request {number}: {type(e).__name__}: {e}") from None
        items.append(Item(prompt, max_tokens, arrival, messages))
    if not items:
        raise ConfigError(f"{path} has no requests")
    return items


def read_trace(
    path: Path, rng: random.Random, vocab_size: int, count: int | None = None
) -> list[Item]:
    """The first `count` requests of a recorded trace; prompts are random ids of their lengths.

    CSV with arrival_ms, input_tokens, output_tokens (Azure's traces with times in ms), or JSON
    Lines with timestamp in ms, input_length, output_length, hash_ids (Mooncake's form: requests
    with a common beginning of hash_ids get a common beginning of ids).
    """
    try:
        if path.suffix == ".jsonl":
            rows = [
                (
                    float(r["timestamp"]),
                    int(r["input_length"]),
                    int(r["output_length"]),
                    tuple(r.get("hash_ids") or ()),
                )
                for r in _json_lines(path)
            ]
        else:
            with path.open(newline="") as file:
                rows = [
                    (float(r["arrival_ms"]), int(r["input_tokens"]), int(r["output_tokens"]), ())
                    for r in csv.DictReader(file)
                ]
    except OSError as e:
        raise ConfigError(f"{path}: {file_reason(e)}") from None
    except (KeyError, TypeError, ValueError, csv.Error) as e:
        raise ConfigError(f"{path} is not a trace: {type(e).__name__}: {e}") from None
    rows = [r for r in rows[:count] if r[1] > 0]
    if not rows:
        raise ConfigError(f"{path} has no requests")
    start = min(r[0] for r in rows)
    salt = rng.getrandbits(32)
    return [
        Item(_trace_prompt(rng, salt, length, hashes, vocab_size), max(1, out), (at - start) / 1e3)
        for at, length, out, hashes in rows
    ]


def _trace_prompt(
    rng: random.Random, salt: int, length: int, hashes: Sequence[int], vocab_size: int
) -> tuple[int, ...]:
    if not hashes:
        return _ids(rng, length, vocab_size)
    per_block = -(-length // len(hashes))
    # Traces use blocks of a power of two; the last one may be partial.
    per_block = 1 << (per_block - 1).bit_length()
    ids: list[int] = []
    for h in hashes:
        ids += _ids(random.Random(f"{salt}:{h}"), per_block, vocab_size)
    return tuple(ids[:length])


def cut(items: Sequence[Item], max_input: int | None, max_output: int | None) -> list[Item]:
    """The items with longer prompts and outputs cut; text prompts are left as they are."""
    return [
        replace(
            item,
            prompt=item.prompt if isinstance(item.prompt, str) else item.prompt[:max_input],
            max_tokens=min(item.max_tokens, max_output or item.max_tokens),
        )
        for item in items
    ]


def as_text(item: Item, rng: random.Random) -> Item:
    """For APIs that take no ids: as many words, most of which are one token each."""
    if isinstance(item.prompt, str):
        return item
    return replace(item, prompt=" ".join(rng.choices(_WORDS.split(), k=len(item.prompt))))


def backwards(item: Item) -> Item:
    """The item with its prompt read backwards: as long, and with another beginning. Texts keep
    their words, and are of as many tokens or nearly so."""
    if not isinstance(item.prompt, str):
        return replace(item, prompt=item.prompt[::-1])
    messages = tuple({**m, "content": _backwards(m.get("content"))} for m in item.messages)
    return replace(item, prompt=_backwards(item.prompt), messages=messages)


def _backwards(content: Any) -> Any:
    """A text, or the texts among a message's parts, with the words in reverse."""
    if isinstance(content, str):
        words = content.split()
        # Not all languages have blanks between words.
        return " ".join(words[::-1]) if len(words) > 1 else content[::-1]
    if isinstance(content, list):
        return [_backwards(part) for part in cast(list[Any], content)]
    if isinstance(content, dict) and "text" in content:
        part = cast(dict[str, Any], content)
        return {**part, "text": _backwards(part["text"])}
    return content


def arrivals(
    items: Sequence[Item],
    rng: random.Random,
    *,
    rate: float,
    burstiness: float,
    speed: float | None,
) -> list[float]:
    """Seconds from the start at which each item is sent.

    speed  replay recorded times this many times as fast; wins over rate
    rate   requests per second; inf = all at once. Recorded times are stretched to that rate,
           else gaps are gamma distributed (burstiness 1 = Poisson, less = burstier).
    """
    recorded = [item.arrival_s for item in items if item.arrival_s is not None]
    if speed is not None:
        if len(recorded) < len(items):
            raise ConfigError("--trace-speed: the data set has no arrival times")
        return [t / speed for t in recorded]
    if rate == float("inf"):
        return [0.0] * len(items)
    if len(recorded) == len(items) and recorded[-1] > 0:
        factor = len(items) / rate / recorded[-1]
        return [t * factor for t in recorded]
    times: list[float] = []
    now = 0.0
    for _ in items:
        times.append(now)
        now += rng.gammavariate(burstiness, 1 / rate / burstiness)
    return times


def _ids(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    low = min(FIRST_ID, vocab_size // 2)
    return tuple(rng.choices(range(low, vocab_size), k=count))


def _json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: {file_reason(e)}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise ConfigError(f"{path}, line {number}: {e}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}: an object is needed")
        yield row
