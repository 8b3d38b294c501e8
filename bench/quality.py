"""How much a data type or quantisation changes what the model says.

    python -m bench.quality [--variant bfloat16 stored int8] [--text sonnets gsm8k humaneval]
        [--model DIRECTORY] [--output FILE]
    python -m bench.quality --variant float32 --add-to bench/results/quality.json
    python -m bench.quality --render

perplexity   of each text, in sliding windows through the engine: a token is scored once, with at
             least window - stride tokens before it (but for a text's beginning)
top-1        share of these positions at which the most likely token is the first variant's
continued    tokens of greedy answers until they differ from the first variant's, and the share
             of answers that never do
chats        short questions in the chat template: how far next-token distributions over the first
             variant's answers are from its own (divergence), how often the most likely token is
             the same there, and the share of answers that are the same (bench/chats.py)

The first variant is what the others are compared with: bfloat16 unless told otherwise. stored keeps
the quantised weights of a GGUF file, such as the demo model's; float32 and bfloat16 dequantise
them; int8 and int4 quantise what bfloat16 computes with. A variant that ends in -shuffled is the
same model with its channels in another order (bench/shuffled.py): what the format costs where the
weights were not quantised before.

--add-to measures some variants again, or new ones, beside those of an earlier result: the first one
is asked again too, as its answers are needed, and must say what it said then.

--render writes README's table from bench/results/quality.json.
"""

import argparse
import asyncio
import json
import math
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from bench import chats
from bench.compare import machine
from bench.compare.peers import ROOT
from bench.model_dir import write_directory
from bench.quality_results import added, require_same
from bench.shuffled import WEIGHTS, write_shuffled
from xylite import EngineConfig, SamplingParams, TextEngine
from xylite.errors import ConfigError
from xylite.text_engine import TextLogprob

VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "stored": {"quantization": "stored"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8-shuffled": {"quantization": "int8"},
    "int4-shuffled": {"quantization": "int4"},
}
SHUFFLED: Final = "-shuffled"
TEXTS: Final = ROOT / "bench" / "traces" / "texts"
RESULT: Final = ROOT / "bench" / "results" / "quality.json"
README: Final = ROOT / "README.md"
BEGIN, END = "<!-- quality -->\n", "<!-- /quality -->"
ALL: Final = "all"  # texts together
PROMPT_TOKENS: Final = 64  # of a text's window that a greedy answer continues


@dataclass(frozen=True)
class Scored:
    """A scored position: log-probability of the text's token, and the most likely token."""

    logprob: float
    best: int


@dataclass(frozen=True)
class Answers:
    """What one variant says: scored positions by text, greedy answers in a fixed order, chats."""

    positions: Mapping[str, list[Scored]]
    continued: list[tuple[int, ...]]
    chats: chats.Chats


def windows(length: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """(start, end, first) of each window: tokens [start, end) are given, [first, end) scored.

    Every token but the first is scored exactly once.
    """
    assert 1 <= stride < window, f"stride {stride} of a window of {window}"
    found: list[tuple[int, int, int]] = []
    scored = 1
    start = 0
    while scored < length:
        end = min(start + window, length)
        found.append((start, end, scored))
        scored = end
        # The next window begins so that it scores `stride` new tokens at its end.
        start = max(end + stride - window, start + 1)
    return found


def read_text(name: str) -> str:
    """A text of traces/texts, its documents joined by empty lines."""
    lines = (TEXTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return "\n\n".join(json.loads(line)["text"] for line in lines)


def perplexity(positions: Sequence[Scored]) -> float:
    return math.exp(-sum(p.logprob for p in positions) / len(positions))


async def score(engine: TextEngine, ids: Sequence[int], window: int, stride: int) -> list[Scored]:
    """Every token of a text but the first."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    found: list[Scored] = []
    for start, end, first in windows(len(ids), window, stride):
        entries: Sequence[TextLogprob | None] | None = None
        async for event in engine.generate(ids[start:end], params):
            if event.error is not None:
                raise event.error
            entries = entries or event.prompt_logprobs
        assert entries is not None and len(entries) == end - start
        for entry in entries[first - start :]:
            assert entry is not None, "only a window's first token has no score"
            found.append(Scored(entry.logprob, entry.top[0].token_id))
    return found


async def continue_greedily(
    engine: TextEngine, prompts: Sequence[Sequence[int]], new: int
) -> list[tuple[int, ...]]:
    """`new` greedy tokens after each prompt, one prompt after the other."""
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    answers: list[tuple[int, ...]] = []
    for prompt in prompts:
        ids: list[int] = []
        async for event in engine.generate(prompt, params):
            if event.error is not None:
                raise event.error
            ids += event.token_ids
        answers.append(tuple(ids))
    return answers


def prompts_of(texts: Mapping[str, Sequence[int]], count: int) -> list[list[int]]:
    """`count` pieces of PROMPT_TOKENS tokens, from all texts by turns, evenly spread."""
    found: list[list[int]] = []
    each = -(-count // len(texts))
    for i in range(each):
        for ids in texts.values():
            at = i * max(len(ids) - PROMPT_TOKENS, 0) // each
            found.append(list(ids[at : at + PROMPT_TOKENS]))
    return found[:count]


async def answers(variant: str, args: argparse.Namespace, first: Answers | None) -> Answers:
    """Everything one variant is asked; `first`: what the first variant said, None if this is it."""
    if variant.endswith(SHUFFLED):
        with tempfile.TemporaryDirectory() as folder:
            plain, shuffled = Path(folder) / "plain", Path(folder) / "shuffled"
            plain.mkdir()
            shuffled.mkdir()
            write_shuffled(args.model or write_directory(plain), shuffled)
            return await answers_of(str(shuffled), variant, args, first)
    return await answers_of(str(args.model or "demo"), variant, args, first)


async def answers_of(
    model: str, variant: str, args: argparse.Namespace, first: Answers | None
) -> Answers:
    """The same with a given model."""
    settings: dict[str, Any] = {
        "model": model,
        "kv_cache_memory_bytes": 2**28,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "max_logprobs": chats.LISTED,
        **VARIANTS[variant],
    }
    async with TextEngine(EngineConfig(**settings)) as engine:
        texts = {
            name: (await engine.encode(read_text(name)))[: args.max_tokens or None]
            for name in args.text
        }
        positions = {
            name: await score(engine, ids, args.window, args.stride) for name, ids in texts.items()
        }
        prompts = prompts_of(texts, args.prompts)
        continued = await continue_greedily(engine, prompts, args.new_tokens)
        questions = chats.QUESTIONS[: args.questions]
        given = None if first is None else first.chats
        said = await chats.ask(engine, questions, args.answer_tokens, given)
        return Answers(positions, continued, said)


def agreement(ours: Sequence[Scored], theirs: Sequence[Scored]) -> float:
    """Share of positions with the same most likely token."""
    return sum(a.best == b.best for a, b in zip(ours, theirs, strict=True)) / len(ours)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def compared(ours: Answers, first: Answers) -> dict[str, Any]:
    """The figures of one variant against the first one."""
    lengths = [common(a, b) for a, b in zip(ours.continued, first.continued, strict=True)]
    whole = [n == len(answer) for n, answer in zip(lengths, first.continued, strict=True)]
    mine, theirs = dict(ours.positions), dict(first.positions)
    if len(mine) > 1:
        mine[ALL], theirs[ALL] = (sum(x.values(), list[Scored]()) for x in (mine, theirs))
    texts = {
        name: {
            "perplexity": round(perplexity(positions), 4),
            "ratio": round(perplexity(positions) / perplexity(theirs[name]), 5),
            "top1": round(agreement(positions, theirs[name]), 4),
            "tokens": len(positions),
        }
        for name, positions in mine.items()
    }
    return {
        "texts": texts,
        "continued_mean": round(statistics.mean(lengths), 1) if lengths else None,
        "continued_whole": round(statistics.mean(whole), 3) if whole else None,
        "answers": len(lengths),
        "chats": chats.compared(ours.chats, first.chats),
    }


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each variant and text, then the greedy answers."""
    lines = [
        f"{'variant':<13} {'text':<12} {'tokens':>7} {'perplexity':>11} {'ratio':>8} {'top-1':>7}"
    ]
    for variant, found in figures.items():
        for name, t in found["texts"].items():
            lines.append(
                f"{variant:<13} {name:<12} {t['tokens']:>7} {t['perplexity']:>11.3f} "
                f"{t['ratio']:>8.4f} {t['top1']:>7.1%}"
            )
    for variant, found in figures.items():
        if found["answers"]:
            lines.append(
                f"{variant:<13} {found['answers']} greedy answers agree for "
                f"{found['continued_mean']} tokens on average, {found['continued_whole']:.0%} to "
                "the end"
            )
    for variant, found in figures.items():
        if asked := found["chats"]:
            lines.append(
                f"{variant:<13} {asked['answers']} chats: divergence {asked['divergence']:.5f}, "
                f"top-1 {asked['top1']:.1%}, {asked['same']:.0%} of the answers are the same"
            )
    return "\n".join(lines)


def markdown(result: Mapping[str, Any]) -> str:
    """README's table: a row for each variant over all texts, and where it comes from."""
    first = result["compared_with"]
    lines = [
        f"| setting | perplexity | against {first} | same most likely token "
        "| greedy answers agree for | chats: divergence | same answers |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    tokens = 0
    for variant, found in result["variants"].items():
        whole = found["texts"].get(ALL) or next(iter(found["texts"].values()))
        tokens = whole["tokens"]
        flags = " ".join(f"--{k} {v}" for k, v in found["settings"].items())
        named = (f"`{flags}`" if flags else variant) + ", shuffled" * variant.endswith(SHUFFLED)
        cells = [named, f"{whole['perplexity']:.2f}"]
        if variant != first:
            cells += [
                f"{whole['ratio'] - 1:+.2%}",
                f"{whole['top1']:.1%}",
                f"{found['continued_mean']:g} of {result['new_tokens']} tokens",
            ]
            if (asked := found["chats"]) is not None:
                cells += [f"{asked['divergence']:.4f}", f"{asked['same']:.0%}"]
        lines.append("| " + " | ".join(cells) + " |" * (8 - len(cells)))
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    cpu = f"{result['machine']['cpu']} ({', '.join(result['machine']['flags'])})"
    runs = "".join(
        f" {variant}: `{run['command']}`, {run['date'].partition('T')[0]}, commit "
        f"{run['commit'] or 'unknown'}."
        for variant, found in result["variants"].items()
        if (run := found.get("run"))
    )
    return "\n".join(lines) + (
        f"\n\nModel {result['model']}: {tokens:,} tokens of {', '.join(result['texts'])} in "
        f"windows of {result['window']}, {result['prompts']} greedy answers, "
        f"{result['questions']} chats of {result['answer_tokens']} tokens. "
        f"`{result['command']}`, {result['date'].partition('T')[0]}, "
        f"commit {result['commit'] or 'unknown'}, {cpu}, {versions}.{runs}\n"
    )


def with_quality(text: str, result: Mapping[str, Any]) -> str:
    """README's text with this result's table."""
    assert text.count(BEGIN) == text.count(END) == 1, "README has no place for the table"
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{markdown(result)}{END}{rest.partition(END)[2]}"


def _without_folder(word: str) -> str:
    """A path of this machine's last name; other words as they are."""
    return Path(word).name if Path(word).is_absolute() else word


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.quality",
        description="Measures how much a data type or quantisation changes what the model says.",
    )
    known = sorted(p.stem for p in TEXTS.glob("*.jsonl"))
    add = parser.add_argument
    add("--variant", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add("--text", nargs="+", choices=known, default=known)
    add("--model", type=Path, help="default: the demo model")
    add("--window", type=int, default=1024)
    add("--stride", type=int, default=512)
    add("--max-tokens", type=int, default=0, help="of each text; 0: all")
    add("--prompts", type=int, default=24, help="greedy answers")
    add("--new-tokens", type=int, default=64, help="of each answer")
    add("--questions", type=int, default=len(chats.QUESTIONS), help="chats, of those there are")
    add("--answer-tokens", type=int, default=32, help="of a chat's answer at most")
    add("--output", type=Path, help="JSON file")
    add("--add-to", type=Path, help="an earlier JSON file, to which the variants are added")
    add("--render", action="store_true", help="only write README's table from the last result")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0; 2 if no variant is there, or an earlier result cannot be added to."""
    parser = _parser()
    words = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(words)
    if args.render:
        README.write_text(with_quality(README.read_text(), json.loads(RESULT.read_text())))
        return 0
    if not 1 <= args.stride < args.window:
        parser.error(f"--stride must be in [1, window - 1 = {args.window - 1}], got {args.stride}")
    shuffled = [v for v in args.variant if v.endswith(SHUFFLED)]
    if shuffled and args.model is not None and not (args.model / WEIGHTS).is_file():
        parser.error(f"{shuffled[0]} needs a directory with {WEIGHTS}, got {args.model}")
    about = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": "python -m bench.quality " + shlex.join(map(_without_folder, words)),
        "model": args.model.name if args.model else "demo",
        "texts": args.text,
        "window": args.window,
        "stride": args.stride,
        "prompts": args.prompts,
        "new_tokens": args.new_tokens,
        "questions": args.questions,
        "answer_tokens": args.answer_tokens,
        "versions": {n: metadata.version(n) for n in ("xylite", "torch", "numpy")},
        "commit": machine.commit(ROOT),
        "machine": machine.describe(),
    }
    add_to: Path | None = args.add_to
    old = None if add_to is None else json.loads(add_to.read_text())
    if old is not None:
        first = old["compared_with"]
        args.variant = [first, *(v for v in args.variant if v != first)]
        try:
            require_same(old, {**about, "compared_with": first})
        except ValueError as e:
            parser.error(f"{add_to}: {e}")
    found = _asked(args)
    if not found:
        return 2
    first = next(iter(found.values()))
    figures = {
        variant: {"settings": VARIANTS[variant], **compared(a, first)}
        for variant, a in found.items()
    }
    print(table(figures))
    result = {**about, "compared_with": next(iter(found)), "variants": figures}
    if add_to is not None and old is not None:
        try:
            _write(add_to, added(old, result, VARIANTS))
        except ValueError as e:
            print(f"{add_to} stays as it is: {e}", file=sys.stderr)
            return 2
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        _write(args.output, result)
    return 0


def _asked(args: argparse.Namespace) -> dict[str, Answers]:
    """What each variant says; those that the device lacks are named and left out."""
    found: dict[str, Answers] = {}
    for variant in args.variant:
        start = time.perf_counter()
        try:
            first = next(iter(found.values()), None)
            found[variant] = asyncio.run(answers(variant, args, first))
        except ConfigError as e:
            if e.param != "quantization":
                raise
            print(f"left out: {variant}: {e}", file=sys.stderr)
            continue
        print(f"{variant}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return found


def _write(path: Path, result: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
