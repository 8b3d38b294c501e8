"""bench.shuffled: another order of channels computes the same."""

from pathlib import Path

import torch
from torch import Tensor

from bench.shuffled import write_shuffled
from tests.models import tiny
from tests.models.driver import Chunk, Driver
from xylite import models, ops
from xylite.checkpoint import open_checkpoint
from xylite.models import weights

IDS = [3, 14, 15, 92, 65, 35]


def logits_and_down(path: Path) -> tuple[Tensor, Tensor]:
    """Logits of every token, and a weight whose rows and columns both change places."""
    checkpoint = open_checkpoint(str(path))
    family, spec = models.describe(checkpoint.config)
    table = ops.load("reference")
    params = weights.load(checkpoint, spec, family, table, torch.float64)
    driver = Driver(params, spec, family, table, [IDS], dtype=torch.float64)
    return driver.run([[Chunk(0, 0, len(IDS))]])[0], params.layers[1].down


def test_a_shuffled_model_gives_the_same_logits(tmp_path: Path) -> None:
    cfg = tiny.config(attention_bias=True, mlp_bias=True)
    source = tiny.save_directory(tmp_path / "a", cfg, tiny.tensors(cfg))
    (tmp_path / "b").mkdir()
    expected, down = logits_and_down(source)
    got, shuffled = logits_and_down(write_shuffled(source, tmp_path / "b"))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(shuffled, down)
    assert not torch.equal(shuffled.sort(1).values, down.sort(1).values)
    assert torch.equal(shuffled.flatten().sort().values, down.flatten().sort().values)
