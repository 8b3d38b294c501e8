"""POST /v1/completions."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import msgspec
from aiohttp import web

from xylite.errors import RequestError
from xylite.http.body import read_json
from xylite.http.generate import Answer, Prompt, Usage, answer_with, submit
from xylite.http.logprobs import CompletionLogprobs, prompt_entries
from xylite.http.params import (
    DEFAULT_MAX_TOKENS,
    banned_tokens,
    check_num_sequences,
    check_streaming,
    checked_priority,
    checked_salt,
    sampling_params,
    truncated,
)
from xylite.http.protocol import (
    CompletionRequest,
    StreamOptions,
    check_response_format,
    unsupported,
    whole,
)
from xylite.http.service import SERVICE, Service
from xylite.http.stream import Batch, TimeLimits
from xylite.http.token_text import text_of
from xylite.runtime.request import SamplingParams, check_params
from xylite.text_engine import Pending, TextEvent, TextLogprob, TextStream

MAX_PROMPTS = 1024

_encode = msgspec.json.Encoder().encode


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue each of the prompts."""
    service = request.app[SERVICE]
    limits = TimeLimits.of(request)
    asked = await read_json(request, CompletionRequest)
    service.require_ready()
    answer = Answer.new("cmpl", service.model_name(asked.model))
    options = check_streaming(asked)
    prompts = prompts_of(asked.prompt)
    async with limits.preparing():
        params = await _params(service, asked)
        check_num_sequences(len(prompts), params.n)
        service.engine.require_room(len(prompts) * params.n)
        prompts = [await truncated(service, asked, prompt) for prompt in prompts]
        streams = await submit(
            service,
            prompts,
            params,
            answer=answer,
            priority=checked_priority(asked),
            cache_salt=checked_salt(asked.cache_salt),
            add_special_tokens=asked.add_special_tokens is not False,
        )
    form = CompletionForm(service, asked, options, answer, streams, prompts, params)
    return await answer_with(
        request, form, streams, n=params.n, streamed=bool(asked.stream), limits=limits
    )


def prompts_of(prompt: Any) -> list[Prompt]:
    """The prompts in a str, [str, ...], [id, ...] or [[id, ...], ...]; RequestError otherwise."""
    if isinstance(prompt, str):
        return [Prompt(prompt)]
    if not isinstance(prompt, list) or not prompt:
        got = _kind_of(cast(object, prompt))
        raise RequestError(
            f"prompt must be a string, token ids, or a list of these; got {got}",
            param="prompt",
        )
    items = cast(list[Any], prompt)
    if type(items[0]) is int:
        return [Prompt(_token_ids("prompt", items))]
    if len(items) > MAX_PROMPTS:
        raise RequestError(
            f"prompt has {len(items)} prompts, the limit is {MAX_PROMPTS}", param="prompt"
        )
    prompts: list[Prompt] = []
    for i, item in enumerate(items):
        name = f"prompt[{i}]" if len(items) > 1 else "prompt"
        if isinstance(item, str) and isinstance(items[0], str):
            prompts.append(Prompt(item, name))
        elif isinstance(item, list) and isinstance(items[0], list):
            prompts.append(Prompt(_token_ids(name, cast(list[Any], item)), name))
        else:
            raise RequestError(
                f"prompt[{i}] must be a token id, a string or a list of token ids, and of the kind "
                f"of the others; got {_kind_of(cast(object, item))}",
                param=f"prompt[{i}]",
            )
    return prompts


# Names of types in JSON; whatever else a body can hold is null.
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "bool": "a boolean",
        "int": "an integer",
        "float": "a number",
        "str": "a string",
        "list": "a list",
        "dict": "an object",
    }
)


def _kind_of(value: object) -> str:
    """What a value of a JSON body is, in words."""
    return "an empty list" if value == [] else _KINDS.get(type(value).__name__, "nothing")


def _token_ids(name: str, ids: list[Any]) -> list[int]:
    """ids if all are integers; bool is an int to Python, not to us."""
    if set(map(type, ids)) <= {int}:
        return ids
    i, wrong = next((i, token) for i, token in enumerate(ids) if type(token) is not int)
    raise RequestError(
        f"{name}[{i}] must be a token id, got {str(wrong)[:40]!r}", param=f"{name}[{i}]"
    )


async def _params(service: Service, asked: CompletionRequest) -> SamplingParams:
    check_response_format(asked.response_format)
    if asked.suffix:
        raise unsupported("suffix")
    defaults = {"default_max_tokens": DEFAULT_MAX_TOKENS, **service.engine.sampling_defaults}
    max_tokens = whole("max_tokens", asked.max_tokens)
    if max_tokens is not None and max_tokens < (0 if asked.echo else 1):
        # 0 with echo is how evaluation harnesses score a text.
        raise RequestError(
            f"max_tokens must be at least 1 (0 with echo), got {max_tokens}", param="max_tokens"
        )
    logprobs = whole("logprobs", asked.logprobs)
    params = sampling_params(
        asked,
        defaults,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=logprobs if asked.echo else None,
        banned_token_ids=await banned_tokens(service.engine, asked.bad_words),
    )
    # Before require_room: what no server could take is the client's mistake, full or not.
    check_params(params, service.engine.limits)
    return params


class CompletionForm:
    """Events as text_completion objects; choice = prompt * n + sequence."""

    def __init__(
        self,
        service: Service,
        asked: CompletionRequest,
        options: StreamOptions,
        answer: Answer,
        streams: Sequence[TextStream],
        prompts: Sequence[Prompt],
        params: SamplingParams,
    ):
        self.usage = Usage(sum(len(stream.prompt_token_ids) for stream in streams))
        self._engine = service.engine
        self._turns = service.slices
        self._answer = answer
        self._streams = streams
        self._prompts = prompts
        self._n = params.n
        self._echo = bool(asked.echo)
        self._logprobs = params.logprobs is not None
        self._prompt_logprobs = asked.prompt_logprobs is not None
        self._token_ids = bool(asked.return_token_ids)
        self._as_ids = bool(asked.return_tokens_as_token_ids)
        self._include_usage = bool(options.include_usage)
        self._continuous = self._include_usage and bool(options.continuous_usage_stats)
        self._pieces: dict[int, CompletionLogprobs] = {}
        self._held: dict[int, Pending] = {}
        self._scored: dict[int, Sequence[TextLogprob | None]] = {}
        self._rows: dict[int, msgspec.Raw] = {}
        self._echoes: dict[int, str] = {}
        self._head = (
            b'data: {"id":%s,"object":"text_completion","created":%d,"model":%s,"choices":['
            % (_encode(answer.id), answer.created, _encode(answer.model))
        )

    async def chunks(self, batch: Batch) -> bytes:
        """One chunk for each event that says something."""
        parts: list[bytes] = []
        for prompt, event in batch:
            if event.prompt_logprobs is not None:
                self._scored[prompt] = event.prompt_logprobs
        for prompt, event in batch:
            self.usage.count(prompt, event)
            self._hold(prompt, event)
        for choice in list(self._held):
            prompt = choice // self._n
            event = self._held[choice].merged()
            if self._waits(prompt, choice) or not self._says(choice, event):
                continue
            del self._held[choice]
            parts.append(await self._chunk(prompt, choice, event))
        return b"".join(parts)

    def _hold(self, prompt: int, event: TextEvent) -> None:
        choice = prompt * self._n + event.index
        if choice in self._held:
            self._held[choice].add(event)
        else:
            self._held[choice] = Pending(event)

    def _waits(self, prompt: int, choice: int) -> bool:
        """Whether a choice must begin with scores of its prompt that have not come yet."""
        return (
            self._echo
            and self._logprobs
            and choice not in self._pieces
            and prompt not in self._scored
        )

    def _says(self, choice: int, event: TextEvent) -> bool:
        """Whether a chunk would hold text, an echo or an end; tokens wait for their text."""
        is_first = choice not in self._pieces
        return bool(event.text) or event.finish_reason is not None or (self._echo and is_first)

    async def _chunk(self, prompt: int, choice: int, event: TextEvent) -> bytes:
        shown = await self._shown(prompt, choice, event)
        usage = b""
        if self._include_usage:
            usage = _encode(self.usage.as_object()) if self._continuous else b"null"
            usage = b',"usage":' + usage
        return self._head + _encode(shown) + b"]" + usage + b"}\n\n"

    async def _shown(self, prompt: int, choice: int, event: TextEvent) -> dict[str, Any]:
        """A choice object with what is new; the first time with the echo before it."""
        pieces = self._pieces.get(choice)
        is_first = pieces is None
        if pieces is None:
            pieces = self._pieces[choice] = CompletionLogprobs(self._as_ids, self._turns)
        text = event.text
        runs: list[Sequence[TextLogprob] | Sequence[TextLogprob | None]] = []
        if is_first and self._echo:
            text = await self._prompt_text(prompt) + text
            if self._logprobs:
                runs.append(self._scored.get(prompt, ()))
        if event.logprobs is not None:
            runs.append(event.logprobs)
        logprobs = None
        if runs:
            first = self._first_token(prompt) if is_first else (0, "")
            logprobs = msgspec.Raw(await pieces.encoded(*runs, first_token=first))
        shown: dict[str, Any] = {
            "index": choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": event.finish_reason,
            "stop_reason": event.stop_reason,
        }
        if self._token_ids:
            shown["token_ids"] = event.token_ids
            if is_first:
                shown["prompt_token_ids"] = self._streams[prompt].prompt_token_ids
        return shown

    async def _prompt_text(self, prompt: int) -> str:
        """The prompt as text: made once, however many choices begin with it."""
        content = self._prompts[prompt].content
        if isinstance(content, str):
            return content
        if prompt not in self._echoes:
            self._echoes[prompt] = await text_of(self._engine, content)
        return self._echoes[prompt]

    def _first_token(self, prompt: int) -> tuple[int, str]:
        token = self._streams[prompt].prompt_token_ids[0]
        return token, self._engine.token_text(token)

    def end(self) -> bytes:
        """The usage chunk, if it was asked for."""
        if not self._include_usage:
            return b""
        return self._head + b'],"usage":' + _encode(self.usage.as_object()) + b"}\n\n"

    async def whole(self, batch: Batch) -> dict[str, Any]:
        """The text_completion object."""
        for prompt, event in batch:
            self.usage.count(prompt, event)
            if event.prompt_logprobs is not None:
                self._scored[prompt] = event.prompt_logprobs
        choices: list[dict[str, Any]] = []
        for prompt, event in sorted(batch, key=lambda item: (item[0], item[1].index)):
            shown = await self._shown(prompt, prompt * self._n + event.index, event)
            if self._prompt_logprobs:
                if prompt not in self._rows:
                    rows = await prompt_entries(self._scored.get(prompt, ()), self._turns)
                    self._rows[prompt] = msgspec.Raw(rows)
                shown["prompt_logprobs"] = self._rows[prompt]
            choices.append(shown)
        return {
            "id": self._answer.id,
            "object": "text_completion",
            "created": self._answer.created,
            "model": self._answer.model,
            "choices": choices,
            "usage": self.usage.as_object(),
            "service_tier": None,
            "system_fingerprint": None,
        }
