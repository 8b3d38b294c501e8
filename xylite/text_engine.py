"""TextEngine: an engine that takes messages or a prompt and gives text.

Engine + tokenizer + chat template. HTTP handlers, the `LLM` class and the CLI are thin users of it.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from xylite.checkpoint import Checkpoint, open_checkpoint
from xylite.config import EngineConfig, checked, speculative
from xylite.errors import Closed, ConfigError, Overloaded, RequestError, file_reason, short
from xylite.runtime.engine import Engine
from xylite.runtime.request import (
    Limits,
    SamplingParams,
    check_params,
    check_token_ids,
    make_request,
)
from xylite.runtime.stats import Observer
from xylite.runtime.turnstile import Turnstile
from xylite.sampling_defaults import sampling_defaults
from xylite.text.chat import MAX_CHAT_CHARS, encode_chat
from xylite.text.stop import check_stops
from xylite.text.template import ChatTemplate
from xylite.text.tokenizer import Tokenizer
from xylite.text_stream import Pending, TextEvent, TextLogprob, TextStream

__all__ = ["Pending", "TextEngine", "TextEvent", "TextLogprob", "TextStream"]

# Readers woken in one turn of the event loop; each takes about 0.1 ms to put its event on the wire.
READERS_PER_TURN: Final = 32
# Prompts encoded or checked in one turn; each takes up to half a millisecond, as does a request of
# many prompts for each of them.
PROMPTS_PER_TURN: Final = 4
INLINE_CHARS: Final = 4096  # longer texts are encoded in a thread, so that the loop goes on


class TextEngine:
    """One model, ready to generate.

        async with TextEngine(EngineConfig(model=...)) as engine:
            async for event in engine.generate("Once upon a time", SamplingParams(max_tokens=20)):
                print(event.text, end="")

    Its methods raise Overloaded (code "loading") before it has started and Closed after its end.

    config            as resolved at start
    model_names       names clients may use; the first is the main one
    limits            what a request may ask for
    sampling_defaults fields of SamplingParams that the model's generation_config sets
    tokenizer         the model's tokenizer
    state             "loading", "ready", "draining", "closed", or "dead" (the engine failed:
                      restart the process)
    dead              set when the state becomes "dead"; every stream is told
    created           Unix time of the start
    observers         told about every ended request
    """

    limits: Limits
    tokenizer: Tokenizer

    def __init__(self, config: EngineConfig):
        self.config = checked(config)
        if config.speculative_config is not None:
            speculative(config.speculative_config)  # a mistake there is said at once
        self.created = int(time.time())
        self.model_names: tuple[str, ...] = config.served_model_name or (_model_name(config),)
        self.sampling_defaults: Mapping[str, Any] = {}
        self.observers: list[Observer] = []
        self.dead = asyncio.Event()
        self._deliveries = Turnstile(READERS_PER_TURN)
        self._prompts = Turnstile(PROMPTS_PER_TURN)
        self._template: ChatTemplate | None = None
        self._end_tokens: frozenset[int] = frozenset()
        self._engine: Engine | None = None
        self._threads: list[ThreadPoolExecutor] = []
        self._num_requests = 0
        self._nonce = secrets.token_hex(4)

    @property
    def state(self) -> str:
        return "loading" if self._engine is None else self._engine.state

    async def __aenter__(self) -> "TextEngine":
        assert self._engine is None, "a TextEngine is entered once"
        loop = asyncio.get_running_loop()
        device = ThreadPoolExecutor(1, thread_name_prefix="xylite-device")
        texts = ThreadPoolExecutor(2, thread_name_prefix="xylite-text")
        self._threads = [device, texts]
        try:
            checkpoint = await loop.run_in_executor(texts, self._open)
            draft = await loop.run_in_executor(texts, self._open_draft)
            # Imported here: everything above works, and fails, without waiting for torch.
            from xylite.runtime.build import build

            parts = await loop.run_in_executor(
                device, build, self.config, checkpoint, self.tokenizer.vocab_size, draft
            )
        except BaseException:
            await self._stop_threads()
            raise
        self.config, self.limits = parts.config, parts.limits
        self._engine = Engine(
            parts.scheduler,
            parts.tabulator,
            parts.executor,
            device,
            num_words=parts.num_words,
            async_scheduling=self.config.async_scheduling,
            watchdog_s=self.config.watchdog_timeout,
            drafter=parts.drafter,
            budgets=parts.budgets,
            chores=parts.chores,
            observers=self.observers,
            dead=self.dead,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._engine is not None:
            await self._engine.close()
        await self._stop_threads()

    async def _stop_threads(self) -> None:
        pools, self._threads = self._threads, []
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        if pools and self.state != "dead":
            # At once, and by one thread: meanwhile the loop may be told to start no others.
            await asyncio.to_thread(lambda: [pool.shutdown() for pool in pools])

    def _open(self) -> Checkpoint:
        """Read everything but the weights."""
        config = self.config
        checkpoint = open_checkpoint(
            config.model,
            tokenizer_dir=config.tokenizer,
            with_weights=config.load_format != "dummy",
        )
        if (
            config.load_format in ("safetensors", "gguf")
            and checkpoint.format != config.load_format
        ):
            raise ConfigError(
                f"load_format is {config.load_format}, but {checkpoint.path} is in "
                f"{checkpoint.format} form",
                param="load_format",
            )
        self.tokenizer = Tokenizer.from_checkpoint(checkpoint)
        source = checkpoint.chat_template
        if config.chat_template is not None:
            source = _read_template(config.chat_template)
        if source is not None:
            try:
                self._template = ChatTemplate(source, self.tokenizer.special_tokens)
            except ConfigError as e:
                where = config.chat_template or checkpoint.path
                raise ConfigError(f"{where}: {e.message}", param="chat_template") from None
        self._end_tokens = self.tokenizer.end_tokens(checkpoint)
        self.sampling_defaults = sampling_defaults(config, checkpoint.generation_config)
        return checkpoint

    def _open_draft(self) -> Checkpoint | None:
        """The draft model's checkpoint; ConfigError if it speaks in other tokens."""
        given = self.config.speculative_config
        model = None if given is None else speculative(given).model
        if model is None:
            return None
        checkpoint = open_checkpoint(model, with_weights=self.config.load_format != "dummy")
        theirs = Tokenizer.from_checkpoint(checkpoint)
        ours = self.tokenizer
        for i in range(ours.vocab_size):
            other = theirs.token_bytes(i) if i < theirs.vocab_size else None
            if ours.token_bytes(i) != other:
                raise ConfigError(
                    f"speculative_config: the draft model {model} has another vocabulary: token "
                    f"{i} is {ours.token_bytes(i)!r} to the model and {other!r} to it",
                    param="speculative_config",
                )
        return checkpoint

    def _running(self) -> Engine:
        if self._engine is None:
            raise Overloaded("the model is still loading", code="loading", retry_after_s=5)
        if not self._threads or self._engine.state == "closed":
            raise Closed("the engine was closed")
        return self._engine

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, to_be_cut: bool = False
    ) -> list[int]:
        """Token ids of text; control tokens in it are recognised, as tokenizers do.

        to_be_cut  the caller cuts the ids, so they may be more than the context holds
        """
        self._running()
        if not isinstance(text, str):
            raise RequestError(f"text must be a string, got {short(text)}", param="text")
        if not to_be_cut or len(text) > MAX_CHAT_CHARS:
            self._check_length(text)
        if len(text) <= INLINE_CHARS:
            await self._prompts.wait()
            return self.tokenizer.encode(text, add_special_tokens)
        return await self._in_thread(self.tokenizer.encode, text, add_special_tokens)

    def _check_length(self, text: str) -> None:
        """Refuse a text that cannot fit before spending time on its tokens."""
        if self.tokenizer.too_long(text, self.limits.max_model_len):
            raise RequestError(
                f"This model's maximum context length is {self.limits.max_model_len} tokens. "
                f"However, the text has {len(text)} characters, which are more tokens than that.",
                param="prompt",
                code="context_length_exceeded",
            )

    async def _in_thread(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        work = self._threads[1].submit(function, *args, **kwargs)
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._threads or (task is not None and task.cancelling()):
                raise
            # It waited for a thread when the threads were stopped.
            raise Closed("the engine was closed") from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids; RequestError if one is outside the vocabulary."""
        self._running()
        check_token_ids("tokens", ids, self.tokenizer.vocab_size)
        return self.tokenizer.decode(ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token as text, as log-probabilities show it."""
        self._running()
        check_token_ids("token_id", (token_id,), self.tokenizer.vocab_size)
        return self.tokenizer.token_text(token_id)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        raw_control_tokens: bool = False,
    ) -> list[int]:
        """Prompt ids of a conversation; RequestError if the template refuses it."""
        self._running()
        return await self._in_thread(
            encode_chat,
            self.tokenizer,
            self._template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            add_special_tokens=add_special_tokens,
            template_kwargs=template_kwargs,
            raw_control_tokens=raw_control_tokens,
        )

    def require_room(self, n: int) -> None:
        """Overloaded (503) unless n more sequences would be taken now: ask before costly work."""
        self._running().require_room(n)

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
    ) -> TextStream:
        """Check and queue a request. RequestError (4xx) and Overloaded (503) are raised here."""
        engine = self._running()
        check_params(params, self.limits)
        if isinstance(params.stop, str):
            params = replace(params, stop=(params.stop,))
        check_stops(params.stop)
        engine.require_room(params.n)
        if isinstance(prompt, str):
            prompt = await self.encode(prompt, add_special_tokens=add_special_tokens)
        else:
            await self._prompts.wait()
        self._num_requests += 1
        request = make_request(
            f"{request_id or 'request'}-{self._nonce}-{self._num_requests}",
            prompt,
            params,
            limits=self.limits,
            end_tokens=self._end_tokens,
            default_seed=self._seed(),
            priority=priority,
            cache_salt=cache_salt,
        )
        stream = TextStream(self.tokenizer, request, self._deliveries)
        stream.ticket = engine.submit(request, stream)
        return stream

    def _seed(self) -> int:
        """A seed for a request that brings none: differs from request to request, and repeats in
        the next process that gets the same requests in the same order."""
        return hash((self.config.seed, self._num_requests)) & (2**63 - 1)

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **kwargs: Any
    ) -> AsyncIterator[TextEvent]:
        """`submit` and iterate; leaving the loop early stops the work."""
        params = SamplingParams() if params is None else params
        stream = await self.submit(prompt, params, **kwargs)
        try:
            async for event in stream:
                yield event
        finally:
            await stream.aclose()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests (code "draining"), let the running ones end, abort the rest."""
        if self._engine is not None:
            await self._engine.drain(timeout_s)

    def snapshot(self) -> Mapping[str, Any]:
        """Counters and gauges now; the names are those of `Engine.snapshot`."""
        return {} if self._engine is None else self._engine.snapshot()


def _model_name(config: EngineConfig) -> str:
    """The name a model is served under if none is given: its folder's or file's, no path."""
    path = Path(config.model)
    if path.name in ("", ".."):  # such as "."
        path = path.resolve()
    return path.name.removesuffix(".gguf") or config.model


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(
            f"chat_template {path}: {file_reason(e)}", param="chat_template"
        ) from None
