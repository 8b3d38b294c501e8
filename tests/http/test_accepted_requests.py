"""What must not be refused, where it goes, and what becomes of fields that nobody knows."""

import json
import logging
import random
from typing import Any

import pytest

from tests.http.conftest import Connect
from tests.http.fake_engine import FakeEngine
from tests.http.request_fields import CHAT_FINE, CHAT_WRONG, FINE, TEXT_WRONG, WRONG
from tests.http.wire import CHAT, TEXT, USER, error_of
from xylite.http import protocol


@pytest.mark.parametrize(
    "path, body, table",
    [
        (CHAT, {"messages": USER}, FINE + CHAT_FINE),
        (TEXT, {"prompt": "x"}, [*FINE, {"suffix": ""}]),
    ],
)
async def test_harmless_fields_are_accepted(
    connect: Connect, path: str, body: dict[str, Any], table: list[dict[str, Any]]
) -> None:
    client = await connect()
    for fields in table:
        response = await client.post(path, json={**body, **fields})
        assert response.status == 200, (fields, await response.text())


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
async def test_every_optional_field_may_be_null(connect: Connect, path: str) -> None:
    kind, body = {
        CHAT: (protocol.ChatRequest, {"messages": USER}),
        TEXT: (protocol.CompletionRequest, {"prompt": "x"}),
        "/tokenize": (protocol.TokenizeRequest, {"prompt": "x"}),
        "/detokenize": (protocol.DetokenizeRequest, {"tokens": [97]}),
    }[path]
    engine = FakeEngine()
    client = await connect(engine)
    nulls = {
        **dict.fromkeys(kind.__struct_fields__),
        **dict.fromkeys(protocol.UNSUPPORTED),
        **dict.fromkeys(protocol.IGNORED),
    }
    response = await client.post(path, json={**nulls, **body})
    assert response.status == 200, await response.text()
    if engine.calls:
        assert (await client.post(path, json=body)).status == 200
        assert engine.calls[0].params == engine.calls[1].params


async def test_parameters_reach_the_engine(connect: Connect) -> None:
    engine = FakeEngine(defaults={"temperature": 0.3, "top_k": 7, "top_p": 0.9})
    client = await connect(engine)
    fields: dict[str, Any] = {
        "n": 2,
        "max_tokens": 5,
        "min_tokens": 1,
        "temperature": 0,
        "top_p": 0.5,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.2,
        "logit_bias": {"72": 5},
        "seed": 9,
        "stop": ["a", "b"],
        "stop_token_ids": [1],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "allowed_token_ids": [72],
        "bad_words": ["x"],
        "priority": 4,
        "cache_salt": "s",
        "add_special_tokens": False,
    }
    assert (await client.post(TEXT, json={"prompt": "x", **fields})).status == 200
    (call,) = engine.calls
    p = call.params
    for name in ("n", "max_tokens", "min_tokens", "temperature", "top_p", "min_p", "seed"):
        assert getattr(p, name) == fields[name]
    assert p.top_k == 7, "the model's default fills what the request leaves out"
    assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (1, -1, 1.2)
    assert p.logit_bias == {72: 5}
    assert (p.stop, p.stop_token_ids, p.allowed_token_ids) == (("a", "b"), (1,), (72,))
    assert p.ignore_eos and p.include_stop_str_in_output
    assert not p.skip_special_tokens and not p.spaces_between_special_tokens
    assert p.banned_token_ids == (120,)
    assert (call.priority, call.cache_salt, call.add_special_tokens) == (4, "s", False)


async def test_unknown_fields_are_noted_once(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client = await connect()
    caplog.set_level(logging.INFO, "xylite.http")
    for _ in range(3):
        await client.post(TEXT, json={"prompt": "x", "new\nfield": 1, "user": "u"})
    notes = [r.getMessage() for r in caplog.records if "ignored" in r.getMessage()]
    assert sorted(notes) == [
        "request field 'new\\nfield' is ignored: it is not known here",
        "request field 'user' is ignored: it has no effect here",
    ]
    for i in range(400):
        await client.post(TEXT, json={"prompt": "x", f"field{i}": 1})
    notes = [r for r in caplog.records if "ignored" in r.getMessage()]
    assert len(notes) == 256


async def test_strict_requests_refuse_unknown_fields(connect: Connect) -> None:
    client = await connect(strict_requests=True)
    error = await error_of(await client.post(TEXT, json={"prompt": "x", "promt": "y"}), 400)
    assert error["param"] == "promt"
    body = {"prompt": "x", "user": "u", "guided_json": None}
    assert (await client.post(TEXT, json=body)).status == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_any_mix_of_fields_is_answered(connect: Connect, path: str) -> None:
    """Right and wrong values at random: 200 or a 4xx, never anything else, and nothing is left."""
    rng = random.Random(5)
    engine = FakeEngine()
    client = await connect(engine)
    own = (CHAT_WRONG, CHAT_FINE) if path == CHAT else (TEXT_WRONG, [])
    wrong = [(name, value) for name, values in WRONG + own[0] for value in values]
    right = [item for fields in FINE + own[1] for item in fields.items()]
    statuses: set[int] = set()
    for _ in range(400):
        body: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "x"}
        body.update(rng.sample(right, rng.randrange(8)))
        body.update(rng.sample(wrong, rng.choice([0, 0, 1, 2])))
        body.setdefault("stream", rng.random() < 0.5)
        async with client.post(path, json=body) as response:
            text = await response.text()
            assert response.status in (200, 400, 404), (body, text)
            assert response.status == 200 or json.loads(text)["error"]["message"]
            statuses.add(response.status)
    assert {200, 400} <= statuses
    assert engine.num_running == 0
