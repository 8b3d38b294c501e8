"""Requests as clients may send them, and how a body becomes one.

Every optional field may be null, which means the same as leaving it out. Ranges are checked by
`runtime.request.check_params`; here types, shapes, and what this server cannot do.
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

import msgspec

from xylite.errors import RequestError

# 1.0 is a common way to write 1; msgspec's lax mode would take "1" and "true" too.
Whole = int | float | None

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """What chat and text completions have in common."""

    model: str | None = None
    n: Whole = None
    best_of: Whole = None
    max_tokens: Whole = None
    min_tokens: Whole = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Whole = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Whole = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Whole = None
    truncation_side: str | None = None
    priority: Whole = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: str | None = None
    rid: str | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: Whole = None
    logprobs: bool | None = None
    top_logprobs: Whole = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions. `prompt` has four forms, see completions.prompts_of."""

    prompt: Any = None
    logprobs: Whole = None
    echo: bool | None = None
    suffix: str | None = None
    response_format: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize, of a prompt or of messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int] | None = None


Body = TypeVar("Body", ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)

# Fields that change nothing here: bookkeeping of other services, or hints without effect.
IGNORED = frozenset(
    """
    verbosity metadata store user safety_identifier prompt_cache_key prompt_cache_retention
    service_tier prediction moderation parallel_tool_calls include_reasoning separate_reasoning
    stream_reasoning length_penalty early_stopping guided_decoding_backend
    guided_whitespace_pattern stream_interval session_id session_params data_parallel_rank
    routed_dp_rank ttft_slo_ms tpot_slo_ms ttlt_slo_ms offline cache_prompt id_slot
    timings_per_token samplers return_hidden_states logprobs_mode
    """.split()  # noqa: SIM905 (a word list reads better)
)

# Fields whose feature is missing: any value but "nothing" and these would change the answer.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "structured_outputs": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json_object": (),
        "guided_decoding": (),
        "structural_tag": (),
        "regex": (),
        "ebnf": (),
        "json_schema": (),
        "grammar": (),
        "stop_regex": (),
        "functions": (),
        "function_call": ("none", "auto"),
        "documents": (),
        "chat_template": (),
        "echo": (),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "logits_processors": (),
        "custom_logit_processor": (),
        "custom_params": (),
        "vllm_xargs": (),
        "logprob_token_ids": (),
        "use_beam_search": (),
        "prompt_embeds": (),
        "lora_path": (),
        "mm_processor_kwargs": (),
        "media_io_kwargs": (),
        "kv_transfer_params": (),
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
        "thinking_token_budget": (),
        "repetition_detection": (),
        "watermarking": (),
        "return_prompt_text": (),
        "n_probs": (0,),
        "mirostat": (0,),
        "typical_p": (1,),
        "tfs_z": (1,),
        "dynatemp_range": (0,),
        "xtc_probability": (0,),
        "dry_multiplier": (0,),
    }
)

# Fields among them whose value is a schema.
SCHEMAS = frozenset(("guided_json", "json_schema"))

_PATH = re.compile(r"^(.*) - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)
_TYPES = re.compile(r"^Expected `([^`]*)`, got `([^`]*)`$")
# An escape of half a surrogate pair without its other half: such text cannot be written in UTF-8.
_HALF_PAIR = re.compile(
    rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]", re.DOTALL
)
_JSON_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "int": "an integer",
        "float": "a number with a fraction",
        "number": "a number",
        "str": "a string",
        "bool": "true or false",
        "array": "a list",
        "object": "an object",
    }
)


def decode(
    body: bytes, kind: type[Body], *, strict: bool, note: Callable[[str, str], None]
) -> Body:
    """The request in `body`; RequestError naming the place and what was expected there.

    strict  unknown fields are errors
    note    called with the name of each field that is accepted without effect, and why
    """
    if not body or body.isspace():
        raise RequestError("the request body is empty", code="invalid_json")
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        known = frozenset(kind.__struct_fields__)
        for name in fields.keys() - known:
            _check_other(name, fields[name], strict, note)
        return msgspec.json.decode(body, type=kind)
    except RecursionError:
        raise RequestError("the JSON body is nested too deeply", code="invalid_json") from None
    except msgspec.ValidationError as e:
        found = _PATH.match(str(e))
        what, place = found.groups() if found else (str(e), None)
        said = _in_json_words(what)
        raise RequestError(f"{place or 'the request body'} {said}", param=place) from None
    except (msgspec.MsgspecError, UnicodeError) as e:
        half = _HALF_PAIR.search(body)
        why = str(e) if half is None else f"half of a surrogate pair at byte {half.start()}"
        raise RequestError(
            f"the request body is not valid JSON: {why}", code="invalid_json"
        ) from None


def _in_json_words(problem: str) -> str:
    """What msgspec found, as "must be an integer, got a string"."""
    found = _TYPES.match(problem)
    if found is None:
        return f"is not right: {problem[:1].lower()}{problem[1:]}"
    wanted = found[1].split(" | ")
    if {"int", "float"} <= set(wanted):
        wanted.remove("float")  # a Whole: 1.0 may be written for 1
    elif "float" in wanted:
        wanted[wanted.index("float")] = "number"
    # Null is the same as leaving a field out; nobody needs to be told to send it.
    kinds = [_JSON_WORDS.get(k, k) for k in wanted if k != "null"]
    got = "a boolean" if found[2] == "bool" else _JSON_WORDS.get(found[2], found[2])
    return f"must be {' or '.join(kinds)}, got {got}"


def _check_other(
    name: str, raw: msgspec.Raw, strict: bool, note: Callable[[str, str], None]
) -> None:
    """A field that the endpoint does not read."""
    if name in UNSUPPORTED:
        value = msgspec.json.decode(raw)
        # {} is a schema (any JSON), so asking with it is asking.
        is_nothing = value is None if name in SCHEMAS else _is_nothing(value)
        if not is_nothing and value not in UNSUPPORTED[name]:
            raise unsupported(name)
    elif name in IGNORED:
        if bytes(raw) != b"null":
            note(name, "it has no effect here")
    elif strict:
        raise RequestError(
            f"Unrecognized request argument supplied: {name[:100]}", param=name[:100]
        )
    else:
        note(name[:100], "it is not known here")


def _is_nothing(value: Any) -> bool:
    """Whether a field's value asks for nothing at all."""
    if value is None or value is False or value == "":
        return True
    if isinstance(value, dict):
        return all(v is None or v is False for v in cast(dict[str, Any], value).values())
    return isinstance(value, list) and not value


def unsupported(name: str, detail: str = "") -> RequestError:
    """The error for a feature that this server does not have."""
    return RequestError(
        f"{name} is not supported by this server{detail}", param=name, code="unsupported_parameter"
    )


def whole(name: str, value: Whole) -> int | None:
    """The integer in a field that may also be written as a float; RequestError if it is none."""
    if value is None or isinstance(value, int):
        return value
    if value.is_integer():
        return int(value)
    raise RequestError(f"{name} must be an integer, got {value!r}", param=name)


def check_response_format(value: dict[str, Any] | None) -> None:
    """RequestError unless plain text is asked for."""
    if not value or value.get("type") == "text":
        return
    kind = value.get("type")
    if kind in ("json_object", "json_schema", "structural_tag"):
        raise unsupported("response_format", f" with type {kind!r}")
    raise RequestError(
        f"response_format.type must be 'text', got {str(kind)[:40]!r}", param="response_format.type"
    )
