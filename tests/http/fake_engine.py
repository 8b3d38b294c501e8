"""An engine without a model: what it says, when, and how it fails is written by the test.

It has TextEngine's interface. A token is one character, its id the code point.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xylite.config import EngineConfig
from xylite.errors import EngineError, Overloaded, RequestError
from xylite.runtime.event_queue import EventQueue
from xylite.runtime.request import Limits, SamplingParams, check_params
from xylite.runtime.stats import RequestRecord
from xylite.text.chat import render_chat
from xylite.text.template import ChatTemplate
from xylite.text.written import plain
from xylite.text_engine import TextEvent, TextLogprob

TEMPLATE = ChatTemplate(
    "{% for m in messages %}"
    "{% if m.content == 'raise' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m.role }}:{{ m.content }}\n"
    "{% endfor %}",
    {},
)

Item = TextEvent | asyncio.Event | Exception


@dataclass(eq=False)
class Call:
    """One `submit`, as it came."""

    prompt: str | Sequence[int]
    ids: tuple[int, ...]
    params: SamplingParams
    request_id: str | None
    priority: int
    cache_salt: str
    add_special_tokens: bool
    num_events: int = 0
    is_closed: bool = False
    is_over: bool = False


def record_of(**fields: Any) -> RequestRecord:
    """What observers get, with times that make sense."""
    values: dict[str, Any] = {
        "request_id": "r",
        "num_prompt": 5,
        "max_tokens": 16,
        "n": 1,
        "arrival": 100.0,
        "scheduled": 100.002,
        "first_token": 100.012,
        "last_token": 100.212,
        "ended": 100.212,
    }
    return RequestRecord(**(values | fields))


def logprob(token: str, value: float = -0.5, k: int = 0) -> TextLogprob:
    """A log-probability of `token` and k alternatives, the token itself the best of them."""
    others = [(token, value), ("x", -1.5), ("y", -2.5), ("z", float("-inf"))][:k]
    top = tuple(TextLogprob(t, ord(t[:1] or "?"), v, t.encode()) for t, v in others)
    return TextLogprob(token, ord(token[:1] or "?"), value, token.encode(), top)


def said(
    text: str,
    *,
    index: int = 0,
    finish: str | None = "stop",
    params: SamplingParams | None = None,
    stop_reason: str | int | None = None,
    num_cached: int = 0,
) -> list[TextEvent]:
    """Events of one sequence, one character each; the last one carries the end."""
    k = None if params is None else params.logprobs
    events: list[TextEvent] = []
    for i, c in enumerate(text):
        is_last = i == len(text) - 1
        events.append(
            TextEvent(
                index=index,
                text=c,
                token_ids=(ord(c),),
                logprobs=None if k is None else (logprob(c, k=k),),
                finish_reason=finish if is_last else None,
                stop_reason=stop_reason if is_last else None,
                num_cached=num_cached,
                num_output=i + 1,
            )
        )
    return events


def interleaved(*sequences: Sequence[TextEvent]) -> list[TextEvent]:
    """First events first, as a batch would give them."""
    longest = max(len(s) for s in sequences)
    return [s[i] for i in range(longest) for s in sequences if i < len(s)]


def default_script(call: Call) -> Iterable[Item]:
    """ "Hi!" for each sequence, cut at max_tokens."""
    p = call.params
    scores = None
    if p.prompt_logprobs is not None:
        scores = (None, *(logprob(chr(i), k=p.prompt_logprobs) for i in call.ids[1:]))
    if p.max_tokens == 0:
        return [
            TextEvent(index=i, finish_reason="length", prompt_logprobs=None if i else scores)
            for i in range(p.n)
        ]
    text = "Hi!"[: p.max_tokens]
    finish = "stop" if text == "Hi!" else "length"
    events = interleaved(*(said(text, index=i, params=p, finish=finish) for i in range(p.n)))
    if scores is not None:
        first = events[0]
        events[0] = TextEvent(
            index=0,
            text=first.text,
            token_ids=first.token_ids,
            logprobs=first.logprobs,
            prompt_logprobs=scores,
            finish_reason=first.finish_reason,
            num_output=first.num_output,
        )
    return events


class FakeStream(EventQueue[TextEvent]):
    """TextStream over a script, which runs whether its events are read or not."""

    def __init__(self, engine: "FakeEngine", call: Call):
        super().__init__(call.params.n)
        self.request_id = call.request_id or "fake"
        self.prompt_token_ids = call.ids
        self._engine = engine
        self._call = call
        self._task = asyncio.get_running_loop().create_task(self._run(engine.script(call)))

    async def _run(self, script: Iterable[Item]) -> None:
        for item in script:
            if isinstance(item, asyncio.Event):
                await self._engine.either(item)
            elif isinstance(item, Exception):
                self.abandon(item)
                return
            else:
                self._call.num_events += 1
                self.add(item, is_last=item.finish_reason is not None)
            if self._engine.is_aborting:
                is_dead = self._engine.dead.is_set()
                self._end("error" if is_dead else "abort")
                error = EngineError("stopped", code="engine_dead" if is_dead else "shutdown")
                self.add(TextEvent(index=0, finish_reason="error", error=error), is_last=True)
                return
        self._end("stop")
        self.close()

    async def aclose(self) -> None:
        self._call.is_closed = True
        self._task.cancel()
        self._end("abort")
        self.close()

    def _end(self, reason: str) -> None:
        if self._call.is_over:
            return
        self._call.is_over = True
        self._engine.ended(self._call, reason)


class FakeEngine:
    """TextEngine's interface; see `script`, `refuse`, `state`."""

    def __init__(
        self,
        script: Callable[[Call], Iterable[Item]] = default_script,
        *,
        names: tuple[str, ...] = ("fake",),
        max_model_len: int = 1000,
        defaults: Mapping[str, Any] | None = None,
    ):
        self.config = EngineConfig(model="fake", dtype="float32")
        self.model_names = names
        self.limits = Limits(0x110000, max_model_len, max_model_len)
        self.sampling_defaults: Mapping[str, Any] = defaults or {}
        self.state = "ready"
        self.dead = asyncio.Event()
        self.created = 1_700_000_000
        self.observers: list[Any] = []
        self.script = script
        self.refuse: BaseException | None = None
        self.hold_submit: asyncio.Event | None = None
        self.num_held = 0
        self.calls: list[Call] = []
        self.renders: list[dict[str, Any]] = []
        self.is_aborting = False
        self.finished: dict[str, int] = {}
        self.num_prompt = 0
        self.num_output = 0
        self._running: set[Call] = set()
        self._changed = asyncio.Event()

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, to_be_cut: bool = False
    ) -> list[int]:
        # Its tokens are of one character; the real engine knows less, and refuses later.
        if len(text) > self.limits.max_model_len and not to_be_cut:
            raise self._too_long()
        return [ord(c) for c in text]

    def _too_long(self) -> RequestError:
        return RequestError(
            f"This model's maximum context length is {self.limits.max_model_len} tokens.",
            param="prompt",
            code="context_length_exceeded",
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        for i in ids:
            if not 0 <= i < self.limits.vocab_size:
                raise RequestError(f"token id {i} is outside the vocabulary", param="tokens")
        return "".join(map(chr, ids))

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    async def render(
        self, messages: Sequence[Mapping[str, Any]], *, raw_control_tokens: bool, **options: Any
    ) -> list[int]:
        self.renders.append({"messages": list(messages), "raw": raw_control_tokens, **options})
        if messages and messages[-1].get("content") == "bug":
            raise ZeroDivisionError("secret at 0xdeadbeef in /home/me")
        options.pop("add_special_tokens")
        return [ord(c) for c in plain(render_chat(TEMPLATE, messages, **options))]

    def require_room(self, n: int) -> None:
        """There is always room until `submit` refuses."""

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
    ) -> FakeStream:
        if self.hold_submit is not None:
            self.num_held += 1
            self._tell()
            try:
                await self.hold_submit.wait()
            finally:
                self.num_held -= 1
                self._tell()
        if self.refuse is not None:
            raise self.refuse
        if self.state == "draining":
            raise Overloaded("draining", code="draining")
        ids = tuple(map(ord, prompt)) if isinstance(prompt, str) else tuple(prompt)
        check_params(params, self.limits)
        if not ids:
            raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
        if not all(0 <= i < self.limits.vocab_size for i in ids):
            raise RequestError("prompt holds a token id outside the vocabulary", param="prompt")
        least = 1 if params.max_tokens is None else params.max_tokens
        if len(ids) + least > self.limits.max_model_len:
            raise self._too_long()
        call = Call(prompt, ids, params, request_id, priority, cache_salt, add_special_tokens)
        self.calls.append(call)
        self._running.add(call)
        self._tell()
        return FakeStream(self, call)

    def ended(self, call: Call, reason: str) -> None:
        self._running.discard(call)
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.num_prompt += len(call.ids)
        self.num_output += call.num_events
        record = record_of(
            num_prompt=len(call.ids),
            num_output=call.num_events,
            finish_reason=reason,
            n=call.params.n,
            itl_s=[0.02] * max(0, call.num_events - 1),
        )
        for observer in self.observers:
            observer.on_finished(record)
        self._tell()

    async def drain(self, timeout_s: float) -> None:
        self.state = "draining"
        self._tell()
        try:
            async with asyncio.timeout(timeout_s):
                await self.until(lambda: not self._running)
        except TimeoutError:
            self.is_aborting = True
            self._tell()
            await self.until(lambda: not self._running)

    def die(self) -> None:
        """Fail for good, and tell every stream."""
        self.state = "dead"
        self.dead.set()
        self.is_aborting = True
        self._tell()

    def snapshot(self) -> Mapping[str, Any]:
        return {
            "num_running": self.num_running,
            "num_waiting": 3,
            "kv_usage": 0.25,
            "num_blocks": 64,
            "block_size": 16,
            "prompt_tokens": self.num_prompt,
            "generation_tokens": self.num_output,
            "finished": self.finished,
            "rejections": {"max_num_queued_reqs": 2},
            "spec_accepted_per_pos": [5, 2],
            "iterations": {1: 4, 9: 2},
        }

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds()`, looking whenever something happens here."""
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    async def either(self, event: asyncio.Event) -> None:
        """Wait for `event`, or for the end of a drain or of the engine."""
        waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(self._aborting())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for w in waits:
                w.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _aborting(self) -> None:
        await self.until(lambda: self.is_aborting)

    def _tell(self) -> None:
        self._changed.set()


def engine_fault() -> EngineError:
    return EngineError("the numbers of this request were not finite", code="nonfinite")


def paused(events: Iterable[TextEvent]) -> list[Item]:
    """The events with a breath before each, so that each is delivered by itself."""
    now = asyncio.Event()
    now.set()
    return [item for event in events for item in (now, event)]
