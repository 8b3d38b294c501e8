"""What one HTTP application knows: its engine, settings, counters and limits."""

import asyncio
import hashlib
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from xylite.config import ServerConfig
from xylite.errors import EngineError, ModelNotFound, Overloaded
from xylite.http.metrics import Metrics
from xylite.runtime.turnstile import Turnstile
from xylite.text_engine import TextEngine

MAX_NOTED_FIELDS = 256
ARRIVALS_PER_TURN = 8  # each takes about 0.6 ms to decode, check and queue


@dataclass(slots=True, eq=False, kw_only=True)
class Service:
    """State of one application.

    key_digests    sha256 of each accepted API key; empty = no key is asked for
    body_timeout_s how long a request body may stand still before 408
    write_stall_s  how long a client may not read before its stream is closed
    noted_fields   request fields already mentioned in the log, at most MAX_NOTED_FIELDS
    arrivals       when handlers of new requests go on
    slices         when the next slice of a long answer is made
    """

    engine: TextEngine
    config: ServerConfig
    metrics: Metrics
    body_timeout_s: float
    write_stall_s: float
    key_digests: tuple[bytes, ...] = ()
    noted_fields: set[str] = field(default_factory=set[str])
    arrivals: Turnstile = field(default_factory=lambda: Turnstile(ARRIVALS_PER_TURN))
    slices: Turnstile = field(default_factory=lambda: Turnstile(1))
    _background: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    def __post_init__(self) -> None:
        self.key_digests = tuple(
            hashlib.sha256(key.encode()).digest() for key in self.config.api_key
        )

    def model_name(self, asked: str | None) -> str:
        """The name to answer with: the one asked for, or the main one; ModelNotFound otherwise."""
        names = self.engine.model_names
        if not asked:
            return names[0]
        if asked in names:
            return asked
        raise ModelNotFound(f"The model {asked[:100]!r} does not exist", param="model")

    def require_ready(self) -> None:
        """Overloaded or EngineError (503) unless new work can be taken."""
        state = self.engine.state
        if state == "ready":
            return
        if state == "dead":
            raise engine_dead()
        if state in ("draining", "closed"):
            raise shutting_down()
        raise Overloaded("the model is still loading", code="loading", retry_after_s=5)

    def note_field(self, name: str) -> bool:
        """True the first time a field name is seen (and while there is room to remember it)."""
        if name in self.noted_fields or len(self.noted_fields) >= MAX_NOTED_FIELDS:
            return False
        self.noted_fields.add(name)
        return True

    async def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`; it runs to its end even if the caller is cancelled meanwhile."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        await asyncio.shield(task)


def engine_dead() -> EngineError:
    """The error of every request once the engine has failed for good."""
    error = EngineError("the engine has stopped working", code="engine_dead")
    error.status = 503
    return error


def shutting_down() -> Overloaded:
    """The error of requests that come, or are left, when the server stops: another may be there."""
    return Overloaded("the server is shutting down", code="draining", retry_after_s=1.0)


SERVICE = web.AppKey("xylite_service", Service)
REQUEST_ID = web.RequestKey("xylite_request_id", str)
