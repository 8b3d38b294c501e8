"""Model families by name. A family is one module of this package:

MODEL_TYPES                                     model_type values of config.json it serves
spec_from_config(config) -> ModelSpec           ConfigError naming the field that is wrong
abstract(spec) -> Params                        its tree, with `spec.Leaf` in place of tensors
gguf_names(spec) -> {name: GgufSource}          where a GGUF file keeps each tensor
with_tables(params, spec, max_len) -> Params    with the tensors that are computed, not loaded
forward(params, kv, batch, spec, ops) -> (hidden [T, C], kv); [num_last, C] if the batch asks so
logits(params, hidden [R, C], spec, ops) -> [R, V] float32
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from xylite import plugins
from xylite.errors import ConfigError
from xylite.models.spec import ModelSpec


def families() -> dict[str, ModuleType]:
    """Every family's module, by the model types it serves."""
    modules = [plugins.find("models", name) for name in plugins.names("models")]
    return {t: m for m in modules for t in getattr(m, "MODEL_TYPES", ())}


def find(model_type: str, source: str = "config.json") -> ModuleType:
    """The family that serves `model_type`; ConfigError naming `source` and the known ones."""
    known = families()
    if model_type not in known:
        raise ConfigError(
            f"{source}: model_type {str(model_type)[:80]!r} is not supported "
            f"(supported: {', '.join(sorted(known))}); code that comes with a model is never run",
            param="model",
        )
    return known[model_type]


def describe(
    config: Mapping[str, Any], source: str = "config.json"
) -> tuple[ModuleType, ModelSpec]:
    """Family and spec of a model, from its config.json.

    source   where the config was, for errors
    raises   ConfigError: unknown architecture, unknown quantisation, or a number out of bounds
    """
    quantised = config.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise ConfigError(
            f"{source}: quantization_config.quant_method {str(method)[:80]!r} is not supported "
            "(quantised weights come as GGUF files)",
            param="model",
        )
    model_type = config.get("model_type")
    family = find(model_type if isinstance(model_type, str) else str(model_type), source)
    try:
        return family, family.spec_from_config(config)
    except ConfigError as e:  # families call it config.json, wherever it was
        message = e.message.replace("config.json", source, 1)
        raise ConfigError(message, param=e.param) from None
