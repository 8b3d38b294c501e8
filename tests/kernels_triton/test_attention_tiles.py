"""The choice of attention tiles."""

import pytest

from xylite.errors import ConfigError
from xylite.kernels_triton.attention_tiles import HEAD_SIZES, attention_tiles, block_sizes, chips


@pytest.mark.parametrize("chip", chips())
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_every_head_size_and_kind_has_tiles_on_every_chip(chip, head_size):
    for window in (0, 1024):
        for cap in (0.0, 50.0):
            tiles = attention_tiles(chip, head_size, window=window, cap=cap)
            assert tiles.tile_q[0] == 16 and len(tiles.options) == len(tiles.tile_q) <= 2
            assert sum(tiles.columns) == head_size
            assert all(n & (n - 1) == 0 for n in (*tiles.tile_q, *tiles.columns))
            assert tiles.tile_kv == block_sizes(chip)[0]


def test_head_sizes_without_a_kernel_are_refused_with_those_that_have_one():
    with pytest.raises(ConfigError, match=r"head size 72; it has 64, 80, 96, 128, 192, 256"):
        attention_tiles("sm_90", 72)


def test_other_block_sizes_than_the_tiles_are_refused_by_name_and_value():
    with pytest.raises(ConfigError, match="blocks of 128 tokens, block_size is 64") as e:
        attention_tiles("910b-1.2.0", 128, size=64)
    assert e.value.param == "block_size"
    with pytest.raises(ConfigError, match="16 or 32 or 64 or 128 or 256 tokens, block_size is 48"):
        attention_tiles("interpreter", 128, size=48)


def test_unknown_chips_are_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match="no tiles for chip 'sm_70'; it has 910b-1.0.0"):
        attention_tiles("sm_70", 128)
