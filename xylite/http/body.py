"""Reading a request's body: media type, size and patience are limited before anything is parsed."""

import asyncio
import logging
from typing import TypeVar

from aiohttp import HttpVersion11, hdrs, web

from xylite.errors import TooLarge
from xylite.http.access import request_id_of
from xylite.http.failures import HttpError
from xylite.http.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    decode,
)
from xylite.http.service import REQUEST_ID, SERVICE
from xylite.http.stream import ClientGone

Body = TypeVar("Body", ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)

# Slower than this for a whole body is a client that holds the connection on purpose.
MAX_BODY_TIME = 20

_log = logging.getLogger("xylite.http")


def check_media_type(request: web.Request) -> None:
    """HttpError 415 unless the body is JSON in UTF-8, as it stands.

    A missing type is accepted, but not from browsers: they let any site post without one.
    """
    if request.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower() != "identity":
        raise HttpError(
            415,
            "request bodies must not be compressed",
            code="unsupported_media_type",
            param="Content-Encoding",
        )
    given = request.headers.get(hdrs.CONTENT_TYPE)
    if given is None and hdrs.ORIGIN not in request.headers:
        return
    kind, *parameters = (given or "").split(";")
    kind = kind.strip().lower()
    charsets = [p.split("=", 1)[1].strip('" ').lower() for p in parameters if _is_charset(p)]
    is_json = kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )
    if not is_json or any(c not in ("utf-8", "utf8") for c in charsets):
        raise HttpError(
            415,
            "send the header 'Content-Type: application/json' (in UTF-8); got "
            f"{(given or 'none')[:100]!r}",
            code="unsupported_media_type",
            param="Content-Type",
        )


def _is_charset(parameter: str) -> bool:
    return parameter.strip().lower().startswith("charset=")


async def continue_later(request: web.Request) -> None:
    """What becomes of an Expect header before a request is looked at: nothing.

    `read_body` answers 100-continue, when it wants the body: who is refused need not send it.
    Other expectations are none that HTTP knows.
    """


async def _say_continue(request: web.Request) -> None:
    expected = request.headers.get(hdrs.EXPECT, "").strip().lower()
    if expected != "100-continue" or request.version < HttpVersion11:
        return
    try:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    except ConnectionError:
        raise ClientGone from None
    request.writer.output_size = 0  # that was none of the answer


async def read_body(request: web.Request) -> bytes:
    """The body; TooLarge over max_request_bytes, HttpError 408 if it comes too slowly.

    Read from the connection, as `request.read()` has the limit of the outermost application.
    """
    service = request.app[SERVICE]
    limit = service.config.max_request_bytes
    too_large = TooLarge(f"the request body is larger than the limit of {limit} bytes")
    if request.content_length is not None and request.content_length > limit:
        raise too_large
    await _say_continue(request)
    size = 0
    chunks: list[bytes] = []
    try:
        async with asyncio.timeout(service.body_timeout_s * MAX_BODY_TIME):
            while True:
                async with asyncio.timeout(service.body_timeout_s):
                    chunk = await request.content.readany()
                if not chunk:
                    return b"".join(chunks)
                size += len(chunk)
                if size > limit:
                    raise too_large
                chunks.append(chunk)
    except TimeoutError:
        raise HttpError(408, "the request body came too slowly", code="request_timeout") from None
    except web.RequestPayloadError:
        raise HttpError(400, "the request body is incomplete", code="invalid_body") from None


async def read_json(request: web.Request, kind: type[Body]) -> Body:
    """The request's body as `kind`."""
    service = request.app[SERVICE]
    check_media_type(request)
    await service.arrivals.wait()
    body = await read_body(request)

    def note(name: str, why: str) -> None:
        if service.note_field(name):
            _log.info("request field %r is ignored: %s", name, why)

    asked = decode(body, kind, strict=service.config.strict_requests, note=note)
    if isinstance(asked, ChatRequest | CompletionRequest) and "X-Request-Id" not in request.headers:
        given = request_id_of(asked.request_id or asked.rid)
        if given is not None:
            request[REQUEST_ID] = given
    return asked
