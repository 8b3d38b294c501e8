"""Who may call: API keys, Host and Origin checks, request ids. Everything is closed by default."""

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from xylite.errors import Forbidden, Unauthorized
from xylite.http.service import REQUEST_ID, SERVICE, Service

MAX_REQUEST_ID = 128
ALLOWED_METHODS = "GET, POST, HEAD, OPTIONS"
ALLOWED_HEADERS = "Authorization, Content-Type, X-Api-Key, Api-Key, X-Request-Id"
EXPOSED_HEADERS = "X-Request-Id, Retry-After, retry-after-ms"

OpenHandlers = frozenset[Callable[[web.Request], Awaitable[web.StreamResponse]]]
OPEN_HANDLERS = web.AppKey("xylite_open_handlers", OpenHandlers)


def request_id_of(given: str | None) -> str | None:
    """The client's name for its request if it is short and printable ASCII, else None."""
    if given and len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return None


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine only."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _host_name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.rsplit(":", 1)[0] if host.count(":") == 1 else host


def _check_host(request: web.Request, service: Service) -> None:
    """Forbidden if a page of another site has been made to resolve to this loopback server.

    Only where both the configured address and the connection's own are loopback: elsewhere a
    server cannot know the names under which it is reached.
    """
    config = service.config
    if config.uds is not None or not is_loopback(config.host) or "*" in config.allowed_hosts:
        return
    host = request.headers.get(hdrs.HOST)
    local: tuple[Any, ...] | str | None = request.get_extra_info("sockname")
    if not host or not isinstance(local, tuple) or not is_loopback(str(local[0])):
        return
    name = _host_name(host)
    if is_loopback(name):
        return
    if name.lower() in (allowed.lower() for allowed in config.allowed_hosts):
        return
    raise Forbidden(
        f"the Host header {name[:100]!r} is not accepted on a loopback address; name it in "
        "allowed_hosts if it is yours",
        code="host_not_allowed",
    )


def _keys_given(request: web.Request) -> list[str]:
    keys: list[str] = []
    for value in request.headers.getall(hdrs.AUTHORIZATION, []):
        scheme, _, key = value.strip().partition(" ")
        if scheme.lower() == "bearer":
            keys.append(key.strip())
    for name in ("x-api-key", "api-key"):
        keys.extend(value.strip() for value in request.headers.getall(name, []))
    return keys


def _check_key(request: web.Request, service: Service) -> None:
    """Unauthorized unless a right key came; all keys are compared, in constant time."""
    right = False
    given = _keys_given(request)
    for key in given[:4]:
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        for known in service.key_digests:
            right |= hmac.compare_digest(digest, known)
    if not right:
        raise Unauthorized(
            "Incorrect API key provided"
            if any(given)
            else "No API key provided: send 'Authorization: Bearer KEY'"
        )


def _is_preflight(request: web.Request, origin: str | None) -> bool:
    return (
        origin is not None
        and request.method == "OPTIONS"
        and "Access-Control-Request-Method" in request.headers
    )


def allowed_origin(request: web.Request, service: Service) -> str | None:
    """The request's Origin if browsers may call from it."""
    origin = request.headers.get(hdrs.ORIGIN)
    origins = service.config.allowed_origins
    return origin if origin and (origin in origins or "*" in origins) else None


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id; the client's, if it can be printed in logs and headers."""
    given = request_id_of(request.headers.get("X-Request-Id"))
    request[REQUEST_ID] = given or secrets.token_hex(16)
    return await handler(request)


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse foreign hosts, answer CORS preflights, and ask for a key, unknown paths included."""
    service = request.app[SERVICE]
    _check_host(request, service)
    if _is_preflight(request, allowed_origin(request, service)):
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": ALLOWED_METHODS,
                "Access-Control-Allow-Headers": ALLOWED_HEADERS,
                "Access-Control-Max-Age": "600",
            },
        )
    # By the handler that was chosen, not by the path's spelling.
    is_open = request.match_info.handler in request.app[OPEN_HANDLERS]
    if service.key_digests and not is_open:
        _check_key(request, service)
    return await handler(request)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Headers of every answer (a signal: streams have sent theirs when a middleware returns)."""
    service = request.app[SERVICE]
    headers = response.headers
    if REQUEST_ID in request:
        headers["X-Request-Id"] = request[REQUEST_ID]
    headers["Server"] = "xylite"
    headers["X-Content-Type-Options"] = "nosniff"
    if service.config.allowed_origins:
        headers.add("Vary", "Origin")
        origin = allowed_origin(request, service)
        if origin is not None:
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS
    if service.engine.state == "draining":
        headers["Connection"] = "close"
        response.force_close()
