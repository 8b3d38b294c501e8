"""The real checkpoint through the kernels: the alphabet, 14 tokens, float32."""

from tests.kernels_triton.stand_in import stand_in  # isort: skip  (chooses the interpreter)

import pytest

from tests.models.test_smollm2 import ALPHABET, REST
from tests.runtime.driver import Driver
from xylite import ops
from xylite.checkpoint import open_checkpoint
from xylite.config import EngineConfig
from xylite.kernels_triton.tiles import FLOAT, INTERPRETER, Tiles
from xylite.runtime import build
from xylite.runtime.request import Draft, SamplingParams, make_request

pytestmark = pytest.mark.model

# The interpreter's time goes by the number of tiles, whatever their size.
WIDE = [
    Tiles(op, INTERPRETER, FLOAT, {"TILE_M": 16, "TILE_N": 1024, "TILE_K": 1024, "BAND": 1})
    for op in ("linear", "epilogue", "gated")
]


@pytest.mark.timeout(600)
def test_the_kernels_continue_the_alphabet(monkeypatch):
    """Three decodes, then the rest as one draft, which the kernels verify."""
    table = stand_in("npu", num_cores=2, tuned=WIDE)
    monkeypatch.setattr(ops, "load", lambda device: table)
    config = EngineConfig(
        dtype="float32", num_blocks=4, block_size=16, max_model_len=64, max_num_seqs=1,
        max_num_batched_tokens=16,
    )  # fmt: skip
    checkpoint = open_checkpoint("demo")
    parts = build.build(config, checkpoint, checkpoint.config["vocab_size"])
    driver = Driver(num_blocks=1, block_size=16)
    driver.scheduler, driver.tabulator = parts.scheduler, parts.tabulator
    driver.executor, driver.blocks = parts.executor, parts.scheduler.queues.blocks
    driver.add(
        make_request(
            "alphabet", ALPHABET, SamplingParams(max_tokens=14, temperature=0.0),
            limits=parts.limits, end_tokens=frozenset(), default_seed=0,
        )
    )  # fmt: skip

    def propose(seq):
        done = len(seq.tokens) - len(ALPHABET)
        return Draft(tuple(REST[done:13])) if done == 3 else None

    driver.run(propose=propose)
    assert driver.tokens("alphabet") == REST
    assert len(driver.steps) == 4
