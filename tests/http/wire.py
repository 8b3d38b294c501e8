"""Reading answers in tests."""

import json
import re
from typing import Any

from aiohttp import ClientResponse


def masked(text: str) -> str:
    """Text with ids and times replaced, to be compared literally."""
    text = re.sub(r'"id":"(chatcmpl|cmpl)-[0-9a-f]{32}"', r'"id":"\1"', text)
    return re.sub(r'"created":\d+', '"created":0', text)


def events_of(text: str) -> list[Any]:
    """The JSON of each `data:` line; the stream must end with [DONE]."""
    frames = [f for f in text.split("\n\n") if f and not f.startswith(":")]
    assert all(f.startswith("data: ") and "\n" not in f for f in frames), frames
    assert frames[-1] == "data: [DONE]"
    return [json.loads(f[6:]) for f in frames[:-1]]


async def stream_of(response: ClientResponse) -> list[Any]:
    """The events of a stream that was accepted."""
    text = await response.text()
    assert response.status == 200, text
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    return events_of(text)


async def error_of(
    response: ClientResponse, status: int, code: str | None = None
) -> dict[str, Any]:
    """The error object of an answer with `status`; its form is checked."""
    raw = await response.read()
    assert response.status == status, raw[:500]
    assert len(raw) <= 4096
    assert response.headers["X-Request-Id"]
    assert response.headers["Content-Type"].startswith("application/json")
    body = json.loads(raw)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    if code is not None:
        assert body["error"]["code"] == code
    return body["error"]


USER = [{"role": "user", "content": "x"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
