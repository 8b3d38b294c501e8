"""Sampling parameters that a model's generation_config sets where a request says nothing."""

import logging
import os
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from xylite.config import EngineConfig
from xylite.errors import ConfigError, RequestError, file_reason, file_size
from xylite.runtime.request import MAX_INT, Limits, SamplingParams, check_params

# generation_config.json's names that SamplingParams has too
_DEFAULTS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_WHOLE: Final = ("top_k", "default_max_tokens")
_NO_LIMITS: Final = Limits(vocab_size=MAX_INT, max_model_len=MAX_INT, max_kv_tokens=MAX_INT)

_log = logging.getLogger(__name__)


def sampling_defaults(config: EngineConfig, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Sampling defaults of the model's generation_config, or of the one given instead."""
    found: Mapping[str, Any] = own
    if config.generation_config == "vllm":
        found = {}
    elif config.generation_config != "auto":
        path = os.path.join(config.generation_config, "generation_config.json")
        found = _read_json_object(path)
    merged = {**found, **config.override_generation_config}
    unknown = sorted(set(config.override_generation_config) - set(_DEFAULTS) - {"max_new_tokens"})
    if unknown:
        raise ConfigError(
            f"override_generation_config: {unknown[0]!r} is not a sampling default "
            f"(known: {', '.join(_DEFAULTS)}, max_new_tokens)",
            param="override_generation_config",
        )
    defaults = {k: merged[k] for k in _DEFAULTS if merged.get(k) is not None}
    if found.get("do_sample") is False and "temperature" not in config.override_generation_config:
        defaults.pop("temperature", None)
    if merged.get("max_new_tokens") is not None:
        defaults["default_max_tokens"] = merged["max_new_tokens"]
    _check(defaults)
    if defaults:
        _log.info("sampling defaults from the model's generation_config: %s", defaults)
    return defaults


def _check(defaults: Mapping[str, Any]) -> None:
    """ConfigError if a request that sets nothing would be refused, whoever is to blame."""
    for name, value in defaults.items():
        shown = "max_new_tokens" if name == "default_max_tokens" else name
        kind, said = (int, "a whole number") if name in _WHOLE else (int | float, "a number")
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ConfigError(f"generation_config: {shown} must be {said}, got {value!r}")
    try:
        check_params(SamplingParams(**defaults), _NO_LIMITS)
    except RequestError as e:
        message = e.message.replace("default_max_tokens", "max_new_tokens")
        raise ConfigError(
            f"generation_config: {message}; override_generation_config can replace it",
            param="override_generation_config",
        ) from None


def _read_json_object(path: str) -> Mapping[str, Any]:
    try:
        file_size(path)  # a pipe is refused, not waited for
        with open(path, "rb") as f:
            return msgspec.json.decode(f.read(), type=dict[str, Any])
    except OSError as e:
        said = file_reason(e)
    except msgspec.DecodeError as e:
        said = f"is not a JSON object: {e}"
    raise ConfigError(f"generation_config {path}: {said}", param="generation_config")
