"""Errors on the wire, in OpenAI's form, and the one place where exceptions become answers."""

import logging
import math
import time
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from xylite.errors import (
    DeadlineExceeded,
    EngineError,
    Forbidden,
    Overloaded,
    RequestError,
    Unauthorized,
    XyliteError,
)
from xylite.http.service import REQUEST_ID, SERVICE
from xylite.http.stream import EVENT_STREAM, ClientGone

# Characters, of up to 6 bytes each in JSON: an answer to bad input stays below 4 KiB.
MAX_MESSAGE = 500
MAX_PARAM = 100
CLIENT_CLOSED = 499  # nginx's number for "the client went away"; in metrics and logs only

_log = logging.getLogger("xylite.http")


class HttpError(RequestError):
    """A request that fails by the rules of HTTP itself: method, media type, time to send."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None):
        super().__init__(message, code=code, param=param)
        self.status = status
        if status == 404:
            self.type = "not_found_error"


def error_object(error: XyliteError) -> dict[str, Any]:
    """The error as clients of OpenAI know it: always these four keys, always short."""
    # A template's own words are a subclass of str, which JSON encoders do not take.
    message = str.__str__(error.message)
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "..."
    param = error.param[:MAX_PARAM] if error.param else None
    return {"error": {"message": message, "type": error.type, "param": param, "code": error.code}}


def error_response(error: XyliteError) -> web.Response:
    """The HTTP answer to a request that failed before its first byte was sent."""
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded):
        wait_s = min(max(error.retry_after_s, 0.001), 60.0)
        headers["Retry-After"] = str(math.ceil(wait_s))
        headers["retry-after-ms"] = str(math.ceil(wait_s * 1000))
        headers["x-should-retry"] = "true"
    elif error.status == 500:
        # The same request would fail again; openai-python repeats every 5xx unless told.
        headers["x-should-retry"] = "false"
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    response = web.Response(
        status=error.status,
        body=msgspec.json.encode(error_object(error)),
        content_type="application/json",
        headers=headers,
    )
    if error.status in (408, 413):
        # The rest of the body is still coming and will not be read.
        response.force_close()
    return response


def _of_http(e: web.HTTPException, request: web.Request) -> XyliteError:
    """aiohttp's own refusals, in our words."""
    match e.status:
        case 404:
            # Clients are often given the server's URL without /v1.
            hint = "" if "/v1" in request.path else "; OpenAI's API is below /v1"
            where = request.path[:MAX_PARAM]
            return HttpError(404, f"There is nothing at {where!r}{hint}", code="not_found")
        case 405:
            return HttpError(405, "This path does not take this method", code="method_not_allowed")
        case 413:
            return HttpError(413, "The request is too large", code="request_too_large")
        case 403:
            return Forbidden("This is not allowed")
        case status if status < 500:
            return HttpError(status, e.reason, code="bad_request")
        case _:
            return EngineError(f"internal error (request {request[REQUEST_ID]})")


async def _answer(request: web.Request, error: XyliteError) -> web.StreamResponse:
    """The error as a status, or as the last event of a stream that has begun."""
    stream = request.get(EVENT_STREAM)
    if stream is not None and stream.started:
        await stream.fail(error_object(error))
        return stream.response
    response = error_response(error)
    if error.status == 408:
        # aiohttp would go on reading for a while; this client has had its time.
        await response.prepare(request)
        await response.write_eof()
        request.protocol.force_close()
    return response


@web.middleware
async def failures(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception into an answer and count the request."""
    service = request.app[SERVICE]
    started = time.perf_counter()  # uvloop's clock has milliseconds and stands still in a turn
    status = CLIENT_CLOSED
    try:
        response = await _answered(request, handler)
        status = response.status
        return response
    except ClientGone:
        # Nobody is there to read this; aiohttp needs something to give up on.
        if request.transport is not None:
            request.transport.abort()
        stream = request.get(EVENT_STREAM)
        if stream is not None and stream.started:
            return stream.response
        return web.Response(status=status)
    finally:
        seconds = time.perf_counter() - started
        resource = request.match_info.route.resource
        service.metrics.count_http(
            request.method, resource.canonical if resource else None, status, seconds
        )


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except XyliteError as error:
        if error.status >= 500 and not isinstance(error, Overloaded | DeadlineExceeded):
            _log.error("request %s failed: %s", request[REQUEST_ID], error.message)
        return await _answer(request, error)
    except web.HTTPException as e:
        if e.status < 400:
            raise
        response = await _answer(request, _of_http(e, request))
        if "Allow" in e.headers:
            response.headers["Allow"] = e.headers["Allow"]
        return response
    except ClientGone:
        raise
    except Exception:  # noqa: BLE001 - the edge: details to the log, none to the client
        _log.exception("request %s failed", request[REQUEST_ID])
        error = EngineError(f"internal error (request {request[REQUEST_ID]})")
        return await _answer(request, error)
