"""What is around a body: path, method, content type, size, and the time it takes to come."""

import asyncio
import io
import json
from typing import Any

import pytest
from yarl import URL

from tests.http.conftest import Connect
from tests.http.wire import CHAT, TEXT, error_of


@pytest.mark.parametrize(
    "content_type, status",
    [
        (None, 200),
        ("application/json", 200),
        ("APPLICATION/JSON; charset=UTF-8", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/json; charset=latin-1", 415),
        ("", 415),
    ],
)
async def test_content_type_must_be_json(
    connect: Connect, content_type: str | None, status: int
) -> None:
    client = await connect()
    data = json.dumps({"prompt": "x"}).encode()
    headers = {} if content_type is None else {"Content-Type": content_type}
    skip = ["Content-Type"] if content_type is None else []
    response = await client.post(TEXT, data=data, headers=headers, skip_auto_headers=skip)
    if status == 200:
        assert response.status == 200
    else:
        await error_of(response, 415, "unsupported_media_type")


async def test_browsers_must_name_the_content_type(connect: Connect) -> None:
    client = await connect()
    response = await client.post(
        TEXT,
        data=b'{"prompt":"x"}',
        headers={"Origin": "http://evil.example"},
        skip_auto_headers=["Content-Type"],
    )
    error = await error_of(response, 415, "unsupported_media_type")
    assert "Content-Type" in error["message"]


async def test_compressed_bodies_are_refused(connect: Connect) -> None:
    client = await connect()
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    await error_of(await client.post(TEXT, data=b"\x1f\x8b0", headers=headers), 415)
    headers["Content-Encoding"] = "identity"
    assert (await client.post(TEXT, data=b'{"prompt":"x"}', headers=headers)).status == 200


async def test_body_limit_holds_for_known_and_unknown_lengths(connect: Connect) -> None:
    client = await connect(max_request_bytes=5_000_000)
    fits = json.dumps({"prompt": "x", "user": "u" * 4_900_000}).encode()
    headers = {"Content-Type": "application/json"}
    assert (await client.post(TEXT, data=io.BytesIO(fits), headers=headers)).status == 200

    async def chunks() -> Any:
        for _ in range(100):
            yield b" " * 100_000

    response = await client.post(TEXT, data=io.BytesIO(b" " * 5_000_001), headers=headers)
    await error_of(response, 413, "request_too_large")
    assert response.headers["Connection"] == "close"
    response = await client.post(TEXT, data=chunks(), headers=headers)
    await error_of(response, 413, "request_too_large")


async def test_slow_body_is_408(connect: Connect) -> None:
    client = await connect(app={"body_timeout_s": 0.05})
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    # Without the lingering that others get to read an answer: this one has had its time.
    async with asyncio.timeout(5):
        assert b'"code":"request_timeout"' in await reader.read()
    writer.close()


@pytest.mark.parametrize("path", ["/nope", "/v1", "/v1/", "//v1/models", "/v1/embeddings"])
async def test_unknown_path_is_404(connect: Connect, path: str) -> None:
    client = await connect()
    url = f"http://{client.host}:{client.port}{path}"
    error = await error_of(await client.session.post(URL(url, encoded=True), json={}), 404)
    assert error["type"] == "not_found_error"


async def test_wrong_method_is_405_with_allow(connect: Connect) -> None:
    client = await connect()
    response = await client.get(CHAT)
    await error_of(response, 405)
    assert response.headers["Allow"] == "POST"
    response = await client.delete("/v1/models/fake")
    await error_of(response, 405)
    assert response.headers["Allow"] == "GET,HEAD"
