"""`speculative_config`: what is completed, what is refused, what reaches the drafter."""

import pytest

from xylite import plugins
from xylite.config import DRAFT_TOKENS, SpeculativeConfig, speculative
from xylite.errors import ConfigError
from xylite.runtime import speculation
from xylite.runtime.drafters import DraftOptions


def test_the_methods_are_the_drafters_there_are():
    assert sorted(DRAFT_TOKENS) == plugins.names("runtime.drafters")


def test_settings_are_completed():
    assert speculative({"method": "ngram"}) == SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=16,
        prompt_lookup_min=1,
        prompt_lookup_max=16,
        suffix_decoding_max_cached_requests=10_000,
        suffix_decoding_max_spec_factor=4.0,
        suffix_decoding_min_token_prob=0.1,
    )
    one = speculative({"method": "ngram", "prompt_lookup_max": 1})
    assert (one.prompt_lookup_min, one.prompt_lookup_max) == (1, 1)
    one = speculative({"method": "ngram", "prompt_lookup_min": 20})
    assert (one.prompt_lookup_min, one.prompt_lookup_max) == (20, 20)
    assert speculative({"model": "some/path"}).method == "draft_model"
    assert (
        speculative({"method": "suffix", "num_speculative_tokens": 3}).num_speculative_tokens == 3
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["method", "ngram"]),
        ({"method": "eagle3"}, ["eagle3", "ngram", "suffix", "draft_model"]),
        ({"method": "ngram", "prompt_lookup_mx": 3}, ["prompt_lookup_mx"]),
        ({"method": "ngram", "num_speculative_tokens": 0}, ["num_speculative_tokens", "1"]),
        ({"method": "ngram", "num_speculative_tokens": 65}, ["num_speculative_tokens", "64"]),
        ({"method": "ngram", "num_speculative_tokens": "4"}, ["num_speculative_tokens", "int"]),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, ["(5)", "(3)"]),
        ({"method": "ngram", "model": "x"}, ["model", "ngram"]),
        ({"method": "suffix", "prompt_lookup_max": 3}, ["prompt_lookup_max", "suffix"]),
        ({"method": "ngram", "suffix_decoding_min_token_prob": 0.2}, ["suffix_decoding", "ngram"]),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, ["min_token_prob", "1"]),
        ({"method": "draft_model"}, ["draft_model", "model"]),
    ],
)
def test_a_wrong_setting_is_named(given, words):
    with pytest.raises(ConfigError) as e:
        speculative(given)
    assert e.value.param == "speculative_config"
    assert all(w in str(e.value) for w in [*words, "speculative_config"])


def test_settings_reach_the_drafter():
    made = speculation.make(
        speculative({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 3}),
        lambda: 0.0,
    )
    assert made.max_draft == 3
    assert (made._proposer._min, made._proposer._max) == (3, 16)
    made = speculation.make(
        speculative({"method": "suffix", "suffix_decoding_max_cached_requests": 9}), lambda: 0.0
    )
    assert made._proposer._options == DraftOptions(
        num_tokens=16,
        lookup_min=1,
        lookup_max=16,
        max_cached_requests=9,
        max_spec_factor=4.0,
        min_token_prob=0.1,
    )
