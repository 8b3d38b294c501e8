"""POST /v1/chat/completions."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from xylite.errors import RequestError
from xylite.http.body import read_json
from xylite.http.generate import Answer, Prompt, Usage, answer_with, submit
from xylite.http.logprobs import chat_entries, prompt_entries
from xylite.http.params import (
    banned_tokens,
    check_num_sequences,
    check_streaming,
    checked_priority,
    checked_salt,
    sampling_params,
    truncated,
)
from xylite.http.protocol import (
    REASONING_EFFORTS,
    ChatRequest,
    StreamOptions,
    TokenizeRequest,
    check_response_format,
    unsupported,
    whole,
)
from xylite.http.service import SERVICE, Service
from xylite.http.stream import Batch, TimeLimits
from xylite.runtime.request import SamplingParams, check_params
from xylite.text_engine import Pending, TextEvent, TextStream

MAX_TOKENS = 2**31 - 1

_encode = msgspec.json.Encoder().encode


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    service = request.app[SERVICE]
    limits = TimeLimits.of(request)
    asked = await read_json(request, ChatRequest)
    service.require_ready()
    answer = Answer.new("chatcmpl", service.model_name(asked.model))
    options = check_streaming(asked)
    async with limits.preparing():
        params = await _params(service, asked)
        service.engine.require_room(params.n)
        prompt = Prompt(
            await render(service, asked, tools=chat_tools(asked), special=asked.add_special_tokens),
            "messages",
            _limit_name(asked),
        )
        streams = await submit(
            service,
            [await truncated(service, asked, prompt)],
            params,
            answer=answer,
            priority=checked_priority(asked),
            cache_salt=checked_salt(asked.cache_salt),
            add_special_tokens=False,
        )
    form = ChatForm(service, asked, options, answer, streams[0], params)
    return await answer_with(
        request, form, streams, n=params.n, streamed=bool(asked.stream), limits=limits
    )


def _limit_name(asked: ChatRequest) -> str:
    return "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"


async def _params(service: Service, asked: ChatRequest) -> SamplingParams:
    check_response_format(asked.response_format)
    name = _limit_name(asked)
    max_tokens = whole(name, getattr(asked, name))
    if max_tokens is not None and not 1 <= max_tokens <= MAX_TOKENS:
        raise RequestError(f"{name} must be in [1, {MAX_TOKENS}], got {max_tokens}", param=name)
    top = whole("top_logprobs", asked.top_logprobs)
    if top and not asked.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    if top is not None and not 0 <= top <= service.engine.limits.max_logprobs:
        raise RequestError(
            f"top_logprobs must be in [0, {service.engine.limits.max_logprobs}], got {top}",
            param="top_logprobs",
        )
    params = sampling_params(
        asked,
        service.engine.sampling_defaults,
        max_tokens=max_tokens,
        logprobs=(top or 0) if asked.logprobs else None,
        banned_token_ids=await banned_tokens(service.engine, asked.bad_words),
    )
    # Before require_room: what no server could take is the client's mistake, full or not.
    check_params(params, service.engine.limits)
    check_num_sequences(1, params.n)
    return params


def chat_tools(asked: ChatRequest) -> Sequence[Mapping[str, Any]] | None:
    """Tools that the template shows; RequestError where the model would have to call one.

    The model reads about tools only with tool_choice "none": parsing calls is not built yet.
    """
    choice = asked.tool_choice
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise RequestError(
            "tool_choice must be 'none', 'auto', 'required' or an object naming a function, got "
            f"{choice[:40]!r}",
            param="tool_choice",
        )
    if not asked.tools:
        if choice is not None and choice not in ("none", "auto"):
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return None
    if choice != "none":
        raise unsupported("tools", " unless tool_choice is 'none'")
    return asked.tools


async def render(
    service: Service,
    asked: ChatRequest | TokenizeRequest,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    special: bool | None,
) -> list[int]:
    """Prompt ids of the conversation; RequestError naming the message that is wrong."""
    goes_on = bool(asked.continue_final_message)
    opens = not goes_on if asked.add_generation_prompt is None else asked.add_generation_prompt
    kwargs = dict(asked.chat_template_kwargs or {})
    if asked.reasoning_effort is not None:
        if asked.reasoning_effort not in REASONING_EFFORTS:
            raise RequestError(
                f"reasoning_effort must be one of {', '.join(REASONING_EFFORTS)}; got "
                f"{asked.reasoning_effort[:40]!r}",
                param="reasoning_effort",
            )
        kwargs.setdefault("reasoning_effort", asked.reasoning_effort)
    return await service.engine.render(
        asked.messages or [],
        tools=tools,
        add_generation_prompt=opens,
        continue_final_message=goes_on,
        add_special_tokens=bool(special),
        template_kwargs=kwargs,
        raw_control_tokens=service.config.raw_control_tokens,
    )


class ChatForm:
    """Events as chat.completion and chat.completion.chunk objects."""

    def __init__(
        self,
        service: Service,
        asked: ChatRequest,
        options: StreamOptions,
        answer: Answer,
        stream: TextStream,
        params: SamplingParams,
    ):
        self.usage = Usage(len(stream.prompt_token_ids))
        self._answer = answer
        self._prompt_ids = stream.prompt_token_ids
        self._role = service.config.response_role
        self._turns = service.slices
        self._n = params.n
        self._token_ids = bool(asked.return_token_ids)
        self._as_ids = bool(asked.return_tokens_as_token_ids)
        self._include_usage = bool(options.include_usage)
        self._continuous = self._include_usage and bool(options.continuous_usage_stats)
        self._begun = False
        self._held: dict[int, Pending] = {}
        # A chunk is written thousands of times: what never changes is encoded once.
        self._head = (
            b'data: {"id":%s,"object":"chat.completion.chunk","created":%d,"model":%s,"choices":['
            % (_encode(answer.id), answer.created, _encode(answer.model))
        )

    async def chunks(self, batch: Batch) -> bytes:
        """Role chunks first, then one chunk for each event that says something."""
        parts = [] if self._begun else [self._role_chunk(i) for i in range(self._n)]
        self._begun = True
        for prompt, event in batch:
            self.usage.count(prompt, event)
            if event.index in self._held:
                held = self._held.pop(event.index)
                held.add(event)
                event = held.merged()
            if event.text or event.finish_reason is not None:
                logprobs = b"null"
                if event.logprobs:
                    logprobs = await chat_entries(event.logprobs, self._as_ids, self._turns)
                parts.append(self._chunk(event, logprobs))
            elif event.token_ids or event.logprobs:
                # Tokens without a whole character yet: told with the text they become.
                self._held[event.index] = Pending(event)
        return b"".join(parts)

    def _role_chunk(self, index: int) -> bytes:
        extra = b""
        if self._token_ids and index == 0:
            extra = b',"prompt_token_ids":' + _encode(self._prompt_ids)
        return (
            self._head
            + b'{"index":%d,"delta":{"role":%s,"content":""},"logprobs":null,"finish_reason":null}]'
            % (index, _encode(self._role))
            + self._usage()
            + extra
            + b"}\n\n"
        )

    def _chunk(self, event: TextEvent, logprobs: bytes) -> bytes:
        delta, ending, ids = b"{}", b"null", b""
        if event.text or event.logprobs:
            delta = b'{"content":%b}' % _encode(event.text)
        if event.finish_reason is not None:
            stop_reason = _encode(event.stop_reason)
            ending = b'%b,"stop_reason":%b' % (_encode(event.finish_reason), stop_reason)
        if self._token_ids:
            ids = b',"token_ids":' + _encode(event.token_ids)
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}]%b}\n\n' % (
            self._head,
            event.index,
            delta,
            logprobs,
            ending,
            ids,
            self._usage(),
        )

    def _usage(self) -> bytes:
        if not self._include_usage:
            return b""
        return b',"usage":' + (_encode(self.usage.as_object()) if self._continuous else b"null")

    def end(self) -> bytes:
        """The usage chunk, if it was asked for."""
        if not self._include_usage:
            return b""
        return self._head + b'],"usage":' + _encode(self.usage.as_object()) + b"}\n\n"

    async def whole(self, batch: Batch) -> dict[str, Any]:
        """The chat.completion object."""
        choices: list[dict[str, Any]] = []
        body: dict[str, Any] = {
            "id": self._answer.id,
            "object": "chat.completion",
            "created": self._answer.created,
            "model": self._answer.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": None,
        }
        for prompt, event in sorted(batch, key=lambda item: item[1].index):
            self.usage.count(prompt, event)
            choice: dict[str, Any] = {
                "index": event.index,
                "message": {"role": self._role, "content": event.text, "refusal": None},
                "logprobs": None,
                "finish_reason": event.finish_reason,
                "stop_reason": event.stop_reason,
            }
            if event.logprobs is not None:
                entries = await chat_entries(event.logprobs, self._as_ids, self._turns)
                choice["logprobs"] = msgspec.Raw(entries)
            if self._token_ids:
                choice["token_ids"] = event.token_ids
            if event.prompt_logprobs is not None:
                rows = await prompt_entries(event.prompt_logprobs, self._turns)
                body["prompt_logprobs"] = msgspec.Raw(rows)
            choices.append(choice)
        body["usage"] = self.usage.as_object()
        if self._token_ids:
            body["prompt_token_ids"] = self._prompt_ids
        return body
