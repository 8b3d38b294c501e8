"""The text of one answer, cut from its tokens as they come.

Stop strings, detokenisation, log-probabilities and usage are cut here, alike for every caller.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from xylite.errors import XyliteError
from xylite.runtime.event_queue import EventQueue
from xylite.runtime.request import (
    FinishReason,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
)
from xylite.runtime.tickets import Ticket
from xylite.runtime.turnstile import Turnstile
from xylite.text.detokenize import Detokenizer
from xylite.text.stop import StopChecker, StopStrings
from xylite.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """Log-probability of one delivered token, or of an alternative (then `top` is empty).

    rank  the token's place among all, 1 = the most likely; None for an alternative, as `top` is in
          that order
    """

    token: str
    token_id: int
    logprob: float
    bytes: bytes
    top: tuple["TextLogprob", ...] = ()
    rank: int | None = None


@dataclass(slots=True, kw_only=True)  # frozen takes three times as long to make
class TextEvent:
    """A piece of one sequence's text, or its end, or both. Never changed.

    index            which of the request's n sequences
    text             new text; may be "" when tokens came that make no whole character yet, and
                     on the last event
    token_ids        tokens delivered with this event
    logprobs         one per token of token_ids, if asked for
    prompt_logprobs  on the first event of sequence 0, if asked for; the first entry is None.
                     Entries are made as they are read: on an event loop, read a few at a time
    stop_reason      the stop string or stop token id that ended it; None for the model's own end
    num_cached       prompt tokens whose KV was reused
    num_output       tokens delivered so far in this sequence
    error            set with finish_reason "error"
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TextLogprob, ...] | None = None
    prompt_logprobs: Sequence[TextLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached: int = 0
    num_output: int = 0
    error: XyliteError | None = None


class Pending:
    """Events of one sequence that nobody has taken yet, as one."""

    __slots__ = ("_first", "_ids", "_last", "_logprobs", "_prompt_logprobs", "_texts")

    def __init__(self, first: TextEvent):
        self._first = self._last = first

    def add(self, event: TextEvent) -> None:
        """Append an event; it comes after all added before."""
        if self._last is self._first:
            self._texts: list[str] = []
            self._ids: list[int] = []
            self._logprobs: list[TextLogprob] | None = None
            self._prompt_logprobs: Sequence[TextLogprob | None] | None = None
            self._append(self._first)
        self._last = event
        self._append(event)

    def _append(self, event: TextEvent) -> None:
        if event.text:
            self._texts.append(event.text)
        self._ids.extend(event.token_ids)
        if event.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs.extend(event.logprobs)
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs

    def merged(self) -> TextEvent:
        """All of it as one event."""
        last = self._last
        if last is self._first:
            return last
        return TextEvent(
            index=last.index,
            text="".join(self._texts),
            token_ids=tuple(self._ids),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            num_cached=last.num_cached,
            num_output=last.num_output,
        )


def _text_logprob(tokenizer: Tokenizer, entry: TokenLogprob) -> TextLogprob:
    """The entry with its tokens as text."""

    def one(
        token: int, logprob: float, top: tuple[TextLogprob, ...] = (), rank: int | None = None
    ) -> TextLogprob:
        data = tokenizer.token_bytes(token)
        return TextLogprob(data.decode("utf-8", "replace"), token, logprob, data, top, rank)

    return one(entry.token, entry.logprob, tuple(one(t, p) for t, p in entry.top), entry.rank)


class _PromptLogprobs(Sequence[TextLogprob | None]):
    """The engine's entries of a prompt's tokens, as text; made when they are read."""

    __slots__ = ("_entries", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None]):
        self._tokenizer = tokenizer
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> TextLogprob | None: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TextLogprob | None, ...]: ...
    def __getitem__(self, index: int | slice):
        if isinstance(index, slice):
            return tuple(self._text(entry) for entry in self._entries[index])
        return self._text(self._entries[index])

    def _text(self, entry: TokenLogprob | None) -> TextLogprob | None:
        return None if entry is None else _text_logprob(self._tokenizer, entry)


class _SequenceText:
    """Text of one sequence: detokeniser, stop strings, and where it has got to."""

    __slots__ = ("detokenizer", "num_output", "stops")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        params: SamplingParams,
        stops: StopStrings,
    ):
        self.detokenizer = Detokenizer(
            tokenizer,
            prompt[-4:],
            params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self.stops = StopChecker(stops, params.include_stop_str_in_output)
        self.num_output = 0


class TextStream(EventQueue[TextEvent]):
    """The answer to one accepted request: iterate it, or `aclose()` it to stop the work.

    prompt_token_ids  what the model was given
    request_id        the engine's id of the request
    """

    def __init__(self, tokenizer: Tokenizer, request: Request, deliveries: Turnstile):
        super().__init__(request.params.n, deliveries.call)
        self.request_id = request.id
        self.prompt_token_ids = request.prompt
        self.ticket: Ticket | None = None
        self._tokenizer = tokenizer
        self._params = request.params
        self._end_tokens = request.end_tokens
        stops = StopStrings(request.params.stop)
        self._texts = [
            _SequenceText(tokenizer, request.prompt, request.params, stops)
            for _ in range(request.params.n)
        ]

    async def aclose(self) -> None:
        """Stop the work, free what it held and end the iteration, also one that waits."""
        if self.ticket is not None:
            self.ticket.cancel()
        self.close()

    def put(self, event: TokenEvent) -> tuple[int, FinishReason | None]:
        """Cut a token event's text; called by the engine as tokens come."""
        made = self._cut(event)
        self.add(made, is_last=made.finish_reason is not None)
        return len(made.token_ids), made.finish_reason

    def _cut(self, event: TokenEvent) -> TextEvent:
        """The text of a token event, up to the first stop string."""
        text = self._texts[event.index]
        params = self._params
        pieces: list[str] = []
        before = text.num_output
        matched: str | None = None
        for token in event.tokens:
            text.num_output += 1
            if token == event.stop_token and not self._shows_stop_token(token):
                continue
            piece = text.detokenizer.add((token,))
            if params.stop:
                armed = text.num_output > params.min_tokens
                piece, matched = text.stops.add(piece, armed=armed)
            pieces.append(piece)
            if matched is not None:
                break
        delivered = text.num_output - before
        finish, stop_reason = event.finish_reason, None
        if matched is not None:
            finish, stop_reason = "stop", matched
        elif finish is not None:
            piece, matched = text.stops.add(text.detokenizer.finish())
            pieces += (piece, "" if matched is not None else text.stops.flush())
            if matched is not None and finish == "length":
                finish, stop_reason = "stop", matched
            elif event.stop_token is not None and event.stop_token not in self._end_tokens:
                stop_reason = event.stop_token
        return TextEvent(
            index=event.index,
            text="".join(pieces),
            token_ids=event.tokens[:delivered],
            logprobs=self._logprobs(event, delivered),
            prompt_logprobs=(
                None
                if event.prompt_logprobs is None
                else _PromptLogprobs(self._tokenizer, event.prompt_logprobs)
            ),
            finish_reason=finish,
            stop_reason=stop_reason,
            num_cached=event.num_cached,
            num_output=text.num_output,
            error=event.error,
        )

    def _logprobs(self, event: TokenEvent, num: int) -> tuple[TextLogprob, ...] | None:
        if event.logprobs is None:
            return None
        return tuple(_text_logprob(self._tokenizer, entry) for entry in event.logprobs[:num])

    def _shows_stop_token(self, token: int) -> bool:
        """The ending token is part of the text: only one of the client's own, if asked for."""
        return self._params.include_stop_str_in_output and token not in self._end_tokens
