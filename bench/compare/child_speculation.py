"""xylite with and without drafts: two engines in this process answer the same requests.

    {"workload": NAME, "concurrency": C, "number": N, "new": T, "drafts": 0 or 1}

N requests of a workload, T tokens of each, C at a time, from the engine that drafts or from the
other. Prompts are computed anew for each case, and what a drafter has learnt from the answers to
one case it does not use for another.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.compare import child
from xylite import EngineConfig, SamplingParams, TextEngine

PROMPTS: Final = Path(__file__).parent.parent / "traces" / "speculation.jsonl"
RANDOM_PROMPT: Final = 64
RANDOM_SEED: Final = 20270


class Engines:
    """The two engines with a loop of their own; settings are the engine's that drafts."""

    def __init__(self, start: child.Start):
        settings: dict[str, Any] = {"num_threads": start.threads} if start.threads else {}
        settings |= {"model": start.model, "enable_prefix_caching": False} | start.settings
        self._loop = asyncio.new_event_loop()
        plain: dict[str, Any] = settings | {"speculative_config": None}
        self._engines = tuple(TextEngine(EngineConfig(**s)) for s in (plain, settings))
        for engine in self._engines:
            self._loop.run_until_complete(engine.__aenter__())
        # How much prompt goes into an iteration each has measured at a moment of its own, and goes
        # on measuring; that would be compared too: iterations of 64 tokens instead of 96 take a
        # twentieth more time.
        running = [e._running() for e in self._engines]
        scheduler = running[0].scheduler
        for engine in running:
            engine.scheduler.set_budgets(scheduler.budget, scheduler.mixed_budget)
            engine._budgets = None

    def close(self) -> None:
        for engine in self._engines:
            self._loop.run_until_complete(engine.__aexit__())
        self._loop.close()

    def measure(self, case: Mapping[str, Any], salt: str) -> dict[str, float]:
        """Figures of a case; `salt` keeps drafters from knowing the answers of another one."""
        engine = self._engines[case["drafts"]]
        return self._loop.run_until_complete(_measure(engine, case, salt))


async def _measure(engine: TextEngine, case: Mapping[str, Any], salt: str) -> dict[str, float]:
    workload = case["workload"]
    prompts = await prompts_of(engine, workload, case["number"])
    params = SamplingParams(
        # A greedy continuation of random tokens soon repeats itself: not random at all.
        temperature=1.0 if workload == "random" else 0.0,
        seed=1,
        max_tokens=case["new"],
        ignore_eos=True,
    )
    room = asyncio.Semaphore(case["concurrency"])

    async def one(prompt: list[int]) -> float:
        """Seconds from the first to the last token."""
        async with room:
            first = last = 0.0
            count = 0
            async for event in engine.generate(prompt, params, cache_salt=salt):
                if event.error is not None:
                    raise event.error
                last = time.perf_counter()
                first = first or last
                count += len(event.token_ids)
            assert count == case["new"], f"{count} tokens instead of {case['new']}"
            return last - first

    before = engine.snapshot()
    start = time.perf_counter()
    decoding = await asyncio.gather(*map(one, prompts))
    seconds = time.perf_counter() - start
    figures = {
        "tok_s": len(prompts) * case["new"] / seconds,
        "tpot_mean_ms": sum(decoding) / len(prompts) / (case["new"] - 1) * 1e3,
    }
    return figures | _drafted(before, engine.snapshot()) if case["drafts"] else figures


def _drafted(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Share of draft tokens accepted, in percent, and tokens that a verify gives."""
    drafts, tokens, accepted = (
        after[f"spec_num_{name}"] - before[f"spec_num_{name}"]
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    return {
        "accepted": 100 * accepted / tokens if tokens else 0.0,
        "per_verify": 1 + accepted / drafts if drafts else 1.0,
    }


async def prompts_of(engine: TextEngine, workload: str, number: int) -> Sequence[list[int]]:
    """Token ids of `number` prompts of a workload, repeated if there are fewer."""
    if workload == "random":
        rng = random.Random(RANDOM_SEED)
        vocab = engine.limits.vocab_size
        return [[rng.randrange(vocab) for _ in range(RANDOM_PROMPT)] for _ in range(number)]
    with PROMPTS.open(encoding="utf-8") as lines:
        rows = [r for r in map(json.loads, lines) if r["workload"] == workload]
    asked = (rows[i % len(rows)] for i in range(number))
    return [
        await (
            engine.render(row["messages"]) if "messages" in row else engine.encode(row["prompt"])
        )
        for row in asked
    ]


def load(start: child.Start) -> tuple[Engines, dict[str, str]]:
    return Engines(start), child.version("xylite", "torch")


def answer(engines: Engines, case: dict[str, Any], seed: int) -> dict[str, float]:
    return engines.measure(case, salt=str(seed))


if __name__ == "__main__":
    child.serve(load, answer)
