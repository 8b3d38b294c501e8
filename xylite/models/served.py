"""The weights that a server computes with: which format each has follows from the settings.

`xylite tune` loads a model by these functions too: what it measures is what is served.
"""

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

import torch

from xylite.checkpoint import Checkpoint
from xylite.config import EngineConfig
from xylite.errors import ConfigError
from xylite.models import weights
from xylite.models.spec import ModelSpec
from xylite.ops import Ops

# How the embedding and the head are packed where it is not as the other weights: in 4 bits these
# two raised the demo model's perplexity by 5 % (bench.quality).
VOCAB_FORMATS: Final[Mapping[str, str]] = {"int4": "int8"}
STORED: Final = "stored"  # quantised weights of a file stay as they are


def quantising(table: Ops, name: str | None) -> Ops:
    """The table with weights packed in the named format; ConfigError if it has no such one."""
    if name is None or (name == STORED and table.stored_packers):
        return table
    packer = table.packers.get(name)
    if packer is None:
        stored = (STORED,) if table.stored_packers else ()
        known = ", ".join(sorted((*table.packers, *stored))) or "none"
        raise ConfigError(
            f"quantization {name!r} is not there on {table.name} (there is: {known})",
            param="quantization",
        )
    return dataclasses.replace(table, pack_linear=packer)


def load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    described: tuple[ModuleType, ModelSpec],
    table: Ops,
    dtype: torch.dtype,
) -> Any:
    """A model's Params, their rotary table for one position: see `weights.with_tables`.

    config     load_format, quantization and seed count
    described  of `models.describe`
    table      of `quantising`
    raises     as `weights.load`
    """
    family, spec = described
    pack_vocab = table.packers.get(VOCAB_FORMATS.get(config.quantization or "", ""))
    if config.load_format == "dummy":
        return weights.random_params(
            spec, family, table, dtype, config.seed, pack_vocab=pack_vocab, max_len=1
        )
    return weights.load(
        checkpoint,
        spec,
        family,
        table,
        dtype,
        keep_stored=config.quantization == STORED,
        pack_vocab=pack_vocab,
        max_len=1,
    )
