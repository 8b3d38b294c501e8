"""The engines that are compared: how each is started, and what it needs to be there.

An engine is a value. What it cannot do is None: transformers has no server here, and llama.cpp is
measured offline by tools of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent.parent

# Tokens of KV that every server gets, and the longest sequence.
KV_TOKENS: Final = 32768
MAX_LEN: Final = 4096
MAX_SEQS: Final = 32
# Left out of the children's environment: they bind or limit threads.
THREAD_SETTINGS: Final = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "XYLITE_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine with its settings.

    name       as tables show it
    precision  class of its weights; xylite is compared with peers of the same: float32, bf16,
               int8 (8 bits in any form) or int4
    is_ours    a variant of xylite
    baseline   engine that this one is compared with, instead of peers: the same without drafts
    child      command of an offline child (see child.py), without the JSON of its start
    settings   what that child is told
    weights    its own form of the model: llama.cpp's file, CTranslate2's directory
    tools      llama.cpp's folder, if it is measured offline by llama-bench and
               llama-batched-bench
    server     command of a server; {port} is filled in
    env        added to the environment
    lacking    why it cannot run; None if it can
    """

    name: str
    precision: str
    is_ours: bool = False
    baseline: str | None = None
    child: tuple[str, ...] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tools: Path | None = None
    weights: Path | None = None
    options: tuple[str, ...] = ()
    server: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    lacking: str | None = None

    def available(self) -> str | None:
        """None, or why it cannot run."""
        return self.lacking

    def environment(self, threads: int) -> dict[str, str]:
        """The environment of its processes; threads 0 = what it takes by itself."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(THREAD_SETTINGS)}
        if threads:
            env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        return env | {"HF_HUB_OFFLINE": "1"} | dict(self.env)


# xylite

VARIANTS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "auto": ("bf16", {}),
    "float32": ("float32", {"dtype": "float32"}),
    "int8": ("int8", {"quantization": "int8"}),
}


# A batch decodes from its first iteration on only if that holds all prompts, as vLLM's does.
WHOLE_CASE: Final[Mapping[str, Any]] = {"max_num_batched_tokens": 8192}


def xylite(variant: str, model: Path, threads: int) -> Engine:
    """A variant of xylite: settings as users have them, but for lengths and KV memory, and offline
    for WHOLE_CASE."""
    precision, settings = VARIANTS[variant]
    common = {
        "max_model_len": MAX_LEN,
        "kv_cache_memory_bytes": kv_bytes(model, 4 if precision == "float32" else 2),
    }
    words: list[str] = []
    for name, value in (common | dict(settings)).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    if threads:
        words += ["--num-threads", str(threads)]
    server = (sys.executable, "-m", "xylite", "serve", str(model), "--port", "{port}", *words)
    return Engine(
        name=f"xylite {variant}",
        precision=precision,
        is_ours=True,
        child=(sys.executable, "-m", "bench.compare.child_xylite"),
        settings=WHOLE_CASE | common | dict(settings),
        server=server,
        lacking=missing_format(variant),
    )


def drafting(plain: Engine, config: Mapping[str, Any]) -> Engine:
    """A variant of xylite with drafts, offline: its child answers with and without them.

    config  as --speculative-config takes it
    """
    method = config.get("method") or ("draft_model" if "model" in config else "ngram")
    length = config.get("num_speculative_tokens")
    return Engine(
        name=" ".join([plain.name, method, *([] if length is None else [str(length)])]),
        precision=plain.precision,
        is_ours=True,
        baseline=plain.name,
        child=(sys.executable, "-m", "bench.compare.child_speculation"),
        settings={
            **dict(plain.settings.items() - WHOLE_CASE.items()),
            "speculative_config": dict(config),
        },
        lacking=plain.lacking,
    )


def missing_format(variant: str) -> str | None:
    """Why a variant's quantisation format is not there, asked of xylite in a process of its own;
    None if it is or none is needed."""
    name = VARIANTS[variant][1].get("quantization")
    if name is None:
        return None
    code = (
        "import sys; from xylite import ops; "
        f"sys.exit(None if {name!r} in ops.load('auto').packers else 'no format {name}')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def kv_bytes(model: Path, element_bytes: int) -> int:
    """Memory for the KV of KV_TOKENS tokens."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    per_layer = 2 * config.get("num_key_value_heads", heads) * head_size * element_bytes
    return KV_TOKENS * config["num_hidden_layers"] * per_layer


# Peers


def transformers(python: Path, dtype: str = "bfloat16") -> Engine:
    """transformers in the environment of `python`; offline only."""
    return Engine(
        name="transformers" if dtype == "bfloat16" else f"transformers {dtype}",
        precision="bf16" if dtype == "bfloat16" else dtype,
        child=(str(python), "-m", "bench.compare.child_transformers"),
        settings={"dtype": dtype},
        lacking=_no_module(python, "transformers"),
    )


def vllm(python: Path, model: Path, threads: int, options: Sequence[str]) -> Engine:
    """vLLM's CPU build in the environment of `python`, with the libraries it wants preloaded.

    options  words for its server; offline `--block-size N` among them counts too
    """
    cores = threads or len(os.sched_getaffinity(0))
    limits = {"dtype": "bfloat16", "max_model_len": MAX_LEN, "max_num_seqs": MAX_SEQS}
    words: list[str] = []
    for name, value in limits.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    if "--block-size" in options:
        limits["block_size"] = int(options[options.index("--block-size") + 1])
    gib = -(-kv_bytes(model, 2) // 2**30)
    return Engine(
        name=" ".join(["vLLM", *options]),
        precision="bf16",
        child=(str(python), "-m", "bench.compare.child_vllm"),
        settings=limits,
        server=(
            *(str(python.parent / "vllm"), "serve", str(model), "--served-model-name", "m"),
            *("--host", "127.0.0.1", "--port", "{port}", *words, *options),
        ),
        env={
            "VLLM_CPU_KVCACHE_SPACE": str(gib),
            # Its automatic binding leaves a core out.
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(
                map(str, sorted(os.sched_getaffinity(0))[:cores])
            ),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "LD_PRELOAD": ":".join(preloads(python)),
        },
        lacking=_no_module(python, "vllm"),
    )


def preloads(python: Path) -> list[str]:
    """tcmalloc and Intel's OpenMP where vLLM's installation notes have them; those that exist."""
    places = [
        *sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")),
        python.parent.parent / "lib" / "libiomp5.so",
    ]
    return [str(p) for p in places if p.exists()]


def ctranslate2(python: Path, converted: Path, compute_type: str) -> Engine:
    """CTranslate2 in the environment of `python`; offline only.

    converted     directory that its converter made of the model
    compute_type  float32, or int8_float32: 8-bit products, the rest in float32
    """
    absent = None if converted.is_dir() else f"{converted} is not a directory"
    return Engine(
        name=f"CTranslate2 {compute_type.partition('_')[0]}",
        precision=compute_type.partition("_")[0],
        child=(str(python), "-m", "bench.compare.child_ctranslate2"),
        settings={"compute_type": compute_type},
        weights=converted,
        lacking=absent or _no_module(python, "ctranslate2"),
    )


def llama_cpp(server: Path, gguf: Path, precision: str, threads: int, options: str) -> Engine:
    """llama.cpp's server and the tools beside it, with a GGUF file of the same weights."""
    cores = str(threads or len(os.sched_getaffinity(0)))
    words = options.split()
    lacking = next((f"{p} does not exist" for p in (server, gguf) if not p.exists()), None)
    tools = [server.parent / name for name in ("llama-bench", "llama-batched-bench")]
    return Engine(
        name=f"llama.cpp {precision}",
        precision=_CLASSES.get(precision.lower(), precision.lower()),
        tools=server.parent if all(t.exists() for t in tools) else None,
        weights=gguf,
        options=("-t", cores, *words),
        server=(
            *(str(server), "-m", str(gguf), "-a", "m", "-t", cores, "-tb", cores),
            *("-c", str(KV_TOKENS), "-np", "8"),
            *("--host", "127.0.0.1", "--port", "{port}", *words),
        ),
        lacking=lacking,
    )


_CLASSES: Final[Mapping[str, str]] = {
    "bf16": "bf16",
    "f16": "bf16",
    "f32": "float32",
    "q8_0": "int8",
    "q4_0": "int4",
    "q4_1": "int4",
    "q4_k_m": "int4",
}


def _no_module(python: Path, module: str) -> str | None:
    """Why a module cannot be imported there; found without importing it."""
    if not python.exists():
        return f"{python} does not exist"
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    done = subprocess.run([str(python), "-c", code], capture_output=True, check=False)
    return f"{python} has no module {module}" if done.returncode else None
