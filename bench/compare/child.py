"""The child's side of an offline measurement: cases come as lines of JSON, figures go back so.

Only the standard library, because children run in other engines' environments too.

    {"prefill": N}                              prompts of N tokens, the first new token of each
    {"decode": B, "context": C, "new": T}       B prompts of C tokens at once, T tokens of each

A child answers {"ready": versions} when its model is loaded, and {"tok_s": X} to each case, or what
figures its cases have; a case that fails ends it.
"""

import importlib
import json
import os
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

Prompts = list[list[int]]
M = TypeVar("M")

NUM_FIRST: Final = 3  # times that what comes before the first tokens is measured; the median counts


@dataclass
class Model:
    """A loaded engine.

    seconds  from giving it the prompts until each has so many new tokens
    """

    vocab_size: int
    seconds: Callable[[Prompts, int], float]

    def prefill(self, prompt: list[int]) -> float:
        """Seconds from giving the prompt to its first new token."""
        return self.seconds([prompt], 1)

    def decode(self, prompts: Prompts, new: int) -> float:
        """New tokens per second of all prompts together, after each one's first: the difference to
        one token of each, for every engine alike, since not all of them tell when a token came."""
        first = statistics.median(self.seconds(prompts, 1) for _ in range(NUM_FIRST))
        return len(prompts) * (new - 1) / (self.seconds(prompts, new) - first)


@dataclass(frozen=True)
class Start:
    """What a child is told: model directory, settings of the engine, threads or 0 for its own."""

    model: str
    settings: dict[str, Any]
    threads: int


def prompts(seed: int, count: int, length: int, vocab_size: int) -> Prompts:
    """Random prompts, other ones for each seed; low ids are bytes and control tokens."""
    rng = random.Random(seed)
    return [rng.choices(range(300, vocab_size), k=length) for _ in range(count)]


def answer(model: Model, case: dict[str, int], seed: int) -> dict[str, float]:
    """Tokens per second of a case."""
    if "prefill" in case:
        asked = prompts(seed, NUM_FIRST, case["prefill"], model.vocab_size)
        return {"tok_s": case["prefill"] / statistics.median(map(model.prefill, asked))}
    batch = prompts(seed, case["decode"], case["context"], model.vocab_size)
    return {"tok_s": model.decode(batch, case["new"])}


def serve(
    load: Callable[[Start], tuple[M, dict[str, str]]],
    answer: Callable[[M, dict[str, Any], int], dict[str, float]] = answer,
) -> None:
    """Loads the model that argv[1] (JSON of Start) names and answers cases until stdin ends.

    answer  a case's figures, from the model, the case, and a number that no other case has
    """
    # Libraries print to stdout; the answers keep a pipe of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    model, versions = load(Start(**json.loads(sys.argv[1])))
    print(json.dumps({"ready": versions}), file=answers)
    for seed, line in enumerate(sys.stdin):
        case = json.loads(line)
        print(json.dumps(answer(model, case, seed)), file=answers)


def version(*modules: str) -> dict[str, str]:
    """Versions of imported modules."""
    return {name: str(importlib.import_module(name).__version__) for name in modules}
