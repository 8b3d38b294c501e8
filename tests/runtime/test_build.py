"""From settings to an engine's parts."""

import pytest

from bench.host import write_small_model
from xylite.checkpoint import open_checkpoint
from xylite.config import EngineConfig
from xylite.errors import ConfigError
from xylite.models import weights
from xylite.runtime.build import build


def parts(path, **settings):
    write_small_model(path)
    config = EngineConfig(
        model=str(path), load_format="dummy", num_blocks=8, max_num_batched_tokens=64, **settings
    )
    return build(config, open_checkpoint(str(path), with_weights=False), 49152)


def test_quantization_packs_the_weights_in_that_format(tmp_path):
    plain, packed = (
        weights.weight_bytes(parts(tmp_path, dtype="bfloat16", **s).executor.model.params)
        for s in ({}, {"quantization": "int8"})
    )
    assert packed < 0.6 * plain


def test_quantization_that_the_device_does_not_have_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'awq' is not there on cpu .*int8"):
        parts(tmp_path, quantization="awq")


def test_batch_invariance_is_refused_where_no_kernel_gives_it(tmp_path):
    with pytest.raises(ConfigError, match="batch_invariant"):
        parts(tmp_path, device="reference", batch_invariant=True)
