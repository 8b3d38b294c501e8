"""A tiny Llama through the cuda and npu tables: schedules, drafts and sampling as the engine makes
them, ids as the reference table gives them. The device services are faked, the kernels real."""

from tests.kernels_triton.stand_in import stand_in  # isort: skip  (chooses the interpreter)

import random

import pytest
import torch

from tests.kernels_triton.tiny_run import CONFIG, SETTINGS, all_tokens, driver
from xylite import ops
from xylite.checkpoint import open_checkpoint
from xylite.config import EngineConfig
from xylite.errors import ConfigError
from xylite.kernels_triton.tiles import FLOAT, INTERPRETER, Tiles
from xylite.ops import reference
from xylite.runtime import build
from xylite.runtime.request import Draft
from xylite.runtime.sequence import Sequence


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_tables_of_kernels_give_the_tokens_of_the_reference(
    kind, checkpoint, expected, monkeypatch
):
    made = driver(stand_in(kind), checkpoint, monkeypatch)
    rng = random.Random(0)
    made.run(ahead=lambda: rng.random() < 0.5)
    assert all_tokens(made) == expected


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_int8_kv_gives_the_tokens_that_the_reference_gives_with_it(kind, checkpoint, monkeypatch):
    made = [
        driver(table, checkpoint, monkeypatch, kv_cache_dtype="int8")
        for table in (reference.TABLE, stand_in(kind))
    ]
    for one in made:
        leaf = one.executor.kv[0]
        assert leaf.k.dtype == torch.int8 and leaf.k_scale.shape == leaf.k.shape[:3]
        one.run()
        assert leaf.k_scale.count_nonzero()
    assert all_tokens(made[0]) == all_tokens(made[1])


def tree_draft(seq: Sequence, expected: list[list[int]]) -> Draft:
    """Two branches: one is what comes next, the other is not."""
    done = len(seq.tokens) - seq.num_prompt
    right = expected[int(seq.request.id)][done : done + 2]
    wrong = [(t + 1) % CONFIG["vocab_size"] for t in right[:1]]
    return Draft(tuple(wrong + right), (-1, *((-1, 1)[: len(right)])))


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_draft_trees_are_verified_by_the_kernels(kind, checkpoint, expected, monkeypatch):
    made = driver(stand_in(kind), checkpoint, monkeypatch)

    def propose(seq: Sequence) -> Draft | None:
        return tree_draft(seq, expected) if seq.request.id != "0" else None

    made.run(propose=propose)
    assert all_tokens(made) == expected
    # Fewer iterations than tokens: drafts were accepted.
    assert any(step.compact for step in made.steps)
    assert made.queues.counters.spec_num_draft_tokens > 0


@pytest.mark.parametrize(
    "chip, fits, asked",
    [("sm_90", "64", 128), ("910b-1.2.0", "128", 64), (INTERPRETER, "16 or 32 or 64", 48)],
)
def test_a_block_size_that_is_no_attention_tile_is_refused_with_those_that_are(
    chip, fits, asked, checkpoint, monkeypatch
):
    table = stand_in("cuda", chip=chip)
    monkeypatch.setattr(ops, "load", lambda device: table)
    config = EngineConfig(model=str(checkpoint), **{**SETTINGS, "block_size": asked})
    with pytest.raises(ConfigError, match=f"block_size must be {fits}.* on cuda, got {asked}") as e:
        build.build(config, open_checkpoint(str(checkpoint)), CONFIG["vocab_size"])
    assert e.value.param == "block_size"


@pytest.mark.parametrize("chip, size", [("sm_80", 64), ("910b-1.0.0", 128), (INTERPRETER, 16)])
def test_the_block_size_is_the_devices_unless_it_is_given(chip, size, checkpoint, monkeypatch):
    table = stand_in("npu", chip=chip)
    monkeypatch.setattr(ops, "load", lambda device: table)
    config = EngineConfig(model=str(checkpoint), **{**SETTINGS, "block_size": None})
    parts = build.build(config, open_checkpoint(str(checkpoint)), CONFIG["vocab_size"])
    assert parts.config.block_size == size == parts.scheduler.queues.blocks.block_size


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_a_table_says_what_it_is(kind):
    device = stand_in(kind).device
    assert device.kind == kind and device.block_size == 16 and device.tile_classes
    assert stand_in(kind).linear is not reference.linear


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_an_invariant_table_computes_a_row_alike_in_any_batch(kind):
    few = Tiles(
        "linear", INTERPRETER, FLOAT, {"TILE_M": 16, "TILE_N": 16, "TILE_K": 16, "BAND": 1},
        max_rows=4,
    )  # fmt: skip
    table = stand_in(kind, tuned=[few])
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(40, 96, generator=g), torch.randn(70, 96, generator=g)
    w = table.pack_linear(w)
    assert not torch.equal(table.linear(x[:3], w), table.linear(x, w)[:3])
    assert table.invariant is not None
    fixed = table.invariant()
    assert fixed.invariant is None
    for rows in (1, 3, 33):
        assert torch.equal(fixed.linear(x[:rows], w), fixed.linear(x, w)[:rows])
