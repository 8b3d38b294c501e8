import pytest
import torch

from tests.kernels_triton.exact import assert_near, in_double
from xylite.errors import ConfigError
from xylite.kernels_triton import launch, weights
from xylite.ops import reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows, width", [(1, 1), (5, 300), (2, 8192), (2, 8193)])
def test_gated_act_equals_the_reference(target, rows, width, act, dtype):
    x = (torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    gate, up = x.double().abs().chunk(2, 1)
    exact = in_double(reference.gated_act, x, act)
    assert_near(launch.gated_act(target, x, act), exact, gate * up)


def test_gated_act_touches_only_the_rows_that_exist(limited):
    out = launch.gated_act(limited(2), torch.ones(3, 20), "silu")
    assert out[:2].isfinite().all() and out[2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 33, 8193])
def test_embed_gathers_rows_bit_for_bit(target, width, dtype):
    table = torch.randn(50, width, generator=torch.Generator().manual_seed(2)).to(dtype)
    tokens = torch.tensor([0, 49, 7, 7], dtype=torch.int32)
    assert torch.equal(launch.embed(target, weights.pack(table), tokens), table[tokens.long()])
    assert launch.embed(target, weights.pack(table), tokens[:0]).shape == (0, width)


def test_embed_says_that_it_does_not_unpack(target):
    leaf = weights.quantise_int8(torch.ones(4, 8))
    with pytest.raises(ConfigError, match="'int8' cannot be gathered"):
        launch.embed(target, leaf, torch.zeros(1, dtype=torch.int32))
