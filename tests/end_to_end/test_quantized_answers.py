"""Quantised weights and 8-bit activations change hardly anything of what the model answers.

Short chats show what perplexity hides: a few tokens after the template decide about the answer, and
for the first question two of them are nearly as likely ("The" 15%, "L" 14%).
"""

import asyncio
from typing import Any

import pytest

from bench import chats
from bench.chats import Chats
from xylite import EngineConfig, TextEngine
from xylite.ops import load

pytestmark = pytest.mark.model

TOKENS = 16


def asked(first: Chats | None, **settings: Any) -> tuple[Chats, str]:
    """The chats of the demo model, and its answer to the first question."""

    async def ask() -> tuple[Chats, str]:
        config = EngineConfig(
            model="demo",
            kv_cache_memory_bytes=2**27,
            max_num_batched_tokens=128,
            max_num_seqs=8,
            enable_prefix_caching=False,
            max_logprobs=chats.LISTED,
            **settings,
        )
        async with TextEngine(config) as engine:
            found = await chats.ask(engine, chats.QUESTIONS[:12], TOKENS, first)
            return found, engine.decode(found.answers[0], skip_special_tokens=True)

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def exact() -> Chats:
    found, text = asked(None, dtype="float32")
    assert text == "The capital of France is Paris."
    return found


@pytest.mark.parametrize(
    ("quantization", "most"), [("stored", 0.0015), ("int4", 0.0015), ("int8", 0.004)]
)
def test_quantised_models_answer_as_the_exact_one(quantization: str, most: float, exact: Chats):
    assert load("cpu").stored_packers, "the CPU kernels are not built: is there a C++ compiler?"
    found, text = asked(exact, quantization=quantization)
    figures = chats.compared(found, exact)
    assert "Paris" in text, (text, figures)
    assert figures["divergence"] <= most, figures
    assert figures["top1"] >= 0.97, figures
    assert figures["same"] >= 0.65, figures
