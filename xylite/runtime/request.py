"""What a client asked for, and what it gets back, in token ids.

A `Request` is frozen and has passed every limit: `make_request` is the only way into the queue.
The engine yields `TokenEvent`s. `Draft` and `Constraint` are the two things that may stand beside
a sequence: proposed tokens, and a rule for the tokens that may come next.
"""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from xylite.errors import RequestError, XyliteError, check_list, short

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_SEED = 2**63 - 1
MAX_INT = 2**31 - 1
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to end, in vLLM's words and defaults.

    max_tokens       as many, or the request is refused; None = as default_max_tokens says
    default_max_tokens
                     of nobody's asking, so cut to what fits into the model's context and raised to
                     min_tokens; None = as many as fit
    top_k            0 or -1 = off
    logprobs         None = off; k = the chosen token's log-probability and the k most likely
                     alternatives, of the model's raw distribution
    prompt_logprobs  the same for the prompt's tokens; switches prefix reuse off for this request
    seed             None = one drawn by the engine
    stop ... spaces_between_special_tokens concern text and are read by TextEngine only
    """

    n: int = 1
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow a sequence.

    parents is None for a chain; for a tree, parents[i] < i is the draft token that token i
    follows, or -1 for the sequence's last token. Siblings are distinct.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


class Constraint(Protocol):
    """A rule for what may come next, with the state of one sequence."""

    def fill(self, draft: Draft | None, out: np.ndarray) -> None:
        """Write the allowed tokens for the next position and after each draft token.

        out is [1 + len(draft), ceil(V / 32)] int32, bit t % 32 of word t // 32 = token t allowed;
        it comes with every bit set. Row 0 belongs to the next position and allows something, row
        1 + i belongs to the position after draft token i. The state afterwards is what it was
        before.

        Drafters do not know the rule. A draft token that it forbids ends its branch and is no
        error: what the rows of that token and of those below it say does not matter, since a token
        that the row before it forbids is never drawn, and so never accepted.
        """
        ...

    def accept(self, ids: Sequence[int]) -> None:
        """Advance over tokens that now belong to the sequence; each was allowed at its place."""
        ...

    def rollback(self, n: int) -> None:
        """Take back the last n accepted tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What this engine can take; every number a client can break is here."""

    vocab_size: int  # ids that have a meaning; rows beyond it are padding
    max_model_len: int
    max_kv_tokens: int  # tokens that the KV pool can hold for one sequence
    max_n: int = 128
    max_logprobs: int = 20


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Request:
    """One checked request. `make_request` builds it.

    end_tokens  ids that end a sequence with finish_reason "stop" (empty with ignore_eos),
                the client's stop_token_ids not included
    max_tokens  resolved: what the client asked for, at most what fits; prompt + max_tokens
                never exceeds the context
    constraint  makes the constraint of one sequence; called once for each of the n
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    end_tokens: frozenset[int]
    seed: int
    priority: int = 0
    cache_salt: str = ""
    constraint: Callable[[], Constraint] | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token, and of the most likely ones at its place, best first.

    rank  the token's place among all, 1 = the most likely; of equally likely ones the last
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(slots=True, kw_only=True)  # frozen takes three times as long to make
class TokenEvent:
    """New tokens of one sequence of a request, or its end, or both. Never changed.

    index            which of the request's n sequences
    logprobs         one per token, if asked for
    prompt_logprobs  on the first event of sequence 0, if asked for: one per prompt token, the
                     first None; entries are made as they are read
    stop_token       the id that ended the sequence; it is the last of `tokens`
    num_cached       prompt tokens whose KV was found in the prefix tree
    error            set with finish_reason "error"
    """

    index: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    num_cached: int = 0
    error: XyliteError | None = None


def _in_range(
    name: str,
    value: float,
    low: float,
    high: float,
    *,
    low_open: bool = False,
    whole: bool = False,
) -> None:
    """RequestError unless low <= value <= high; written so that NaN fails.

    Types too: in a library nobody checks them before, and an array's constructor would take "5"
    for some of these fields, or fail a whole iteration.
    """
    kind = numbers.Integral if whole else numbers.Real
    if isinstance(value, bool) or not isinstance(value, kind):
        said = "an integer" if whole else "a number"
        raise RequestError(f"{name} must be {said}, got {short(value)}", param=name)
    fits = (low < value if low_open else low <= value) and value <= high
    if not fits:
        bracket = "(" if low_open else "["
        raise RequestError(
            f"{name} must be in {bracket}{_shown(low)}, {_shown(high)}], got {_shown(value)}",
            param=name,
        )


def _shown(value: float) -> str:
    """A number as a client wrote it: integers in full, unless they are hundreds of digits."""
    if abs(value) <= 2**64:
        return str(int(value)) if value == int(value) else f"{value:g}"
    try:
        return f"{value:g}"
    except OverflowError:  # an integer that no float can be
        return f"an integer of {int(math.log10(abs(value))) + 1} digits"


def check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """RequestError unless ids is a list of integers that are tokens."""
    check_list(name, ids, "token ids")
    for kind in set(map(type, ids)):
        if kind is bool or not issubclass(kind, numbers.Integral):
            wrong = next(i for i in ids if type(i) is kind)
            raise RequestError(f"{name} must hold token ids, got {short(wrong)}", param=name)
    for i in ids:
        if not 0 <= i < vocab_size:
            raise RequestError(
                f"{name} holds token id {_shown(i)}, outside the vocabulary of {vocab_size} tokens",
                param=name,
            )


def _check_kinds(p: Any) -> None:
    """RequestError if a field holds something that is not even measured against a limit."""
    if not isinstance(p, SamplingParams):
        raise RequestError(f"params must be SamplingParams, got {short(p)}", param="params")
    for name in (
        "ignore_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    ):
        value = getattr(p, name)
        if not isinstance(value, bool):
            raise RequestError(f"{name} must be True or False, got {short(value)}", param=name)
    bias: Any = p.logit_bias
    if not isinstance(bias, Mapping):
        raise RequestError(
            f"logit_bias must be a mapping of token ids to numbers, got {short(bias)}",
            param="logit_bias",
        )
    if not isinstance(p.stop, str):
        check_list("stop", p.stop, "strings")
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
        value = getattr(p, name)
        if value is not None or name != "allowed_token_ids":
            check_list(name, value, "token ids")


def check_params(params: SamplingParams, limits: Limits) -> None:
    """RequestError naming field, limit and value if `params` breaks a rule."""
    p = params
    _check_kinds(p)
    _in_range("n", p.n, 1, limits.max_n, whole=True)
    if p.max_tokens is not None:
        _in_range("max_tokens", p.max_tokens, 0, MAX_INT, whole=True)
    if p.default_max_tokens is not None:
        _in_range("default_max_tokens", p.default_max_tokens, 1, MAX_INT, whole=True)
    _in_range("min_tokens", p.min_tokens, 0, MAX_INT, whole=True)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise RequestError(
            f"min_tokens ({p.min_tokens}) is greater than max_tokens ({p.max_tokens})",
            param="min_tokens",
        )
    _in_range("temperature", p.temperature, 0, 2)
    _in_range("top_p", p.top_p, 0, 1, low_open=True)
    _in_range("top_k", p.top_k, -1, MAX_INT, whole=True)
    _in_range("min_p", p.min_p, 0, 1)
    _in_range("presence_penalty", p.presence_penalty, -2, 2)
    _in_range("frequency_penalty", p.frequency_penalty, -2, 2)
    _in_range("repetition_penalty", p.repetition_penalty, 0.01, 100)
    if len(p.logit_bias) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(p.logit_bias)} entries, the limit is {MAX_LOGIT_BIAS}",
            param="logit_bias",
        )
    check_token_ids("logit_bias", list(p.logit_bias), limits.vocab_size)
    for value in p.logit_bias.values():
        _in_range("logit_bias", value, -100, 100)
    if p.seed is not None:
        _in_range("seed", p.seed, -MAX_SEED - 1, MAX_SEED, whole=True)
    if len(p.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids has {len(p.stop_token_ids)} entries, the limit is "
            f"{MAX_STOP_TOKEN_IDS}",
            param="stop_token_ids",
        )
    check_token_ids("stop_token_ids", p.stop_token_ids, limits.vocab_size)
    for name, value in (("logprobs", p.logprobs), ("prompt_logprobs", p.prompt_logprobs)):
        if value is not None:
            _in_range(name, value, 0, limits.max_logprobs, whole=True)
    if p.allowed_token_ids is not None:
        if not p.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is empty: no token could ever be chosen",
                param="allowed_token_ids",
            )
        check_token_ids("allowed_token_ids", p.allowed_token_ids, limits.vocab_size)
    check_token_ids("banned_token_ids", p.banned_token_ids, limits.vocab_size)
    for name in ("allowed_token_ids", "banned_token_ids"):
        ids = getattr(p, name)
        if ids is not None and len(ids) > limits.vocab_size:
            raise RequestError(
                f"{name} has {len(ids)} entries, the vocabulary {limits.vocab_size}", param=name
            )


def _some_token_is_left(
    params: SamplingParams, end_tokens: frozenset[int], vocab_size: int
) -> None:
    """RequestError if allowed, banned and minimum leave nothing to choose from."""
    excluded = set(params.banned_token_ids)
    if params.min_tokens:
        excluded |= end_tokens | set(params.stop_token_ids)
    allowed, name = params.allowed_token_ids, "allowed_token_ids"
    if allowed is None:
        if len(excluded) < vocab_size:
            return
        allowed, name = range(vocab_size), "banned_token_ids"
    if excluded.issuperset(allowed):
        raise RequestError(
            f"{name} leaves no token that could be chosen: all are banned, or end the answer "
            "before min_tokens",
            param=name,
        )


def _cut_default(params: SamplingParams, room: int) -> int:
    """max_tokens of a request that names none."""
    if params.default_max_tokens is None:
        return room
    return min(room, max(params.default_max_tokens, params.min_tokens))


def make_request(
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    limits: Limits,
    end_tokens: frozenset[int],
    default_seed: int,
    priority: int = 0,
    cache_salt: str = "",
    constraint: Callable[[], Constraint] | None = None,
) -> Request:
    """A Request within `limits`; RequestError naming field, limit and value otherwise."""
    check_params(params, limits)
    check_list("prompt", prompt, "token ids")
    if not prompt:
        raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
    check_token_ids("prompt", prompt, limits.vocab_size)
    _in_range("priority", priority, -(2**31), MAX_INT, whole=True)
    salt: Any = cache_salt
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt must be a string, got {short(salt)}", param="cache_salt")
    asked = params.max_tokens
    least = 1 if asked is None else asked
    room = limits.max_model_len - len(prompt)
    if room < least:
        raise RequestError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you "
            f"requested {len(prompt) + (asked or 0)} tokens ({len(prompt)} in the prompt, "
            f"{asked or 0} for the completion).",
            param="prompt" if room < 1 else "max_tokens",
            code="context_length_exceeded",
        )
    room = min(room, limits.max_kv_tokens - len(prompt))
    if room < least:
        raise RequestError(
            f"prompt ({len(prompt)} tokens) plus max_tokens ({least}) exceed the KV cache, "
            f"which holds {limits.max_kv_tokens} tokens for one sequence",
            param="prompt" if room < 1 else "max_tokens",
            code="context_length_exceeded",
        )
    end: frozenset[int] = frozenset() if params.ignore_eos else end_tokens
    _some_token_is_left(params, end, limits.vocab_size)
    return Request(
        id=request_id,
        prompt=tuple(prompt),
        params=params,
        max_tokens=_cut_default(params, room) if asked is None else asked,
        end_tokens=end,
        seed=int(default_seed if params.seed is None else params.seed),
        priority=priority,
        cache_salt=cache_salt,
        constraint=constraint,
    )
