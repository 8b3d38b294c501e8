"""Keys, hosts, origins and request ids."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from tests.http.conftest import Connect
from tests.http.fake_engine import FakeEngine
from tests.http.wire import CHAT, TEXT, USER, error_of
from xylite.config import ServerConfig
from xylite.errors import ConfigError
from xylite.http import make_app

OPEN = {"/health", "/ready", "/metrics"}


async def status_of(client: TestClient, method: str, path: str, **headers: str) -> int:
    url = URL(f"http://{client.host}:{client.port}{path}", encoded=True)
    async with client.session.request(method, url, headers=headers, data=b"{}") as response:
        await response.read()
        return response.status


def routes(client: TestClient) -> list[tuple[str, str]]:
    """(method, path) of everything the router knows."""
    app = client.server.app
    found = []
    for route in app.router.routes():
        path = route.resource.canonical.replace("{id}", "fake")
        found.append((route.method, path))
    return found


async def test_every_route_needs_a_key_but_the_probes(connect: Connect) -> None:
    client = await connect(api_key=("k1", "k2"))
    known = routes(client)
    assert len(known) >= 15 and ("HEAD", "/v1/models") in known
    for method, path in known:
        expected = path not in OPEN
        assert (await status_of(client, method, path) == 401) is expected, (method, path)
        assert await status_of(client, method, path, Authorization="Bearer k2") != 401
        assert await status_of(client, "OPTIONS", path) == 401


async def test_an_empty_key_is_refused_and_not_taken_for_none() -> None:
    for keys in (("",), ("k1", "")):
        with pytest.raises(ConfigError, match="api_key holds an empty key"):
            ServerConfig(api_key=keys)


STRANGE_PATHS = (
    "/nope",
    "//v1/models",
    "/v1/../metrics/../v1/models",
    "/%2Fv1/models",
    "/health/../v1/models",
    "/v1/models/../../health",
    "/metrics/",
    "/health;/v1/models",
    "/health%2f..%2fv1%2fmodels",
)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE", "OPTIONS", "PROPFIND"])
async def test_unknown_paths_need_a_key_too(connect: Connect, method: str) -> None:
    client = await connect(api_key=("k",))
    for path in STRANGE_PATHS:
        assert await status_of(client, method, path) == 401, path


async def test_absolute_form_does_not_bypass_the_key(connect: Connect) -> None:
    client = await connect(api_key=("k",))
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(
        b"GET http://localhost/v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )
    assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
    writer.close()


@pytest.mark.parametrize(
    "headers, status",
    [
        ({}, 401),
        ({"Authorization": "Bearer key"}, 200),
        ({"Authorization": "Bearer other"}, 200),
        ({"Authorization": "bearer key"}, 200),
        ({"Authorization": "BEARER   key "}, 200),
        ({"x-api-key": "key"}, 200),
        ({"api-key": "key"}, 200),
        ({"Authorization": "Bearer wrong", "x-api-key": "key"}, 200),
        ({"Authorization": "key"}, 401),
        ({"Authorization": "Basic key"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Bearer key2"}, 401),
        ({"Authorization": "Bearer ke"}, 401),
        ({"Authorization": "Bearer KEY"}, 401),
        ({"Authorization": "Bearer k\u00e9y"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "wrong"}, 401),
    ],
)
async def test_keys_are_taken_from_three_headers(
    connect: Connect, headers: dict[str, str], status: int
) -> None:
    client = await connect(api_key=("other", "key"))
    response = await client.get("/v1/models", headers=headers)
    if status == 200:
        assert response.status == 200
        return
    error = await error_of(response, 401, "invalid_api_key")
    assert error["type"] == "authentication_error"
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert "key2" not in error["message"] and "wrong" not in error["message"]


async def test_an_empty_key_opens_nothing(connect: Connect) -> None:
    client = await connect(api_key=("key",))
    response = await client.get("/v1/models", headers={"Authorization": "Bearer "})
    error = await error_of(response, 401, "invalid_api_key")
    assert error["type"] == "authentication_error"


async def test_without_keys_any_key_is_fine(connect: Connect) -> None:
    client = await connect()
    response = await client.get("/v1/models", headers={"Authorization": "Bearer x"})
    assert response.status == 200


@pytest.mark.parametrize(
    "host, status",
    [
        ("localhost", 200),
        ("localhost:8000", 200),
        ("LOCALHOST.", 200),
        ("a.localhost:1", 200),
        ("127.0.0.1", 200),
        ("127.1.2.3:80", 200),
        ("[::1]:8000", 200),
        ("good.example:99", 200),
        ("GOOD.example", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("good.example.evil.example", 403),
        ("192.168.0.1", 403),
        ("[fe80::1]", 403),
        ("127.0.0.1.evil.example", 403),
    ],
)
async def test_foreign_hosts_are_refused_on_loopback(
    connect: Connect, host: str, status: int
) -> None:
    client = await connect(allowed_hosts=("good.example",))
    for path in ("/health", "/v1/models", "/nope"):
        response = await client.get(path, headers={"Host": host})
        if status == 403:
            error = await error_of(response, 403, "host_not_allowed")
            assert error["type"] == "permission_error"
        else:
            assert response.status == (404 if path == "/nope" else 200)


@pytest.mark.parametrize("config", [{"host": "0.0.0.0"}, {"allowed_hosts": ("*",)}])
async def test_hosts_are_not_checked_where_names_are_unknown(
    connect: Connect, config: dict[str, Any]
) -> None:
    client = await connect(**config)
    response = await client.get("/v1/models", headers={"Host": "llm.example"})
    assert response.status == 200


async def test_cors_is_off_by_default(connect: Connect) -> None:
    client = await connect()
    headers = {"Origin": "http://ui.example", "Access-Control-Request-Method": "POST"}
    response = await client.options(CHAT, headers=headers)
    await error_of(response, 405)
    assert "Access-Control-Allow-Origin" not in response.headers
    response = await client.post(CHAT, json={"messages": USER}, headers=headers)
    assert response.status == 200
    assert "Access-Control-Allow-Origin" not in response.headers


async def test_cors_for_listed_origins_only(connect: Connect) -> None:
    client = await connect(allowed_origins=("http://ui.example",), api_key=("k",))
    ask = {"Access-Control-Request-Method": "POST"}
    response = await client.options(CHAT, headers={"Origin": "http://ui.example", **ask})
    assert response.status == 204
    assert response.headers["Access-Control-Allow-Origin"] == "http://ui.example"
    assert "POST" in response.headers["Access-Control-Allow-Methods"]
    assert "Authorization" in response.headers["Access-Control-Allow-Headers"]
    assert response.headers["Vary"] == "Origin"
    for origin in ("http://evil.example", "http://ui.example.evil.example", "null"):
        response = await client.options(CHAT, headers={"Origin": origin, **ask})
        assert response.status == 401
        assert "Access-Control-Allow-Origin" not in response.headers
    for stream in (False, True):
        response = await client.post(
            CHAT,
            json={"messages": USER, "stream": stream},
            headers={"Origin": "http://ui.example", "Authorization": "Bearer k"},
        )
        assert response.status == 200
        assert response.headers["Access-Control-Allow-Origin"] == "http://ui.example"
        assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]


@pytest.mark.parametrize(
    "given, kept",
    [
        ("abc-123", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("", False),
        ("caf\u00e9", False),
        ("a\tb", False),
    ],
)
async def test_request_ids_are_echoed_if_printable(
    connect: Connect, given: str, kept: bool
) -> None:
    client = await connect()
    for path, body in [(TEXT, {"prompt": "x"}), (TEXT, {"prompt": "x", "stream": True}), (TEXT, 5)]:
        response = await client.post(path, json=body, headers={"X-Request-Id": given})
        answer = response.headers["X-Request-Id"]
        assert (answer == given) is kept
        assert answer.isprintable() and 0 < len(answer) <= 128
        await response.read()


async def test_same_request_id_twice_is_two_requests(connect: Connect) -> None:
    engine = FakeEngine()
    client = await connect(engine)
    for _ in range(2):
        await client.post(TEXT, json={"prompt": "x"}, headers={"X-Request-Id": "same"})
    a, b = engine.calls
    assert a.request_id != b.request_id and "same" not in (a.request_id, b.request_id)


async def test_answers_do_not_tell_what_runs_below(connect: Connect) -> None:
    client = await connect()
    for path in ("/health", "/nope", "/metrics"):
        headers = (await client.get(path)).headers
        assert headers["Server"] == "xylite"
        assert headers["X-Content-Type-Options"] == "nosniff"


async def test_key_is_asked_below_a_prefix_too() -> None:
    app = web.Application()
    app.add_subapp("/llm", make_app(FakeEngine(), ServerConfig(api_key=("k",))))
    async with TestClient(TestServer(app)) as client:
        for path in ("/llm/v1/models", "/llm/nope", "/llm/", "/llm/version"):
            await error_of(await client.get(path), 401)
        for path in OPEN:
            assert (await client.get(f"/llm{path}")).status == 200
