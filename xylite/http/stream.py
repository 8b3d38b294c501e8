"""From engine events to the wire: merging, time limits, server-sent events.

`Delivery` gathers the events of one HTTP request, merging what nobody has taken yet, so that a slow
client costs the size of its text and not of its events. `EventStream` writes them.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from xylite.errors import DeadlineExceeded, EngineError, RequestError, XyliteError
from xylite.http.service import SERVICE, Service, engine_dead, shutting_down
from xylite.text_engine import Pending, TextEvent, TextStream

# How often a waiting request looks whether its client is still there.
TICK_S = 1.0
SMALL = 16 * 1024  # bytes that a transport takes without waiting if it has none
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

Batch = list[tuple[int, TextEvent]]


class ClientGone(Exception):
    """The client closed its connection, or stopped reading for too long."""


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Loop times by which a request must have its first token and be over; None = no limit."""

    first_token: float | None
    end: float | None

    @staticmethod
    def of(request: web.Request) -> "TimeLimits":
        """From the server's settings and the X-Request-Timeout-Ms header, counted from now."""
        config = request.app[SERVICE].config
        now = asyncio.get_running_loop().time()
        limits = [config.request_timeout] if config.request_timeout else []
        given = request.headers.get("X-Request-Timeout-Ms")
        if given is not None:
            if not (given.isascii() and given.isdigit() and 0 < len(given) <= 12 and int(given)):
                raise RequestError(
                    f"X-Request-Timeout-Ms must be a positive integer, got {given[:40]!r}",
                    param="X-Request-Timeout-Ms",
                )
            limits.append(int(given) / 1000)
        return TimeLimits(
            first_token=now + config.max_queue_wait if config.max_queue_wait else None,
            end=now + min(limits) if limits else None,
        )

    @property
    def first(self) -> float | None:
        """The limit that comes first."""
        return min((at for at in (self.first_token, self.end) if at is not None), default=None)

    def check(self, started: bool, now: float) -> None:
        """DeadlineExceeded if a limit has passed."""
        if self.end is not None and now >= self.end:
            raise DeadlineExceeded("the request did not end within its time limit")
        if not started and self.first_token is not None and now >= self.first_token:
            raise DeadlineExceeded("the request waited longer than max_queue_wait for a token")

    @asynccontextmanager
    async def preparing(self) -> AsyncGenerator[None]:
        """Hold what comes before the engine to the same limits."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(self.first):
                yield
        except TimeoutError:
            self.check(False, loop.time() + 0.001)
            raise


class Delivery:
    """The events of one HTTP request: `len(streams)` prompts with n sequences each.

    whole   hand out nothing before everything has come
    tick_s  longest silence before an empty batch
    """

    def __init__(
        self,
        request: web.Request,
        streams: Sequence[TextStream],
        n: int,
        *,
        limits: TimeLimits,
        whole: bool,
        tick_s: float = TICK_S,
    ):
        self._request = request
        self._service = request.app[SERVICE]
        self._loop = asyncio.get_running_loop()
        self._streams = streams
        self._n = n
        self._limits = limits
        self._whole = whole
        self._tick_s = tick_s
        self._num_open = [n] * len(streams)  # sequences, by prompt
        self._pending: dict[tuple[int, int], Pending] = {}
        self._started = self._closing = False
        self._failure: BaseException | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timers = [
            self._loop.call_at(at, self._expire, at)
            for at in (limits.first_token, limits.end)
            if at is not None
        ]
        self._silent_since = self._loop.time()
        self._ticker = self._loop.call_later(tick_s, self._tick)
        for i, stream in enumerate(streams):
            stream.watch(partial(self._take, i, stream))

    @property
    def is_over(self) -> bool:
        """Whether every sequence has ended and every event was taken."""
        return not any(self._num_open) and not self._pending

    async def batches(self) -> AsyncIterator[Batch]:
        """(prompt, event) of all that came since the last batch; [] after a while of silence.

        At most one event per sequence and batch. Ends when every sequence has ended. Raises what
        the engine reports, or DeadlineExceeded, after the text that came before it; ClientGone.
        """
        while not self.is_over:
            if not self._is_ready() and self._failure is None:
                await self._wait()
            batch: Batch = []
            if self._is_ready():
                pending, self._pending = self._pending, {}
                batch = [(prompt, p.merged()) for (prompt, _), p in pending.items()]
            elif self._failure is not None:
                raise self._failure
            else:
                self._require_client()
            yield batch

    async def aclose(self) -> None:
        """Stop what still runs."""
        self._closing = True
        for timer in (*self._timers, self._ticker):
            timer.cancel()
        for stream in self._streams:
            await stream.aclose()

    def _take(self, prompt: int, stream: TextStream) -> None:
        """Something of a prompt's answer has come: keep it until the next batch is taken.

        Here and not where batches are taken, so that a client that reads slowly holds up neither
        the end of the work nor the merging.
        """
        if self._closing:
            return
        try:
            while events := stream.take():
                for event in events:
                    self._keep(prompt, event)
            left = self._num_open[prompt]
            if stream.is_over and left:
                raise EngineError(f"the engine gave no end to {left} of {self._n} sequences")
        except Exception as e:  # noqa: BLE001 - raised again for whoever takes the batches
            self._fail(e)
        if self._is_ready():
            self._wake()

    def _keep(self, prompt: int, event: TextEvent) -> None:
        self._started = True
        finish = event.finish_reason
        if finish == "error" or finish == "abort":
            raise self._stopped_by_engine(event)
        pending = self._pending.get((prompt, event.index))
        if pending is None:
            self._pending[prompt, event.index] = Pending(event)
        else:
            pending.add(event)
        if finish is not None:
            self._num_open[prompt] -= 1

    def _stopped_by_engine(self, event: TextEvent) -> XyliteError:
        """Why a sequence ended that neither its client nor the model ended."""
        state = self._service.engine.state
        if state == "dead":
            return engine_dead()
        if state in ("draining", "closed"):
            return shutting_down()
        return event.error or EngineError("the engine stopped this request", code="aborted")

    def _expire(self, at: float) -> None:
        """A time limit has come. Here and not where batches are taken, as a client that reads
        slowly may take the next one much later."""
        try:
            self._limits.check(self._started, at)
        except DeadlineExceeded as e:
            self._fail(e)

    def _fail(self, failure: BaseException) -> None:
        """Stop the work now; the failure is told after the text that came, if that is not all."""
        if self._failure is None:
            self._failure = failure
            self._stopping = self._loop.create_task(self.aclose())
            self._wake()

    def _is_ready(self) -> bool:
        return bool(self._pending) and not (self._whole and any(self._num_open))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._silent_since = self._loop.time()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _tick(self) -> None:
        """Wake the request if it waits since tick_s; one timer for all its waits."""
        left = self._silent_since + self._tick_s - self._loop.time()
        if left <= 0:
            self._wake()
            left = self._tick_s
        self._ticker = self._loop.call_later(left, self._tick)

    def _require_client(self) -> None:
        """ClientGone if there is none.

        A runner without handler_cancellation (an application of someone else's) does not tell us
        that a client has left, hence the look at the transport.
        """
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ClientGone


class EventStream:
    """A server-sent-events answer. Nothing is sent, the status neither, before the first `send`."""

    def __init__(self, request: web.Request):
        self._request = request
        self._service = request.app[SERVICE]
        self._loop = asyncio.get_running_loop()
        self._last_send = self._loop.time()
        self.started = False
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    @property
    def silent_s(self) -> float:
        """Seconds since something was sent."""
        return self._loop.time() - self._last_send

    async def send(self, data: bytes) -> None:
        """Write, waiting while the client does not read; ClientGone if it never does."""
        if not data:
            return
        try:
            if self.started and len(data) <= SMALL and self._is_flowing():
                await self.response.write(data)
            else:
                async with asyncio.timeout(self._service.write_stall_s):
                    if not self.started:
                        self.started = True
                        await self.response.prepare(self._request)
                    await self.response.write(data)
        except ConnectionError:
            raise ClientGone from None
        except TimeoutError:
            self._service.metrics.num_slow_clients += 1
            raise ClientGone from None
        self._last_send = self._loop.time()

    def _is_flowing(self) -> bool:
        """Whether the client has taken all that was written, or the system for it."""
        transport = self._request.transport
        return transport is not None and not transport.get_write_buffer_size()

    async def fail(self, error: dict[str, Any]) -> None:
        """Tell the client that the answer is not whole, and end."""
        try:
            await self.send(b"data: " + msgspec.json.encode(error) + b"\n\n" + DONE)
        except ClientGone:
            return


EVENT_STREAM = web.RequestKey("xylite_event_stream", EventStream)


async def close_all(streams: Sequence[TextStream]) -> None:
    """Stop every one of the streams."""
    for stream in streams:
        await stream.aclose()


def tick_s(service: Service) -> float:
    """How long a stream may be silent before it looks up."""
    interval = service.config.sse_keep_alive_interval
    return min(TICK_S, interval) if interval else TICK_S
