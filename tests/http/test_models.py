"""Routes that generate nothing."""

import io
import json
from typing import Any

import pytest
from yarl import URL

from tests.http.conftest import Connect
from tests.http.fake_engine import FakeEngine
from tests.http.wire import CHAT, TEXT, USER, error_of


async def test_every_name_is_listed_and_can_be_retrieved(connect: Connect) -> None:
    client = await connect(FakeEngine(names=("org/main", "alias")))
    listed = await (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["org/main", "alias"]
    assert listed["data"][1] == {
        "id": "alias",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "xylite",
        "root": "org/main",
        "parent": None,
        "max_model_len": 1000,
        "permission": [],
    }
    for name in ("org/main", "org%2Fmain", "alias"):
        url = URL(f"http://{client.host}:{client.port}/v1/models/{name}", encoded=True)
        async with client.session.get(url) as response:
            assert response.status == 200
            assert (await response.json())["max_model_len"] == 1000
    for name in ("org", "main", "x" * 2000):
        error = await error_of(await client.get(f"/v1/models/{name}"), 404, "model_not_found")
        assert error["type"] == "not_found_error"


async def test_an_answer_names_the_model_and_an_unknown_one_is_404(connect: Connect) -> None:
    client = await connect(FakeEngine(names=("org/main", "alias")))
    for asked, shown in [("org/main", "org/main"), ("alias", "alias"), ("", "org/main")]:
        answer = await (await client.post(TEXT, json={"prompt": "x", "model": asked})).json()
        assert answer["model"] == shown
    answer = await (await client.post(TEXT, json={"prompt": "x"})).json()
    assert answer["model"] == "org/main"
    bodies = {CHAT: {"messages": USER}, TEXT: {"prompt": "x"}, "/tokenize": {"prompt": "x"}}
    for path, body in bodies.items():
        response = await client.post(path, json={**body, "model": "main"})
        error = await error_of(response, 404, "model_not_found")
        assert (error["type"], error["param"]) == ("not_found_error", "model")


@pytest.mark.parametrize(
    "path",
    ["/", "/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/fake"],
)
async def test_get_routes_answer_head(connect: Connect, path: str) -> None:
    client = await connect()
    got = await client.get(path)
    assert got.status == 200 and await got.read()
    head = await client.head(path)
    assert head.status == 200 and not await head.read()
    assert head.headers["Content-Type"] == got.headers["Content-Type"]


@pytest.mark.parametrize(
    "state, health, ready",
    [("ready", 200, 200), ("loading", 200, 503), ("draining", 200, 503), ("dead", 503, 503)],
)
async def test_probes_tell_the_engines_state(
    connect: Connect, state: str, health: int, ready: int
) -> None:
    engine = FakeEngine()
    client = await connect(engine)
    engine.state = state
    assert (await client.get("/health")).status == health
    response = await client.get("/ready")
    assert response.status == ready
    assert "Retry-After" not in response.headers
    assert ("Connection" in response.headers) is (state == "draining")


@pytest.mark.parametrize("state", ["loading", "draining", "dead"])
@pytest.mark.parametrize("path, body", [(CHAT, {"messages": USER}), (TEXT, {"prompt": "x"})])
async def test_no_work_is_taken_unless_ready(
    connect: Connect, state: str, path: str, body: dict[str, Any]
) -> None:
    engine = FakeEngine()
    client = await connect(engine)
    engine.state = state
    code = {"dead": "engine_dead"}.get(state, state)
    for stream in (False, True):
        response = await client.post(path, json={**body, "stream": stream})
        await error_of(response, 503, code)
        assert ("Retry-After" in response.headers) is (state != "dead")
    assert not engine.calls


async def test_models_cannot_be_listed_before_they_are_loaded(connect: Connect) -> None:
    engine = FakeEngine()
    del engine.model_names, engine.limits
    engine.state = "loading"
    client = await connect(engine)
    for path in ("/v1/models", "/v1/models/fake"):
        await error_of(await client.get(path), 503, "loading")
    await error_of(await client.post("/tokenize", json={"prompt": "x"}), 503, "loading")
    assert (await client.get("/metrics")).status == 200


async def test_tokenize_a_prompt(connect: Connect) -> None:
    client = await connect()
    body = {"prompt": "aé", "return_token_strs": True}
    answer = await (await client.post("/tokenize", json=body)).json()
    assert answer == {
        "count": 2,
        "max_model_len": 1000,
        "tokens": [97, 233],
        "token_strs": ["a", "é"],
    }
    answer = await (await client.post("/tokenize", json={"prompt": ""})).json()
    assert (answer["count"], answer["tokens"], answer["token_strs"]) == (0, [], None)


async def test_tokenize_messages_as_chat_does(connect: Connect) -> None:
    engine = FakeEngine()
    client = await connect(engine)
    answer = await (await client.post("/tokenize", json={"messages": USER})).json()
    await client.post(CHAT, json={"messages": USER})
    assert tuple(answer["tokens"]) == engine.calls[0].ids
    assert engine.renders[0] == engine.renders[1]
    body = {"messages": USER, "chat_template_kwargs": {"tokenize": False}}
    await error_of(await client.post("/tokenize", json=body), 400)


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": "x", "messages": USER}, {"prompt": 5}, {"messages": []}, {"prompt": ["x"]}],
)
async def test_tokenize_wants_one_of_prompt_and_messages(
    connect: Connect, body: dict[str, Any]
) -> None:
    client = await connect()
    error = await error_of(await client.post("/tokenize", json=body), 400)
    assert "prompt" in error["message"] or "messages" in error["message"]


async def test_detokenize(connect: Connect) -> None:
    client = await connect()
    answer = await (await client.post("/detokenize", json={"tokens": [97, 233]})).json()
    assert answer == {"prompt": "aé"}
    answer = await (await client.post("/detokenize", json={"tokens": [97] * 5000})).json()
    assert answer == {"prompt": "a" * 5000}
    bad: list[Any] = [None, [-1], [1114112], ["x"], [1.5], [97] * 5000 + [-1], [1] * 1_000_001]
    for tokens in bad:
        body = io.BytesIO(json.dumps({"tokens": tokens}).encode())
        headers = {"Content-Type": "application/json"}
        error = await error_of(await client.post("/detokenize", data=body, headers=headers), 400)
        assert "tokens" in error["param"]
