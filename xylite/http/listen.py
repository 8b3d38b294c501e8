"""The address a server listens on, and what becomes of bytes that are no HTTP request."""

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import socket
import ssl
import stat
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from xylite.config import ServerConfig
from xylite.errors import ConfigError, EngineError, XyliteError, file_reason
from xylite.http.failures import HttpError, error_response

KEEP_ALIVE_S = 75.0
LINGER_S = 2.0

_log = logging.getLogger("xylite.http")


class Listener:
    """An address that is ours; connections are accepted from `accept` to `close`.

    It is taken before the model is loaded, as loading may take minutes and a port in use is said
    at once. Until `accept`, connections are refused: nobody waits for a model that may not come.
    """

    def __init__(self, config: ServerConfig):
        self.url = ""
        self._config = config
        self._manager: web.Server | None = None
        self._server: asyncio.Server | None = None
        self._socket_file: tuple[int, int] | None = None
        self._lock: int | None = None

    async def bind(self) -> None:
        """Take the address. XyliteError if it is in use, ConfigError if it cannot be one."""
        config, loop = self._config, asyncio.get_running_loop()
        tls = _tls(config)
        try:
            if config.uds is not None:
                # The loop would replace the socket of a server that runs, or loads its model, as it
                # does a dead one's.
                _check_socket_path(config.uds)
                self._lock = _locked(config.uds)
                await _refuse_if_alive(config.uds)
                self._server = await loop.create_unix_server(
                    self._connection, config.uds, ssl=tls, start_serving=False
                )
                self.url = f"unix://{config.uds}"
                self._socket_file = _identity(config.uds)
                return
            server = await loop.create_server(
                self._connection, config.host, config.port, ssl=tls, start_serving=False
            )
        except OSError as e:
            self._unlock()
            where = config.uds or f"{config.host}:{config.port}"
            kind = XyliteError if e.errno == errno.EADDRINUSE else ConfigError
            raise kind(f"cannot listen on {where}: {_reason(e)}") from None
        except ValueError as e:  # what no address can hold, such as an empty label or a NUL
            self._unlock()
            name = "host" if config.uds is None else "uds"
            raise ConfigError(
                f"{name} {getattr(config, name)!r} cannot be an address: {e}", param=name
            ) from None
        self._server = server
        # Linux lets two sockets have one port while neither listens, unless one of them minds.
        _let_reuse(server, False)
        port = server.sockets[0].getsockname()[1]
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"{'http' if tls is None else 'https'}://{host}:{port}"

    async def accept(self, manager: web.Server) -> None:
        """Accept connections for `manager`; XyliteError if another process came first."""
        assert self._server is not None
        self._manager = manager
        if self._config.uds is None:
            # Connections inherit it, and their remains must not keep the next server from starting.
            _let_reuse(self._server, True)
        try:
            await self._server.start_serving()
        except OSError as e:
            raise XyliteError(f"cannot listen on {self.url}: {_reason(e)}") from None

    def close(self) -> None:
        """Accept no more connections; those that are open go on."""
        if self._server is not None:
            self._server.close()
        path, self._socket_file, made = self._config.uds, None, self._socket_file
        if path is not None and made is not None and made == _identity(path):
            os.unlink(path)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            assert self._config.uds is not None
            with contextlib.suppress(OSError):
                os.unlink(_lock_file(self._config.uds))
            os.close(self._lock)
            self._lock = None

    def _connection(self) -> "Connection":
        assert self._manager is not None
        access = None if self._config.disable_access_log else logging.getLogger("xylite.access")
        return Connection(self._manager, access)


class Connection(web.RequestHandler):
    """One client's connection; what is wrong below HTTP is answered and logged as we do above."""

    __slots__ = ()

    def __init__(self, manager: web.Server, access_log: logging.Logger | None):
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            logger=_protocol_log(),
            access_log=access_log,  # pyright: ignore[reportArgumentType] (None is its "off")
            keepalive_timeout=KEEP_ALIVE_S,
            lingering_time=LINGER_S,
            # Compressed bodies are refused, so there is nothing to unpack, nor to go wrong in it.
            auto_decompress=False,
        )

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to bytes that are no request, in OpenAI's form."""
        super().handle_error(request, status, exc, message)
        said = " ".join((message or "").split()).removesuffix(" ^")  # aiohttp points at bytes
        error: XyliteError = EngineError("internal error")
        if isinstance(exc, LineTooLong) or said.startswith("Too many headers"):
            # Without the bytes that aiohttp shows: nobody needs them back.
            said = said.split(" when reading")[0]
            error = HttpError(
                431, f"the request line and headers are too large: {said}", code="headers_too_large"
            )
        elif status < 500:
            error = HttpError(status, f"this is not an HTTP request: {said}", code="bad_request")
        answer = error_response(error)
        answer.headers["X-Request-Id"] = secrets.token_hex(16)
        answer.headers["Server"] = "xylite"
        answer.headers["X-Content-Type-Options"] = "nosniff"
        answer.force_close()
        return answer

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """One line, without the traceback that anyone could provoke."""
        exc = kw.get("exc_info")
        broken = type(exc).__module__ == "aiohttp.http_exceptions"
        if broken or isinstance(exc, web.RequestPayloadError):
            self.logger.info("%s (%s)", args[0] % args[1:], " ".join(str(exc).split()))
        else:
            self.logger.error("%s: %r", args[0] % args[1:], exc)


def _protocol_log() -> logging.Logger:
    return logging.getLogger("xylite.http.protocol")


def _let_reuse(server: asyncio.Server, yes: bool) -> None:
    """Whether other sockets may be bound to the server's addresses while it does not listen."""
    for bound in server.sockets:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, yes)


def _check_socket_path(path: str) -> None:
    """ConfigError if a socket cannot be there: nothing is created beside other people's files."""
    if not path:
        raise ConfigError("uds is empty: it must be the path of a Unix socket", param="uds")
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"uds {path}: there is something else than a socket", param="uds")


def _lock_file(path: str) -> str:
    return f"{path}.xylite-lock"


def _locked(path: str) -> int:
    """A file descriptor that holds the lock of a Unix socket; OSError if another process does."""
    import fcntl  # as little known on Windows as these sockets

    name = _lock_file(path)
    while True:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(lock)
            code = errno.EADDRINUSE if isinstance(e, BlockingIOError) else e.errno
            raise OSError(code, os.strerror(code or errno.ENOLCK)) from None
        found = os.fstat(lock)
        if _identity(name) == (found.st_dev, found.st_ino):
            return lock
        os.close(lock)  # the holder before us has removed it in the meantime


async def _refuse_if_alive(path: str) -> None:
    """OSError EADDRINUSE if somebody accepts connections at a Unix socket."""
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return
    writer.close()
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _identity(path: str) -> tuple[int, int] | None:
    """Device and inode of a file; None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _reason(e: OSError) -> str:
    """Why, without the address that asyncio repeats."""
    if e.errno is not None and e.errno in errno.errorcode:
        return os.strerror(e.errno)
    return e.strerror or str(e)


def _tls(config: ServerConfig) -> ssl.SSLContext | None:
    if config.ssl_certfile is None:
        if config.ssl_keyfile is not None:
            raise ConfigError("ssl_keyfile needs ssl_certfile")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    for name in ("ssl_certfile", "ssl_keyfile"):
        path = getattr(config, name)
        try:
            if path is not None:
                with open(path, "rb"):
                    pass
        except OSError as e:
            raise ConfigError(f"{name} {path}: {file_reason(e)}", param=name) from None
    name = "ssl_certfile" if config.ssl_keyfile is None else "ssl_keyfile"

    def no_password() -> str:
        raise ConfigError(
            f"{name} {getattr(config, name)}: the key is encrypted, and nobody is there to give "
            "its pass phrase; decrypt it with `openssl pkey -in FILE -out NEW_FILE`",
            param=name,
        )

    try:
        # Without this, OpenSSL would ask for the pass phrase on the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, no_password)
    except ssl.SSLError as e:
        key = config.ssl_keyfile or "the same file"
        raise ConfigError(
            f"ssl_certfile {config.ssl_certfile}: it and its key in {key} must be PEM text and "
            f"belong together ({e.reason or e})",
            param="ssl_certfile",
        ) from None
    return context
