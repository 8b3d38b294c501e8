"""Weights of GGUF files that stay quantised: which they are, their rows, and what they give."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from tests.models import tiny
from tests.models.driver import Chunk, Driver
from xylite import models, ops, tree
from xylite.checkpoint import open_checkpoint
from xylite.errors import ConfigError
from xylite.kernels_cpu.packed import PackedQuant
from xylite.models import weights
from xylite.ops import Ops, reference

KINDS = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1)
IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]


def transparent() -> tuple[Ops, list[tuple[str, tuple[int, ...], bool]]]:
    """The reference, told that it takes Q8_0 and Q4_1; a kept weight is its values in float64,
    which no other weight has. Also what was kept: kind, shape of the raw rows, gated."""
    kept: list[tuple[str, tuple[int, ...], bool]] = []

    def pack(kind: str, raw: Tensor, gated: bool = False) -> Tensor:
        kept.append((kind, tuple(raw.shape), gated))
        assert raw.dtype == torch.uint8
        return torch.from_numpy(gguf.dequantize(raw.numpy(), Kind[kind])).double()

    table = ops.load("reference")
    return (
        dataclasses.replace(
            table, stored_packers={kind: partial(pack, kind) for kind in ("Q8_0", "Q4_1")}
        ),
        kept,
    )


@pytest.fixture(scope="module")
def cpu() -> Ops:
    table = ops.load("cpu")
    assert table.stored_packers, "the CPU kernels are not built: is there a C++ compiler?"
    return table


def load(path: Path, table: Ops, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    checkpoint = open_checkpoint(str(path))
    family, spec = models.describe(checkpoint.config)
    return weights.load(checkpoint, spec, family, table, dtype, **kwargs)


def rounding(x: Tensor, w: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The reference's linear with activations in 8 bits, groups of 32 along a row, but for those
    beyond 4 times the root mean square of their row."""
    far = x.abs() > 4 * x.square().mean(-1, keepdim=True).sqrt()
    groups = x.masked_fill(far, 0.0).unflatten(-1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    x = torch.where(far, x, ((groups / scale).round() * scale).flatten(-2))
    return reference.linear(x, w, *args, **kwargs)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines about what became of quantised tensors."""
    return [r.message for r in caplog.records if r.message.startswith("weights:")]


def leaves(params: Any) -> Mapping[str, Tensor]:
    return dict(tree.named_leaves(params))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1])
def test_kept_rows_are_the_rows_that_dequantising_gives(kind, tied, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SLICE_BYTES", 1000)  # several slices of most tensors
    cfg = tiny.config(tie_word_embeddings=tied, attention_bias=True)
    tiny.save_gguf(tmp_path / "m.gguf", cfg, tiny.tensors(cfg), kind)
    table, kept = transparent()
    got = leaves(load(tmp_path / "m.gguf", table, keep_stored=True))
    expected = leaves(load(tmp_path / "m.gguf", table))
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(got[name], x.to(got[name].dtype)), name
        packed = name.endswith(("embed", "head", "qkv", "out", "gate_up", "down"))
        assert (got[name].dtype == torch.float64) == packed, name
    assert len(kept) == (1 if tied else 2) + 2 * 4
    row = {Kind.Q8_0: 34, Kind.Q4_1: 20}[kind]
    assert (kind.name, (192, 2 * row), True) in kept  # gate and up, of width 64
    assert (kind.name, (128, 2 * row), False) in kept  # q, k and v


def test_only_weights_of_one_kind_that_the_table_takes_are_kept(tmp_path, caplog):
    stored = {
        "layers.0.self_attn.v_proj": Kind.Q8_0,  # q and k are Q4_1
        "layers.0.mlp.up_proj": Kind.F16,
        "layers.1.self_attn.o_proj": Kind.Q4_0,  # this table does not take it
        "layers.1.mlp.down_proj": Kind.BF16,
        "embed_tokens": Kind.Q8_0,
    }

    def kind_of(name: str) -> Kind:
        return next((k for part, k in stored.items() if part in name), Kind.Q4_1)

    cfg = tiny.config(tie_word_embeddings=True)
    tiny.save_gguf(tmp_path / "m.gguf", cfg, tiny.tensors(cfg), kind_of)
    table, _ = transparent()
    with caplog.at_level("INFO"):
        got = leaves(load(tmp_path / "m.gguf", table, keep_stored=True))
    kept = {name for name, x in got.items() if x.dtype == torch.float64}
    assert kept == {
        *("embed", "layers.0.out", "layers.0.down"),
        *("layers.1.qkv", "layers.1.gate_up"),
    }
    for name, x in leaves(load(tmp_path / "m.gguf", table)).items():
        assert torch.equal(got[name], x.to(got[name].dtype)), name
    assert said(caplog) == [
        "weights: Q4_1 (0 MiB), Q8_0 (0 MiB) kept as stored; "
        "Q4_0 (0 MiB), Q4_1 (0 MiB), Q8_0 (0 MiB) dequantised to float32"
    ]


def test_nothing_is_kept_unless_asked_for_or_where_the_table_takes_nothing(tmp_path, caplog):
    cfg = tiny.config()
    tiny.save_gguf(tmp_path / "m.gguf", cfg, tiny.tensors(cfg), Kind.Q8_0)
    table, kept = transparent()
    with caplog.at_level("INFO"):
        load(tmp_path / "m.gguf", table, torch.bfloat16)
        load(tmp_path / "m.gguf", ops.load("reference"), torch.bfloat16, keep_stored=True)
    assert not kept
    assert said(caplog) == ["weights: Q8_0 (0 MiB) dequantised to bfloat16"] * 2
    caplog.clear()
    tiny.save_gguf(tmp_path / "m.gguf", cfg, tiny.tensors(cfg), Kind.F16)
    with caplog.at_level("INFO"):
        load(tmp_path / "m.gguf", table, torch.float16, keep_stored=True)
    assert not kept and not said(caplog)


def test_a_file_that_shrinks_after_opening_gives_an_error_where_rows_are_kept(tmp_path):
    cfg = tiny.config(tie_word_embeddings=True)
    path = tmp_path / "m.gguf"
    tiny.save_gguf(path, cfg, tiny.tensors(cfg), Kind.Q8_0)
    checkpoint = open_checkpoint(str(path))
    family, spec = models.describe(checkpoint.config)
    last = max(checkpoint.tensors.values(), key=lambda t: t.offset * (len(t.shape) > 1))
    with path.open("r+b") as f:
        f.truncate(last.offset + last.nbytes - 1)
    table, _ = transparent()
    with pytest.raises(ConfigError, match=rf"m\.gguf: tensor '{last.name}' is cut short"):
        weights.load(checkpoint, spec, family, table, torch.float32, keep_stored=True)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cpu_serves_kept_weights_as_the_dequantised_model(kind, tied, tmp_path, cpu):
    """The same logits, once its activations are rounded to 8 bits as the kernels do."""
    cfg = tiny.config(tie_word_embeddings=tied, attention_bias=True, intermediate_size=160)
    path = tmp_path / "m.gguf"
    stored = tiny.save_gguf(path, cfg, tiny.tensors(cfg), kind)
    params = load(path, cpu, torch.bfloat16, keep_stored=True)
    assert isinstance(params.embed, PackedQuant)
    assert all(
        isinstance(w, PackedQuant)
        for layer in params.layers
        for w in (layer.qkv, layer.out, layer.gate_up, layer.down)
    )
    rows = cpu.embed(params.embed, torch.tensor(IDS, dtype=torch.int32))
    torch.testing.assert_close(rows, stored["model.embed_tokens.weight"][IDS])

    def logits(table: Ops, params: Any) -> Tensor:
        family, spec = models.describe(open_checkpoint(str(path)).config)
        driver = Driver(params, spec, family, table, [IDS])
        return driver.run([[Chunk(0, 0, 6)], [Chunk(0, 6, 1)], [Chunk(0, 7, 3)]])[0]

    table = ops.load("reference")
    expected = logits(dataclasses.replace(table, linear=rounding), load(path, table))
    error = (logits(cpu, params) - expected).square().mean().sqrt() / expected.std()
    # Activations next to the middle between two values may be rounded the other way.
    assert error < 0.005
    assert weights.weight_bytes(params) < 0.75 * weights.weight_bytes(
        load(path, cpu, torch.bfloat16)
    )
