"""A tiny Llama and three requests, as the engine would run them on a table."""

from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny
from tests.runtime.driver import Driver
from xylite import ops
from xylite.checkpoint import open_checkpoint
from xylite.config import EngineConfig
from xylite.ops import Ops
from xylite.runtime import build
from xylite.runtime.request import SamplingParams, make_request

CONFIG = tiny.config(
    hidden_size=64, head_dim=64, num_attention_heads=3, num_key_value_heads=1,
    num_hidden_layers=2, intermediate_size=96, vocab_size=150,
)  # fmt: skip
SETTINGS = {
    "dtype": "float32", "num_blocks": 24, "block_size": 16, "max_num_seqs": 4,
    "max_num_batched_tokens": 24, "max_model_len": 96,
}  # fmt: skip
LENGTHS = (1, 16, 40)


def driver(table: Ops, path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Driver:
    """The parts that the engine would run, with the test driver in place of its loop."""
    monkeypatch.setattr(ops, "load", lambda device: table)
    config = EngineConfig(model=str(path), **SETTINGS, **settings)
    parts = build.build(config, open_checkpoint(str(path)), CONFIG["vocab_size"])
    made = Driver(num_blocks=1, block_size=16)
    made.scheduler, made.tabulator, made.executor = parts.scheduler, parts.tabulator, parts.executor
    made.blocks = parts.scheduler.queues.blocks
    for i, length in enumerate(LENGTHS):
        prompt = [(7 * i + 3 * j + 1) % CONFIG["vocab_size"] for j in range(length)]
        params = SamplingParams(
            max_tokens=4, temperature=(0.0, 0.9)[i % 2], top_p=0.9, top_k=20, min_p=0.01,
            repetition_penalty=1.1, seed=i,
        )  # fmt: skip
        made.add(
            make_request(
                str(i), prompt, params, limits=parts.limits, end_tokens=frozenset(),
                default_seed=0,
            )
        )  # fmt: skip
    return made


def all_tokens(made: Driver) -> list[list[int]]:
    return [made.tokens(str(i)) for i in range(len(LENGTHS))]
