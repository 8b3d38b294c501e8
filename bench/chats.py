"""Short chats: what a variant answers, and how far its next-token distributions are from another's.

Perplexity on running text hides errors that are small against a text's own uncertainty. After a
chat's template, a few tokens decide about the whole answer, and two of them are often as likely: an
error that perplexity does not show gives another answer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from xylite import SamplingParams, TextEngine

QUESTIONS: Final = (
    "What is the capital of France?",
    "What is 2+2?",
    "Name three primary colors.",
    "Who wrote Romeo and Juliet?",
    "What is the largest planet in our solar system?",
    "Write a haiku about the sea.",
    "How many days are in a week?",
    "What is the boiling point of water?",
    "Explain gravity in one sentence.",
    "What is the opposite of hot?",
    "Give me a recipe for pancakes.",
    "What does a doctor do?",
    "Why is the sky blue?",
    "Tell me a joke.",
    "How do I boil an egg?",
    "What is a noun?",
    "Which animal says meow?",
    "List four fruits.",
    "What language is spoken in Brazil?",
    "How does a bicycle stay upright?",
    "What is the freezing point of water?",
    "Write one sentence about autumn.",
    "What is Python used for?",
    "Who was Albert Einstein?",
)
LISTED: Final = 100  # most likely tokens of a distribution that are told apart

# The log-probabilities of a position's most likely tokens.
Distribution = Mapping[int, float]


@dataclass(frozen=True)
class Chats:
    """answers: of this variant, greedy; positions: its distributions at each token of the first
    variant's answers, which every variant is given."""

    answers: list[tuple[int, ...]]
    positions: list[list[Distribution]]


async def ask(engine: TextEngine, questions: Sequence[str], new: int, given: Chats | None) -> Chats:
    """A variant's chats; `given`: the first variant's, None if this is the first."""
    answers: list[tuple[int, ...]] = []
    prompts: list[list[int]] = []
    for question in questions:
        prompts.append(await engine.render([{"role": "user", "content": question}]))
        answers.append(await _answer(engine, prompts[-1], new))
    told = answers if given is None else given.answers
    positions = [
        await _positions(engine, prompt, answer)
        for prompt, answer in zip(prompts, told, strict=True)
    ]
    return Chats(answers, positions)


async def _answer(engine: TextEngine, prompt: Sequence[int], new: int) -> tuple[int, ...]:
    ids: list[int] = []
    async for event in engine.generate(prompt, SamplingParams(max_tokens=new, temperature=0.0)):
        if event.error is not None:
            raise event.error
        ids += event.token_ids
    return tuple(ids)


async def _positions(
    engine: TextEngine, prompt: Sequence[int], answer: Sequence[int]
) -> list[Distribution]:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=LISTED)
    found: list[Distribution] = []
    async for event in engine.generate([*prompt, *answer], params):
        if event.error is not None:
            raise event.error
        for entry in (event.prompt_logprobs or ())[len(prompt) :]:
            assert entry is not None, "only a prompt's first token has no distribution"
            found.append({t.token_id: t.logprob for t in entry.top})
    assert len(found) == len(answer), (len(found), len(answer))
    return found


def divergence(ours: Distribution, theirs: Distribution) -> float:
    """Kullback-Leibler divergence of ours from theirs in nats: the tokens that both list, and all
    others as one. So it is a lower bound, close where LISTED tokens hold nearly everything."""
    both = ours.keys() & theirs.keys()
    found = sum(math.exp(theirs[t]) * (theirs[t] - ours[t]) for t in both)
    p, q = (max(1.0 - sum(math.exp(x[t]) for t in both), 1e-9) for x in (theirs, ours))
    return max(found + p * math.log(p / q), 0.0)


def compared(ours: Chats, first: Chats) -> dict[str, float | int] | None:
    """The figures of one variant against the first one; None if that said nothing.

    divergence  mean over the positions of the first variant's answers
    top1        share of these positions with the same most likely token
    same        share of answers that are the first variant's, token by token
    """
    pairs = [
        pair
        for a, b in zip(ours.positions, first.positions, strict=True)
        for pair in zip(a, b, strict=True)
    ]
    if not pairs:
        return None
    top1 = sum(max(a, key=a.__getitem__) == max(b, key=b.__getitem__) for a, b in pairs)
    same = sum(a == b for a, b in zip(ours.answers, first.answers, strict=True))
    return {
        "divergence": round(sum(divergence(a, b) for a, b in pairs) / len(pairs), 5),
        "top1": round(top1 / len(pairs), 4),
        "same": round(same / len(first.answers), 3),
        "positions": len(pairs),
        "answers": len(first.answers),
    }
