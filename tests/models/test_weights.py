"""Loading weights: every format and dtype gives the same model, every defect one error."""

import dataclasses
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from tests.models import tiny
from tests.models.driver import Chunk, Driver
from xylite import models, ops, tree
from xylite.checkpoint import TensorInfo, open_checkpoint
from xylite.errors import ConfigError
from xylite.models import weights

State = dict[str, Tensor]


def load(path: Path, dtype: str = "auto", **kwargs: Any) -> tuple[Any, Any, Any]:
    checkpoint = open_checkpoint(str(path))
    family, spec = models.describe(checkpoint.config)
    table = ops.load("reference")
    resolved = weights.resolve_dtype(checkpoint, dtype)
    return weights.load(checkpoint, spec, family, table, resolved, **kwargs), spec, family


def assert_same(a: Any, b: Any) -> None:
    a, b = dict(tree.named_leaves(a)), dict(tree.named_leaves(b))
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_every_stored_type_loads_as_itself_and_as_any_other(stored, shards, tmp_path):
    cfg = tiny.config(attention_bias=True, mlp_bias=True)
    state = {n: t.to(stored) for n, t in tiny.tensors(cfg).items()}
    path = tiny.save_directory(tmp_path, cfg, state, shards)
    params, _, _ = load(path)
    p = "model.layers.1."
    assert torch.equal(params.embed, state["model.embed_tokens.weight"])
    assert torch.equal(params.head, state["lm_head.weight"])
    layer = params.layers[1]
    q, k, v = (state[f"{p}self_attn.{x}_proj.weight"] for x in "qkv")
    assert torch.equal(layer.qkv, torch.cat((q, k, v)))
    bias = [state[f"{p}self_attn.{x}_proj.bias"] for x in "qkv"]
    assert torch.equal(layer.qkv_bias, torch.cat(bias))
    gate, up = (state[f"{p}mlp.{x}_proj.weight"] for x in ("gate", "up"))
    assert torch.equal(layer.gate_up, torch.cat((gate, up)))
    assert torch.equal(layer.down, state[f"{p}mlp.down_proj.weight"])
    assert layer.down.dtype == layer.down_bias.dtype == stored
    assert layer.attn_norm.dtype == params.norm.dtype == torch.float32
    assert torch.equal(params.norm, state["model.norm.weight"].float())
    for name in ("float32", "bfloat16", "float16"):
        cast, _, _ = load(path, name)
        assert torch.equal(cast.layers[1].down, layer.down.to(getattr(torch, name)))


def test_auto_is_the_type_of_most_bytes_and_bfloat16_of_quantised_files(tmp_path):
    cfg = tiny.config()
    state = {n: t.half() if t.dim() > 1 else t for n, t in tiny.tensors(cfg).items()}
    opened = open_checkpoint(str(tiny.save_directory(tmp_path / "a", cfg, state)))
    assert weights.resolve_dtype(opened, "auto") == torch.float16
    assert weights.resolve_dtype(opened, "bfloat16") == torch.bfloat16
    for kind, expected in ((Kind.Q8_0, torch.bfloat16), (Kind.F16, torch.float16)):
        tiny.save_gguf(tmp_path / "m.gguf", cfg, tiny.tensors(cfg), kind)
        assert weights.resolve_dtype(open_checkpoint(str(tmp_path / "m.gguf")), "auto") == expected
    for name, expected in (("float16", torch.float16), (None, torch.bfloat16)):
        (tmp_path / "a" / "config.json").write_text(json.dumps(tiny.config(torch_dtype=name)))
        bare = open_checkpoint(str(tmp_path / "a"), with_weights=False)
        assert weights.resolve_dtype(bare, "auto") == expected


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_a_gguf_file_equals_the_directory_of_what_it_dequantises_to(kind, tied, tmp_path):
    cfg = tiny.config(tie_word_embeddings=tied, attention_bias=True, mlp_bias=True, head_dim=16)
    del cfg["head_dim"]
    stored = tiny.save_gguf(tmp_path / "m.gguf", cfg, tiny.tensors(cfg), kind)
    assert any(not torch.equal(stored[n], t) for n, t in tiny.tensors(cfg).items()) == (
        kind != Kind.F32
    )
    twin = tiny.save_directory(tmp_path / "hf", cfg, stored)
    for dtype in ("float32", "bfloat16"):
        got, spec, family = load(tmp_path / "m.gguf", dtype)
        expected, twin_spec, _ = load(twin, dtype)
        assert spec == twin_spec
        assert_same(got, expected)
    ids = [3, 14, 15, 92, 65]
    driver = Driver(got, spec, family, ops.load("reference"), [ids], dtype=torch.bfloat16)
    assert driver.run([[Chunk(0, 0, 5)]])[0].isfinite().all()


def test_llama3_scaling_of_a_gguf_file_equals_that_of_config_json(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    cfg = tiny.config(rope_scaling=scaling)
    state = tiny.tensors(cfg)
    expected, spec, _ = load(tiny.save_directory(tmp_path / "hf", cfg, state), max_len=50)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    angle = torch.atan2(expected.rope[1, 1], expected.rope[1, 0])
    w = tiny.gguf_writer(tmp_path / "m.gguf", cfg)
    w.add_tensor("rope_freqs.weight", (plain / angle).numpy())
    for name, x in state.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0)
        theirs = tiny.in_pairs(x, heads) if heads else x
        w.add_tensor(tiny.gguf_name(name), theirs.contiguous().numpy())
    tiny.finish_gguf(w)
    got, _, _ = load(tmp_path / "m.gguf", max_len=50)
    assert expected.rope.shape == (50, 2, spec.head_dim // 2)
    torch.testing.assert_close(got.rope, expected.rope, atol=1e-5, rtol=1e-5)
    assert (angle / plain).min() < 0.2  # the scaling is not the identity


@pytest.mark.parametrize("kind", [Kind.Q5_0, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_slices_of_quantised_rows_equal_the_package_on_the_whole(kind, tmp_path, monkeypatch):
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 7, 512
    raw = np.random.default_rng(0).integers(0, 60, rows * columns // block * nbytes, np.uint8)
    (tmp_path / "f").write_bytes(bytes(64) + raw.tobytes())
    info = TensorInfo("t", kind.name, (rows, columns), str(tmp_path / "f"), 64, raw.size)
    monkeypatch.setattr(weights, "SLICE_BYTES", 3 * raw.size // rows)
    got = torch.empty(rows, columns)
    seen: list[int] = []
    weights._read(info, got, seen.append)
    expected = torch.from_numpy(gguf.dequantize(raw.reshape(rows, -1), kind))
    assert torch.equal(got, expected) and len(seen) == 3 and sum(seen) == raw.size


def test_slices_of_plain_rows_equal_the_whole(tmp_path, monkeypatch):
    cfg = tiny.config()
    path = tiny.save_directory(tmp_path, cfg, tiny.tensors(cfg))
    whole, _, _ = load(path)
    monkeypatch.setattr(weights, "SLICE_BYTES", 1000)
    sliced, _, _ = load(path)
    assert_same(sliced, whole)


def test_each_weight_is_packed_once_and_gated_ones_are_said_to_be(tmp_path):
    seen: list[tuple[tuple[int, ...], bool]] = []

    def pack(w: Tensor, gated: bool = False) -> Tensor:
        seen.append((tuple(w.shape), gated))
        return w.clone()

    cfg = tiny.config(tie_word_embeddings=True)
    checkpoint = open_checkpoint(str(tiny.save_directory(tmp_path, cfg, tiny.tensors(cfg))))
    family, spec = models.describe(checkpoint.config)
    table = dataclasses.replace(ops.load("reference"), pack_linear=pack)
    weights.load(checkpoint, spec, family, table, torch.float32)
    layer = [((128, 64), False), ((64, 64), False), ((192, 64), True), ((64, 96), False)]
    assert seen == [((160, 64), False), *layer, *layer]


def test_a_tied_model_ignores_a_head_of_its_own_and_computed_tensors(tmp_path):
    cfg = tiny.config(tie_word_embeddings=True)
    state = tiny.tensors(cfg)
    expected, _, _ = load(tiny.save_directory(tmp_path / "a", cfg, state))
    state["lm_head.weight"] = torch.zeros(160, 64)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    got, _, _ = load(tiny.save_directory(tmp_path / "b", cfg, state))
    assert got.head is None
    assert_same(got, expected)


def changed(change: Callable[[State], Any], **cfg: Any) -> Callable[[Path], Path]:
    """A directory whose tensors do not fit its config.json."""

    def make(path: Path) -> Path:
        state = tiny.tensors(tiny.CONFIG)
        change(state)
        return tiny.save_directory(path, tiny.config(**cfg), state)

    return make


def changed_gguf(change: Callable[[State], Any]) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        state = tiny.tensors(tiny.CONFIG)
        change(state)
        tiny.save_gguf(path / "m.gguf", tiny.CONFIG, state)
        return path / "m.gguf"

    return make


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[State], Any]:
    return lambda s: s.update({name: torch.zeros(shape, dtype=dtype)})


DOWN = "model.layers.1.mlp.down_proj.weight"
BROKEN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (changed(lambda s: s.pop(DOWN)), f"tensor '{DOWN}' is missing$"),
    "several missing": (
        changed(lambda s: [s.pop(n) for n in list(s) if "layers.1" in n]),
        r"tensor 'model.layers.1.input_layernorm.weight' \(and 8 more\) is missing$",
    ),
    "untied without head": (
        changed(lambda s: s.pop("lm_head.weight")),
        "tensor 'lm_head.weight' is missing, and config.json says tie_word_embeddings is false",
    ),
    "surplus": (
        changed(put("model.layers.0.self_attn.q_norm.weight", 16)),
        "model.safetensors: tensor 'model.layers.0.self_attn.q_norm.weight' has no place in a",
    ),
    "bias that config.json denies": (
        changed(put("model.layers.0.self_attn.q_proj.bias", 64)),
        "tensor 'model.layers.0.self_attn.q_proj.bias' has no place",
    ),
    "layer too many": (
        changed(lambda s: None, num_hidden_layers=1),
        "tensor 'model.layers.1.input_layernorm.weight' has no place",
    ),
    "layer too few": (
        changed(lambda s: None, num_hidden_layers=3),
        r"tensor 'model.layers.2.input_layernorm.weight' \(and 8 more\) is missing",
    ),
    "shape": (
        changed(put(DOWN, 64, 95)),
        rf"model.safetensors: tensor '{DOWN}' has shape \[64, 95\], the model needs \[64, 96\]",
    ),
    "turned": (changed(put(DOWN, 96, 64)), r"has shape \[96, 64\], the model needs \[64, 96\]"),
    "flat": (changed(put(DOWN, 64 * 96)), r"has shape \[6144\], the model needs \[64, 96\]"),
    "scalar norm": (changed(put("model.norm.weight")), r"'model.norm.weight' has shape \[\]"),
    "vocabulary": (
        changed(lambda s: None, vocab_size=161),
        r"'model.embed_tokens.weight' has shape \[160, 64\], the model needs \[161, 64\]",
    ),
    "integer": (changed(put(DOWN, 64, 96, dtype=torch.int8)), "has dtype I8, which is not supp"),
    "float8": (
        changed(put(DOWN, 64, 96, dtype=torch.float8_e4m3fn)),
        f"'{DOWN}' has dtype F8_E4M3, which is not supported",
    ),
    "gguf missing": (
        changed_gguf(lambda s: s.pop(DOWN)),
        "m.gguf: tensor 'blk.1.ffn_down.weight' is missing",
    ),
    "gguf shape": (
        changed_gguf(put(DOWN, 64, 95)),
        r"m.gguf: tensor 'blk.1.ffn_down.weight' has shape \[64, 95\], the model needs \[64, 96\]",
    ),
    "gguf surplus": (
        changed_gguf(lambda s: s.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(1)})),
        "m.gguf: tensor 'blk.2.ffn_up.weight' has no place",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_tensors_that_do_not_fit_the_model_give_one_error(case, tmp_path):
    make, message = BROKEN[case]
    with pytest.raises(ConfigError, match=message):
        load(make(tmp_path))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0])
@pytest.mark.parametrize("keep", [False, True])
def test_a_norm_in_blocks_is_one_error_with_its_name(kind, keep, tmp_path):
    cfg = tiny.config()
    w = tiny.gguf_writer(tmp_path / "m.gguf", cfg)
    for name, x in tiny.tensors(cfg).items():
        if name == "model.norm.weight":
            w.add_tensor("output_norm.weight", gguf.quantize(x.numpy(), kind), raw_dtype=kind)
        else:
            w.add_tensor(tiny.gguf_name(name), x.numpy())
    tiny.finish_gguf(w)
    with pytest.raises(
        ConfigError, match=rf"m\.gguf: tensor 'output_norm\.weight' .* in blocks of {kind.name}"
    ):
        load(tmp_path / "m.gguf", keep_stored=keep)


def test_a_file_that_shrinks_or_goes_after_opening_gives_an_error(tmp_path):
    cfg = tiny.config()
    path = tiny.save_directory(tmp_path, cfg, tiny.tensors(cfg))
    checkpoint = open_checkpoint(str(path))
    family, spec = models.describe(checkpoint.config)
    table = ops.load("reference")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors: tensor '.*' is cut short"):
        weights.load(checkpoint, spec, family, table, torch.float32)
    file.unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors: tensor '.*' cannot be read"):
        weights.load(checkpoint, spec, family, table, torch.float32)


def test_progress_and_a_summary_are_shown(tmp_path, capsys, caplog):
    cfg = tiny.config()
    path = tiny.save_directory(tmp_path, cfg, tiny.tensors(cfg))
    with caplog.at_level("INFO"):
        params, _, _ = load(path)
    assert capsys.readouterr().err == ""  # not a terminal
    assert "peak memory" in caplog.text
    load(path, progress=True)
    assert "weights" in capsys.readouterr().err
    total = sum(t.numel() * 4 for t in tiny.tensors(cfg).values())
    assert weights.weight_bytes(params) == total + params.rope.nbytes
    assert weights.peak_memory() > total


PEAK = """
import dataclasses
import sys
import torch
from xylite import models, ops
from xylite.checkpoint import open_checkpoint
from xylite.models import weights

checkpoint = open_checkpoint(sys.argv[1])
family, spec = models.describe(checkpoint.config)
table = ops.load("reference")
keep = sys.argv[2] == "kept"
if keep:
    table = dataclasses.replace(table, stored_packers={"Q8_0": lambda raw, gated: raw.clone()})
torch.ones(1000, 1000).bfloat16().float()
weights.SLICE_BYTES = 2**20
before = weights.peak_memory()
params = weights.load(
    checkpoint, spec, family, table, torch.bfloat16, keep_stored=keep, max_len=1
)
print((weights.peak_memory() - before) / weights.weight_bytes(params))
"""


@pytest.mark.parametrize("form", ["safetensors", "gguf", "kept"])
def test_peak_memory_of_loading_is_little_more_than_the_model(form, tmp_path):
    """38 MB of bfloat16, 20 MB kept; allowed on top are one weight, one slice of 1 MB and its
    values."""
    cfg = tiny.config(hidden_size=512, intermediate_size=1536, num_hidden_layers=6)
    state = {n: torch.zeros(t) for n, t in tiny.shapes(cfg).items()}
    path = tmp_path / "m.gguf"
    if form != "safetensors":
        tiny.save_gguf(path, cfg, state, Kind.Q8_0)
    else:
        path = tiny.save_directory(tmp_path, cfg, state)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(path), form], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 0.9 < float(done.stdout) < 1.6


def test_one_family_serves_each_model_type():
    assert set(models.families()) >= {"llama"}
    for module in models.families().values():
        for name in ("spec_from_config", "abstract", "gguf_names", "with_tables", "forward"):
            assert callable(getattr(module, name))


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": ({"model_type": "mamba"}, "model_type 'mamba' is not supp.*: .*llama"),
    "no type": ({"model_type": None}, "model_type 'None' is not supported"),
    "type a list": ({"model_type": ["llama"]}, "is not supported"),
    "helper module": ({"model_type": "layers"}, "model_type 'layers' is not supported"),
    "remote code": (
        {"model_type": "custom", "auto_map": {"AutoModel": "x.Y"}},
        "code that comes with a model is never run",
    ),
    "quantised": (
        {"quantization_config": {"quant_method": "foo"}},
        "quantization_config.quant_method 'foo' is not supported",
    ),
    "quantised how": ({"quantization_config": {}}, "quant_method 'None' is not supported"),
    "quantised text": ({"quantization_config": "x"}, "quant_method 'x' is not supported"),
    "layers 0": ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer from 1 to 4096"),
    "layers many": ({"num_hidden_layers": 10**9}, "num_hidden_layers must be .* '1000000000'"),
    "layers text": ({"num_hidden_layers": "2"}, "num_hidden_layers must be an integer"),
    "layers bool": ({"num_hidden_layers": True}, "num_hidden_layers must be .* got 'True'"),
    "layers float": ({"num_hidden_layers": 2.0}, "num_hidden_layers must be an integer"),
    "width absent": ({"hidden_size": None}, "hidden_size must be .* got 'None'"),
    "width negative": ({"hidden_size": -64}, "hidden_size must be an integer from 1"),
    "heads": ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) is not a multiple of num_ke"),
    "head size": ({"hidden_size": 66}, r"hidden_size \(66\) is not a multiple of num_attention_"),
    "odd head": ({"head_dim": 7}, "7 of head_dim 7 elements turn .* must be even"),
    "vocabulary": ({"vocab_size": 2**31}, "vocab_size must be an integer from 1"),
    "length": ({"max_position_embeddings": 0}, "max_position_embeddings must be"),
    "eps": ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a number from 0 to 1"),
    "eps nan": ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number"),
    "eps text": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number"),
    "theta": ({"rope_theta": 0.0}, "rope_theta must be a number from 1"),
    "activation": ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    "tied": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    "experts": ({"num_experts": 8}, "mixtures of experts are not supported"),
    "rope a number": ({"rope_scaling": 3}, "rope_scaling must be an object"),
    "rope type": ({"rope_scaling": {"type": "foo"}}, "rope type 'foo' is not supported"),
    "rope type longrope": (
        {"rope_scaling": {"rope_type": "longrope"}},
        "rope type 'longrope' is not supported",
    ),
    "factor absent": ({"rope_scaling": {"type": "linear"}}, "factor must be a number"),
    "factor 0": ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be a number"),
    "llama3 bounds": (
        {"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0}},
        r"low_freq_factor \(4\) must be below high_freq_factor \(4\)",
    ),
    "yarn base": (
        {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}},
        "needs rope_theta above 1",
    ),
    "divisors": (
        {"rope_scaling": {"rope_type": "divisors", "divisors": [1.0]}},
        "rope_freqs.weight: must hold 8 positive numbers",
    ),
    "divisors text": (
        {"rope_scaling": {"rope_type": "divisors", "divisors": ["1"] * 8}},
        "rope_freqs.weight: must hold 8 positive numbers",
    ),
    "eps huge": ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a number"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_number_or_word_of_config_json_that_cannot_be_used_is_named(case):
    change, message = CONFIGS[case]
    with pytest.raises(ConfigError, match=message):
        models.describe(tiny.config(**change))


def test_specs_are_hashable_and_equal_by_value():
    rng = random.Random(0)
    keys = list(tiny.CONFIG)
    rng.shuffle(keys)
    a = models.describe(tiny.CONFIG)[1]
    b = models.describe({k: tiny.CONFIG[k] for k in keys})[1]
    assert a == b and hash(a) == hash(b) and a.group == 2
