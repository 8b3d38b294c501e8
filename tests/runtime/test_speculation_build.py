"""From `speculative_config` to an engine that drafts, on tiny random models with a tokenizer."""

import json

import numpy as np
import pytest
import tokenizers

from tests.models import tiny
from xylite import EngineConfig, SamplingParams, TextEngine
from xylite.errors import ConfigError
from xylite.runtime.speculation import StepCosts


def save(path, *, first="!", vocab_size=300, **config):
    """A model's directory without weights; `first` is the text of token 0."""
    path.mkdir()
    letters = [first, *(chr(c) for c in range(0x22, 0x7F)), "Ġ", "Ċ"]
    vocab = {t: i for i, t in enumerate(letters)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.save(str(path / "tokenizer.json"))
    cfg = tiny.config(hidden_size=32, intermediate_size=48, vocab_size=vocab_size, **config)
    (path / "config.json").write_text(json.dumps(cfg))
    return str(path)


def settings(model, speculative, **more):
    base = {
        "model": model,
        "load_format": "dummy",
        "dtype": "float32",
        "device": "reference",
        "num_blocks": 32,
        "block_size": 8,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
    }
    return EngineConfig(**base | more, speculative_config=speculative)


async def say(config):
    """Ids of a greedy and of a seeded answer, and the engine's counts."""
    async with TextEngine(config) as engine:
        ids = []
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, max_tokens=40, seed=1)
            events = [e async for e in engine.generate("abcabcabcabc", params)]
            ids.append([t for e in events for t in e.token_ids])
        return ids, engine.snapshot()


@pytest.fixture
def free(monkeypatch):
    """Draft tokens cost nothing: so they are made however busy this machine is."""
    monkeypatch.setattr(StepCosts, "knows", lambda self, num_tokens: True)
    monkeypatch.setattr(StepCosts, "seconds", lambda self, sizes: np.ones(len(sizes)))
    monkeypatch.setattr(StepCosts, "largest_trial", 10**6)


@pytest.mark.parametrize("method", ["ngram", "suffix", "same model", "other model"])
async def test_the_configured_drafter_drafts_and_changes_nothing(method, tmp_path, free):
    model = save(tmp_path / "model")
    given = {"method": method}
    if method == "same model":
        given = {"model": model}
    elif method == "other model":
        given = {"model": save(tmp_path / "draft", num_hidden_layers=1), "method": "draft_model"}
    plain, before = await say(settings(model, None))
    drafted, counts = await say(settings(model, given))
    assert drafted == plain
    assert before["spec_num_drafts"] == 0 < counts["spec_num_drafts"]
    if method == "same model":
        assert counts["spec_num_accepted_tokens"] == counts["spec_num_draft_tokens"] > 40
        assert counts["num_steps"] < 0.6 * before["num_steps"]


async def test_a_draft_model_shares_the_memory_for_kv(tmp_path):
    model = save(tmp_path / "model")
    blocks = []
    for given in (None, {"model": model}):
        config = settings(model, given, num_blocks=None, kv_cache_memory_bytes=2**20)
        async with TextEngine(config) as engine:
            blocks.append(engine.snapshot()["num_blocks"])
    assert blocks[1] == blocks[0] // 2


@pytest.mark.parametrize(
    ("draft", "words"),
    [({"first": "ß"}, ["token 0", "b'!'"]), ({"vocab_size": 90}, ["96", "90"])],
)
async def test_a_draft_model_of_another_vocabulary_is_refused(draft, words, tmp_path):
    model, other = save(tmp_path / "model"), save(tmp_path / "draft", **draft)
    with pytest.raises(ConfigError) as e:
        async with TextEngine(settings(model, {"model": other})):
            pass
    assert e.value.param == "speculative_config"
    assert all(w in str(e.value) for w in [*words, "draft"]), str(e.value)


async def test_a_draft_model_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        async with TextEngine(settings(save(tmp_path / "model"), {"model": "nowhere"})):
            pass


def test_a_wrong_setting_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="eagle3"):
        TextEngine(EngineConfig(speculative_config={"method": "eagle3"}))
