"""The application, and a server around it that starts, drains and stops as orchestrators expect."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from xylite.config import ServerConfig, checked
from xylite.http import chat, completions, models
from xylite.http.access import OPEN_HANDLERS, add_headers, guard, identify, is_loopback
from xylite.http.body import continue_later
from xylite.http.failures import failures
from xylite.http.listen import Listener
from xylite.http.metrics import Metrics
from xylite.http.service import SERVICE, Service
from xylite.text_engine import TextEngine

# After the engine is done: time for the last bytes to leave.
FLUSH_S = 5.0

_log = logging.getLogger("xylite.http")


def make_app(
    engine: TextEngine,
    config: ServerConfig = ServerConfig(),  # noqa: B008 (frozen)
    *,
    body_timeout_s: float = 30.0,
    write_stall_s: float = 60.0,
) -> web.Application:
    """An aiohttp application that serves `engine`, alone or below a prefix of another one:

        async with TextEngine(EngineConfig(model=...)) as engine:
            app.add_subapp("/llm", make_app(engine))

    It neither starts nor stops the engine, and answers 503 while it loads. Several may live in one
    process. Run it with `handler_cancellation=True` so that a client that leaves is noticed at
    once (otherwise within a second or so).

    body_timeout_s  how long a request body may stand still
    write_stall_s   how long a client may not read before its stream is closed
    raises          ConfigError naming a setting of the wrong type or out of its limits
    """
    # A text where a list belongs would be a list of letters, and each of them a key.
    config = checked(config)
    app = web.Application(
        middlewares=[identify, failures, guard], client_max_size=config.max_request_bytes
    )
    metrics = Metrics(engine)
    app[SERVICE] = Service(
        engine=engine,
        config=config,
        metrics=metrics,
        body_timeout_s=body_timeout_s,
        write_stall_s=write_stall_s,
    )
    app[OPEN_HANDLERS] = frozenset({models.health, models.ready, models.metrics})
    app.on_response_prepare.append(add_headers)
    app.cleanup_ctx.append(_observing)
    later = {"expect_handler": continue_later}
    app.add_routes(
        [
            web.get("/", models.root),
            web.get("/health", models.health),
            web.get("/ready", models.ready),
            web.get("/version", models.show_version),
            web.get("/metrics", models.metrics),
            web.get("/v1/models", models.list_models),
            web.get("/v1/models/{id:.+}", models.retrieve_model),
            web.post("/v1/chat/completions", chat.chat_completions, **later),
            web.post("/v1/completions", completions.completions, **later),
            web.post("/tokenize", models.tokenize, **later),
            web.post("/detokenize", models.detokenize, **later),
        ]
    )
    return app


async def _observing(app: web.Application) -> AsyncIterator[None]:
    """Let the engine tell about its requests while the application runs."""
    service = app[SERVICE]
    service.engine.observers.append(service.metrics)
    yield
    service.engine.observers.remove(service.metrics)


async def serve(
    engine: TextEngine,
    config: ServerConfig,
    ready: Callable[[str], None] = lambda url: None,
    *,
    listener: Listener | None = None,
) -> int:
    """Serve until a signal comes or the engine dies; the exit code of the process.

    SIGTERM or SIGINT: new requests get 503, running ones may end within shutdown_timeout, what is
    left is stopped with an error; returns 0. A second signal stops at once; returns 128 + its
    number. Returns 1 if the engine died: every stream got an error, a supervisor may restart us.

    ready     called with the URL once connections are accepted
    listener  the bound address; None = bind one now, from config. Closed at the end
    """
    if config.uds is None and not is_loopback(config.host) and not config.api_key:
        _log.warning(
            "%s is not a loopback address and no API key is set: anyone who can reach it "
            "can use this server",
            config.host,
        )
    runner = web.AppRunner(
        make_app(engine, config), handler_cancellation=True, shutdown_timeout=FLUSH_S
    )
    signals: asyncio.Queue[int] = asyncio.Queue()
    if listener is None:
        listener = Listener(config)
        await listener.bind()
    caught: list[signal.Signals] = []
    try:
        await runner.setup()
        caught = _catch_signals(signals)
        assert runner.server is not None
        await listener.accept(runner.server)
        ready(listener.url)
        return await _until_stopped(engine, config, signals)
    finally:
        for number in caught:
            asyncio.get_running_loop().remove_signal_handler(number)
        listener.close()
        await runner.cleanup()


def _catch_signals(signals: asyncio.Queue[int]) -> list[signal.Signals]:
    """Send SIGTERM and SIGINT to the queue, where the platform and the thread allow it."""
    loop = asyncio.get_running_loop()
    caught: list[signal.Signals] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, signals.put_nowait, int(number))
        except (NotImplementedError, RuntimeError, ValueError):
            continue
        caught.append(number)
    return caught


async def _first(*work: asyncio.Task[object]) -> asyncio.Task[object]:
    """The task that ends first; the others go on."""
    done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
    return next(task for task in work if task in done)


async def _until_stopped(
    engine: TextEngine, config: ServerConfig, signals: asyncio.Queue[int]
) -> int:
    loop = asyncio.get_running_loop()
    death: asyncio.Task[object] = loop.create_task(engine.dead.wait())
    stop: asyncio.Task[object] = loop.create_task(signals.get())
    drain: asyncio.Task[object] | None = None
    try:
        if await _first(death, stop) is death:
            _log.critical("the engine died; the server stops")
            return 1
        _log.info("stopping: running requests may take %g s", config.shutdown_timeout)
        drain = loop.create_task(engine.drain(config.shutdown_timeout))
        again: asyncio.Task[object] = loop.create_task(signals.get())
        stop = again
        match await _first(death, again, drain):
            case task if task is death:
                return 1
            case task if task is again:
                _log.warning("stopping now")
                drain.cancel()
                await asyncio.gather(drain, return_exceptions=True)
                await engine.drain(0)
                return 128 + int(str(again.result()))
            case _:
                drain.result()
                if engine.state == "dead":
                    return 1
                _log.info("stopped")
                return 0
    finally:
        for task in (death, stop, drain):
            if task is not None:
                task.cancel()
