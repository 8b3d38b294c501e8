"""Request fields as SamplingParams: the request wins, the model's defaults fill the rest."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from xylite.errors import RequestError
from xylite.http.generate import Prompt
from xylite.http.protocol import GenerationFields, StreamOptions, unsupported, whole
from xylite.http.service import Service
from xylite.runtime.request import SamplingParams
from xylite.text_engine import TextEngine

DEFAULT_MAX_TOKENS = 16  # of completions: OpenAI's and vLLM's
MAX_SEQUENCES = 1024
MAX_BAD_WORDS = 256
MAX_CACHE_SALT = 128

_PLAIN = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
_WHOLE = ("n", "min_tokens", "top_k", "seed", "prompt_logprobs")
_LISTS = ("stop_token_ids", "allowed_token_ids")
_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")


def sampling_params(
    asked: GenerationFields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    banned_token_ids: Sequence[int] = (),
) -> SamplingParams:
    """What to ask the engine for; RequestError if a field has no meaning."""
    values = dict(defaults)
    for name in _PLAIN:
        if (value := getattr(asked, name)) is not None:
            values[name] = value
    for name in _WHOLE:
        if (value := whole(name, getattr(asked, name))) is not None:
            values[name] = value
    for name in _LISTS:
        if (value := getattr(asked, name)) is not None:
            values[name] = tuple(value)
    if asked.repeat_penalty is not None and asked.repetition_penalty is None:
        values["repetition_penalty"] = asked.repeat_penalty
    if asked.no_stop_trim and asked.include_stop_str_in_output is None:
        values["include_stop_str_in_output"] = True
    if asked.stop is not None:
        values["stop"] = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop)
    if asked.logit_bias:
        values["logit_bias"] = {_token_id(k): v for k, v in asked.logit_bias.items()}
    if max_tokens is not None:
        values["max_tokens"] = max_tokens
    if prompt_logprobs is not None:
        values["prompt_logprobs"] = max(prompt_logprobs, values.get("prompt_logprobs") or 0)
    if banned_token_ids:
        values["banned_token_ids"] = tuple(banned_token_ids)
    values["logprobs"] = logprobs
    params = SamplingParams(**values)
    best_of = whole("best_of", asked.best_of)
    if best_of is not None and best_of not in (1, params.n):
        raise unsupported("best_of", f" with a value other than 1 or n, got {best_of}")
    return params


def _token_id(key: str) -> int:
    if not _TOKEN_ID.fullmatch(key):
        raise RequestError(
            f"logit_bias has the key {key[:40]!r}, which is not a token id", param="logit_bias"
        )
    return int(key)


def check_num_sequences(num_prompts: int, n: int) -> None:
    """RequestError if one HTTP request asks for too many sequences."""
    if num_prompts * n > MAX_SEQUENCES:
        raise RequestError(
            f"{num_prompts} prompts times n={n} make {num_prompts * n} sequences, the limit of one "
            f"request is {MAX_SEQUENCES}",
            param="n" if num_prompts == 1 else "prompt",
        )


def check_streaming(asked: GenerationFields) -> StreamOptions:
    """The stream options; RequestError where they contradict the rest."""
    if asked.stream_options is not None and not asked.stream:
        raise RequestError(
            "stream_options can only be given when stream is true", param="stream_options"
        )
    if asked.stream and asked.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs is not available when stream is true", param="prompt_logprobs"
        )
    return asked.stream_options or StreamOptions()


def checked_salt(salt: str | None) -> str:
    """cache_salt if it is one; None = no salt."""
    if salt is None:
        return ""
    if not 1 <= len(salt) <= MAX_CACHE_SALT or any(c in salt for c in "\0@/\\"):
        raise RequestError(
            f"cache_salt must have 1 to {MAX_CACHE_SALT} characters, none of them NUL, '@', '/' or "
            f"'\\'; got {len(salt)} characters",
            param="cache_salt",
        )
    return salt


def checked_priority(asked: GenerationFields) -> int:
    """priority within 32 bits; lower comes earlier."""
    priority = whole("priority", asked.priority) or 0
    if not -(2**31) <= priority < 2**31:
        raise RequestError(
            f"priority must be in [-2147483648, 2147483647], got {priority}", param="priority"
        )
    return priority


async def banned_tokens(engine: TextEngine, words: Sequence[str] | None) -> list[int]:
    """Token ids of bad_words, each with and without a blank before it, as vLLM bans them."""
    banned: list[int] = []
    if words and len(words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words has {len(words)} entries, the limit is {MAX_BAD_WORDS}", param="bad_words"
        )
    for word in words or ():
        ids = await engine.encode(word, add_special_tokens=False) if word else []
        if len(ids) != 1:
            raise unsupported("bad_words", f" for {word[:40]!r}, which is {len(ids)} tokens, not 1")
        banned += ids
        spaced = await engine.encode(" " + word.lstrip(), add_special_tokens=False)
        if len(spaced) == 1:
            banned += spaced
    return banned


async def truncated(service: Service, asked: GenerationFields, prompt: Prompt) -> Prompt:
    """The prompt cut to truncate_prompt_tokens, if that is asked for.

    -1 = to what the context holds beside the tokens that the request asks for: the number under
    `prompt.limit_name`, already checked. Where it is not given, as many as completions are by
    default, or the model's default if that is less: chats and models may go on to any length, but
    the prompt shall not be cut for what may never be written.
    """
    side = asked.truncation_side or "left"
    if side not in ("left", "right"):
        raise RequestError(
            f"truncation_side must be 'left' or 'right', got {side[:40]!r}", param="truncation_side"
        )
    keep = whole("truncate_prompt_tokens", asked.truncate_prompt_tokens)
    if keep is None:
        return prompt
    longest = service.engine.limits.max_model_len
    if keep == -1:
        wanted = whole(prompt.limit_name, getattr(asked, prompt.limit_name))
        if wanted is None:
            default = service.engine.sampling_defaults.get("default_max_tokens", DEFAULT_MAX_TOKENS)
            wanted = min(default, DEFAULT_MAX_TOKENS)
        # If there is no room for them at all, that is what the error says.
        keep = max(1, longest - wanted)
    if not 1 <= keep <= longest:
        raise RequestError(
            f"truncate_prompt_tokens must be -1 or in [1, {longest}], got {keep}",
            param="truncate_prompt_tokens",
        )
    ids = prompt.content
    if isinstance(ids, str):
        special = asked.add_special_tokens is not False
        ids = await service.engine.encode(ids, add_special_tokens=special, to_be_cut=True)
    return replace(prompt, content=ids[-keep:] if side == "left" else ids[:keep])
