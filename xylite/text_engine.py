"""TextEngine: an engine that takes messages or a prompt and gives text.

Engine + tokenizer + chat template. Stop strings, detokenisation, log-probabilities and usage are cut
here, alike for every caller; HTTP handlers, the `LLM` class and the CLI are thin users of it.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xylite.config import EngineConfig
from xylite.errors import XyliteError
from xylite.runtime.request import FinishReason, Limits, SamplingParams


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """Log-probability of one delivered token, or of an alternative (then `top` is empty)."""

    token: str
    token_id: int
    logprob: float
    bytes: bytes
    top: tuple["TextLogprob", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEvent:
    """A piece of one sequence's text, or its end, or both.

    index            which of the request's n sequences
    text             new text; may be "" when tokens came that make no whole character yet, and
                     on the last event
    token_ids        tokens delivered with this event
    logprobs         one per token of token_ids, if asked for
    prompt_logprobs  on the first event of sequence 0, if asked for; the first entry is None
    stop_reason      the stop string or stop token id that ended it; None for the model's own end
    num_cached       prompt tokens whose KV was reused
    num_output       tokens delivered so far in this sequence
    error            set with finish_reason "error"
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TextLogprob, ...] | None = None
    prompt_logprobs: tuple[TextLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached: int = 0
    num_output: int = 0
    error: XyliteError | None = None


class TextStream:
    """The answer to one accepted request: iterate it, or `aclose()` it to stop the work.

    prompt_token_ids  what the model was given
    request_id        the engine's id of the request
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]

    def __aiter__(self) -> AsyncIterator[TextEvent]:
        raise NotImplementedError

    async def aclose(self) -> None:
        """Stop the work and free what it held; does nothing if it has ended."""
        raise NotImplementedError


class TextEngine:
    """One model, ready to generate.

        async with TextEngine(EngineConfig(model=...)) as engine:
            async for event in engine.generate("Once upon a time", SamplingParams(max_tokens=20)):
                print(event.text, end="")

    config            as resolved at start
    model_names       names clients may use; the first is the main one
    limits            what a request may ask for
    sampling_defaults fields of SamplingParams that the model's generation_config sets
    state             "loading", "ready", "draining", "dead" (the engine failed: restart the process)
    created           Unix time of the start
    """

    config: EngineConfig
    model_names: tuple[str, ...]
    limits: Limits
    sampling_defaults: Mapping[str, Any]
    state: str
    created: int

    def __init__(self, config: EngineConfig):
        self.config = config

    async def __aenter__(self) -> "TextEngine":
        raise NotImplementedError

    async def __aexit__(self, *exc: object) -> None:
        raise NotImplementedError

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of text; control tokens in it are recognised, as tokenizers do."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids; RequestError if one is outside the vocabulary."""
        raise NotImplementedError

    def token_text(self, token_id: int) -> str:
        """One token as text, as log-probabilities show it."""
        raise NotImplementedError

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Prompt ids of a conversation; RequestError if the template refuses it."""
        raise NotImplementedError

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
        raise NotImplementedError

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, **kwargs: Any
    ) -> AsyncIterator[TextEvent]:
        """`submit` and iterate; leaving the loop early stops the work."""
        raise NotImplementedError
        yield

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests (Overloaded, code "draining"), let the running end, abort the rest."""
        raise NotImplementedError

    def snapshot(self) -> Mapping[str, Any]:
        """Counters and gauges now; the names are listed in runtime/stats.py."""
        raise NotImplementedError
