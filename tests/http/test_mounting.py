"""The application inside applications of others."""

import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from tests.http.fake_engine import FakeEngine
from tests.http.wire import CHAT, TEXT, USER, error_of, events_of
from xylite.config import ServerConfig
from xylite.errors import ConfigError
from xylite.http import make_app


async def hello(request: web.Request) -> web.Response:
    return web.Response(text="hello")


async def test_two_engines_below_prefixes_of_one_application() -> None:
    one, two = FakeEngine(names=("one",)), FakeEngine(names=("two",))
    app = web.Application()
    app.router.add_get("/", hello)
    app.add_subapp("/a", make_app(one))
    app.add_subapp("/b", make_app(two, ServerConfig(strict_requests=True)))
    async with TestClient(TestServer(app)) as client:
        assert await (await client.get("/")).text() == "hello"
        for prefix, name, engine in (("/a", "one", one), ("/b", "two", two)):
            models = await (await client.get(f"{prefix}/v1/models")).json()
            assert [card["id"] for card in models["data"]] == [name]
            answer = await (await client.post(prefix + CHAT, json={"messages": USER})).json()
            assert answer["model"] == name
            response = await client.post(prefix + TEXT, json={"prompt": "x", "stream": True})
            assert events_of(await response.text())[0]["model"] == name
            assert len(engine.calls) == 2
            await error_of(await client.get(f"{prefix}/nope"), 404)
            await error_of(await client.get(prefix + CHAT), 405)
        unknown = {"prompt": "x", "zzz": 1}
        assert (await client.post("/a" + TEXT, json=unknown)).status == 200
        await error_of(await client.post("/b" + TEXT, json=unknown), 400)
        metrics = await (await client.get("/a/metrics")).text()
        assert 'model_name="one"' in metrics and 'model_name="two"' not in metrics
        # The host application's own answers are its own.
        response = await client.get("/nope")
        assert response.status == 404 and "X-Request-Id" not in response.headers
    assert not one.observers and not two.observers
    assert one.state == "ready", "an application does not stop its engine"


async def test_body_limit_is_the_servers_not_the_hosts() -> None:
    app = web.Application(client_max_size=1024)
    app.add_subapp("/llm", make_app(FakeEngine(), ServerConfig(max_request_bytes=100_000)))
    async with TestClient(TestServer(app)) as client:
        body = {"prompt": "x", "user": "u" * 50_000}
        assert (await client.post("/llm" + TEXT, json=body)).status == 200
        body = {"prompt": "x", "user": "u" * 150_000}
        await error_of(await client.post("/llm" + TEXT, json=body), 413)


async def test_two_applications_of_one_engine() -> None:
    engine = FakeEngine()
    async with (
        TestClient(TestServer(make_app(engine))) as one,
        TestClient(TestServer(make_app(engine, ServerConfig(api_key=("k",))))) as two,
    ):
        assert (await one.post(TEXT, json={"prompt": "x"})).status == 200
        assert (await two.post(TEXT, json={"prompt": "x"})).status == 401
        assert len(engine.observers) == 2


async def test_root_answers_json() -> None:
    async with TestClient(TestServer(make_app(FakeEngine()))) as client:
        assert json.loads(await (await client.get("/")).text()) == {"name": "xylite"}


@pytest.mark.parametrize("name", ["api_key", "allowed_hosts", "allowed_origins"])
def test_a_text_is_not_taken_for_a_list_of_its_letters(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected array, got str"):
        make_app(FakeEngine(), ServerConfig(**{name: "secret"}))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/chat/completions", "There is nothing at '/chat/completions'; OpenAI's API is below /v1"),
        ("/v1/embeddings", "There is nothing at '/v1/embeddings'"),
        ("/" + "x" * 5000, "There is nothing at '/" + "x" * 99 + "'; OpenAI's API is below /v1"),
    ],
)
async def test_a_path_without_anything_is_named(path: str, said: str) -> None:
    async with TestClient(TestServer(make_app(FakeEngine()))) as client:
        error = await error_of(await client.post(path, json={}), 404)
    assert (error["message"], error["code"]) == (said, "not_found")
