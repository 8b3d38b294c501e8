"""How much faster drafts make generation, and how often they are right.

    python -m bench.speculation --model demo --speculative-config '{"method": "ngram"}'

Two engines in one process, with and without drafts, answer the same requests in turn; each round
gives one ratio, and the median of the ratios is printed. Prompts are computed anew in each round.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xylite import EngineConfig, SamplingParams, TextEngine

PROMPTS = Path(__file__).parent / "traces" / "speculation.jsonl"
WORKLOADS = ("edit", "quote", "json", "chat", "random")
RANDOM_PROMPT = 64


@dataclass(frozen=True)
class Measured:
    """One round of one engine.

    seconds          from the first request to the last token
    decode_seconds   summed over requests, from first to last token
    num_tokens       output of all requests
    num_drafts ...   the engine's counters, this round's share
    """

    seconds: float
    decode_seconds: float
    num_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True)
class Row:
    """One line of the result: medians over rounds."""

    workload: str
    concurrency: int
    tokens_per_second: float
    tokens_per_second_drafting: float
    speed_up: float
    decode_speed_up: float
    acceptance: float
    tokens_per_verify: float


async def prompts_of(engine: TextEngine, workload: str, number: int) -> list[list[int]]:
    """Token ids of `number` prompts of a workload, repeated if there are fewer."""
    if workload == "random":
        rng = random.Random(20270)
        vocab = engine.limits.vocab_size
        return [[rng.randrange(vocab) for _ in range(RANDOM_PROMPT)] for _ in range(number)]
    with PROMPTS.open(encoding="utf-8") as lines:
        rows = [r for r in map(json.loads, lines) if r["workload"] == workload]
    made = []
    for i in range(number):
        row = rows[i % len(rows)]
        if "messages" in row:
            made.append(await engine.render(row["messages"]))
        else:
            made.append(await engine.encode(row["prompt"]))
    return made


async def measure(
    engine: TextEngine,
    prompts: Sequence[list[int]],
    concurrency: int,
    params: SamplingParams,
    salt: str,
) -> Measured:
    """Answer all prompts, `concurrency` at a time.

    salt  keeps rounds apart: a drafter must not know the answers from an earlier one
    """
    room = asyncio.Semaphore(concurrency)
    decode_seconds = 0.0
    num_tokens = 0

    async def one(prompt: list[int]) -> None:
        nonlocal decode_seconds, num_tokens
        async with room:
            first = last = 0.0
            async for event in engine.generate(prompt, params, cache_salt=salt):
                if event.error is not None:
                    raise event.error
                last = time.perf_counter()
                first = first or last
                num_tokens += len(event.token_ids)
            decode_seconds += last - first

    before = engine.snapshot()
    start = time.perf_counter()
    await asyncio.gather(*map(one, prompts))
    seconds = time.perf_counter() - start
    after = engine.snapshot()

    def grown(name: str) -> int:
        return after[f"spec_num_{name}"] - before[f"spec_num_{name}"]

    return Measured(
        seconds,
        decode_seconds,
        num_tokens,
        grown("drafts"),
        grown("draft_tokens"),
        grown("accepted_tokens"),
    )


def row_of(
    workload: str, concurrency: int, plain: Sequence[Measured], drafting: Sequence[Measured]
) -> Row:
    """Medians of the rounds; ratios are taken round by round."""
    pairs = list(zip(plain, drafting, strict=True))
    verifies = sum(d.num_drafts for d in drafting)
    accepted = sum(d.num_accepted_tokens for d in drafting)
    drafted = sum(d.num_draft_tokens for d in drafting)
    return Row(
        workload=workload,
        concurrency=concurrency,
        tokens_per_second=statistics.median(p.num_tokens / p.seconds for p in plain),
        tokens_per_second_drafting=statistics.median(d.num_tokens / d.seconds for d in drafting),
        speed_up=statistics.median(p.seconds / d.seconds for p, d in pairs),
        decode_speed_up=statistics.median(p.decode_seconds / d.decode_seconds for p, d in pairs),
        acceptance=accepted / drafted if drafted else 0.0,
        tokens_per_verify=1 + accepted / verifies if verifies else 1.0,
    )


def table(rows: Sequence[Row]) -> str:
    head = (
        f"{'workload':<9}{'at once':>8}{'tok/s':>9}{'drafting':>10}{'speed-up':>10}{'decode':>8}"
        f"{'accepted':>10}{'per verify':>12}"
    )
    lines = [
        f"{r.workload:<9}{r.concurrency:>8}{r.tokens_per_second:>9.1f}"
        f"{r.tokens_per_second_drafting:>10.1f}{r.speed_up:>9.2f}x{r.decode_speed_up:>7.2f}x"
        f"{r.acceptance:>9.0%}{r.tokens_per_verify:>13.2f}"
        for r in rows
    ]
    return "\n".join([head, *lines])


async def compare(args: argparse.Namespace) -> list[Row]:
    settings: Mapping[str, Any] = {
        "model": args.model,
        "dtype": args.dtype,
        "device": args.device,
        "max_model_len": args.max_model_len,
        "max_num_seqs": max(args.concurrency),
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "enable_prefix_caching": False,
    }
    given = json.loads(args.speculative_config)
    rows: list[Row] = []
    async with (
        TextEngine(EngineConfig(**settings)) as plain,
        TextEngine(EngineConfig(**settings, speculative_config=given)) as drafting,
    ):
        for concurrency in args.concurrency:
            for workload in args.workloads:
                # Greedy continuations of random tokens soon repeat themselves: not random at all.
                params = SamplingParams(
                    temperature=1.0 if workload == "random" else 0.0,
                    seed=1,
                    max_tokens=args.max_tokens,
                    ignore_eos=True,
                )
                number = args.num_prompts or max(2 * concurrency, 8)
                prompts = await prompts_of(plain, workload, number)
                results: tuple[list[Measured], list[Measured]] = ([], [])
                for i in range(args.rounds + 1):
                    for k in (0, 1) if i % 2 else (1, 0):
                        engine = (plain, drafting)[k]
                        salt = f"{workload} {concurrency} {i}"
                        got = await measure(engine, prompts, concurrency, params, salt)
                        if i:  # the first round only warms up
                            results[k].append(got)
                rows.append(row_of(workload, concurrency, *results))
                print(table(rows).splitlines()[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--speculative-config", default='{"method": "ngram"}')
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument(
        "--num-prompts", type=int, help="default: twice the concurrency, at least 8"
    )
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    rows = asyncio.run(compare(args))
    print()
    print(table(rows))
    if args.save:
        result = {"settings": {k: str(v) for k, v in vars(args).items()}}
        args.save.write_text(json.dumps({**result, "rows": [asdict(r) for r in rows]}, indent=1))


if __name__ == "__main__":
    main()
