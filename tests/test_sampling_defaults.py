"""Sampling parameters that come from the model, and what is wrong with them."""

import json
import os

import pytest

from xylite.config import EngineConfig
from xylite.errors import ConfigError
from xylite.sampling_defaults import sampling_defaults


def defaults(own=None, **settings):
    return sampling_defaults(EngineConfig(model="x", **settings), own or {})


OWN = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 50, "eos_token_id": 2}


def test_the_models_own_are_taken_unless_turned_off_or_replaced(tmp_path):
    taken = {"temperature": 0.6, "top_k": 20, "default_max_tokens": 50}
    assert defaults(OWN) == taken
    assert defaults(OWN, generation_config="vllm") == {}
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.5}))
    assert defaults(OWN, generation_config=str(tmp_path)) == {"top_p": 0.5}
    over = {"temperature": 0.1, "max_new_tokens": 7}
    assert defaults(OWN, override_generation_config=over) == {
        **taken,
        "temperature": 0.1,
        "default_max_tokens": 7,
    }


def test_a_temperature_that_the_file_does_not_use_is_no_default():
    assert "temperature" not in defaults({**OWN, "do_sample": False})
    over = {"temperature": 0.1}
    assert defaults({**OWN, "do_sample": False}, override_generation_config=over)["temperature"]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": 3}, r"temperature must be in \[0, 2\], got 3; override_generation_config"),
        ({"top_k": 1.5}, "top_k must be a whole number, got 1.5"),
        ({"top_k": True}, "top_k must be a whole number, got True"),
        ({"max_new_tokens": 0}, r"max_new_tokens must be in \[1, 2147483647\], got 0"),
        ({"max_new_tokens": [5]}, r"max_new_tokens must be a whole number, got \[5\]"),
    ],
)
def test_what_would_refuse_every_request_stops_the_start(own, said):
    with pytest.raises(ConfigError, match=f"generation_config: {said}"):
        defaults(own)
    with pytest.raises(ConfigError, match=f"generation_config: {said}"):
        defaults(override_generation_config=own)


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "generation_config.json")
    with pytest.raises(ConfigError, match="cannot be read: it is not a regular file"):
        defaults(generation_config=str(tmp_path))


def test_an_unknown_override_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match="'temp' is not a sampling default.*temperature.*max_new"):
        defaults(override_generation_config={"temp": 1})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"[1]", "is not a JSON object: "),
        (b"{", "is not a JSON object: "),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_setting_and_the_reason(
    content, said, tmp_path
):
    path = tmp_path / "generation_config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        defaults(generation_config=str(tmp_path))
    assert str(raised.value).startswith(f"generation_config {path}: {said}")
    assert raised.value.param == "generation_config"
