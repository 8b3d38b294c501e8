"""Bodies that must be refused, and what the refusal says."""

from typing import Any

import pytest

from tests.http.conftest import Connect
from tests.http.fake_engine import FakeEngine
from tests.http.request_fields import BODIES, CHAT_WRONG, NUMBERS, TEXT_WRONG, WRONG
from tests.http.wire import CHAT, TEXT, USER, error_of
from xylite.errors import Overloaded, RequestError


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": USER, **fields}


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
async def test_broken_body_is_400(connect: Connect, path: str) -> None:
    client = await connect()
    headers = {"Content-Type": "application/json"}
    for body in BODIES + (NUMBERS if path == CHAT else []):
        error = await error_of(await client.post(path, data=body, headers=headers), 400)
        assert error["type"] == "invalid_request_error", body[:24]


def cases(path: str, table: list[tuple[str, list[Any]]]) -> list[Any]:
    return [
        pytest.param(path, field, values, id=f"{path[4:8]}-{field}-{i}")
        for i, (field, values) in enumerate(table)
    ]


@pytest.mark.parametrize(
    "path, field, values",
    cases(CHAT, WRONG + CHAT_WRONG) + cases(TEXT, WRONG + TEXT_WRONG),
)
async def test_wrong_value_is_400_and_names_its_field(
    connect: Connect, path: str, field: str, values: list[Any]
) -> None:
    engine = FakeEngine()
    client = await connect(engine)
    body = {"messages": USER} if path == CHAT else {"prompt": "x"}
    for value in values:
        error = await error_of(await client.post(path, json={**body, field: value}), 400)
        assert error["type"] == "invalid_request_error"
        assert field in (error["param"] or "") or field in error["message"], error
        assert engine.num_running == 0
    assert (await client.post(path, json=body)).status == 200


async def test_what_the_template_refuses_is_400_in_its_own_words(connect: Connect) -> None:
    client = await connect()
    body = {"messages": [{"role": "user", "content": "raise"}]}
    error = await error_of(await client.post(CHAT, json=body), 400)
    assert "roles must alternate" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_refused_stream_is_a_real_status(connect: Connect, stream: bool) -> None:
    client = await connect()
    body = {"prompt": "x" * 2000, "stream": stream}
    error = await error_of(await client.post(TEXT, json=body), 400, "context_length_exceeded")
    assert "maximum context length is 1000 tokens" in error["message"]


async def test_fan_out_is_bounded(connect: Connect) -> None:
    engine = FakeEngine()
    client = await connect(engine)
    body = {"prompt": ["x"] * 16, "n": 64, "max_tokens": 1}
    assert (await client.post(TEXT, json=body)).status == 200
    error = await error_of(await client.post(TEXT, json={**body, "n": 65}), 400)
    assert "1040" in error["message"] and "1024" in error["message"]
    assert len(engine.calls) == 16


async def test_long_values_do_not_make_long_errors(connect: Connect) -> None:
    client = await connect()
    long = "A" * 500_000
    for path, body in [
        (CHAT, chat(model=long)),
        (CHAT, chat(**{long: 1}, response_format={"type": long})),
        (CHAT, {"messages": [{"role": long, "content": "x"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": long}]}]}),
        (CHAT, chat(tool_choice=long)),
        (CHAT, chat(chat_template_kwargs={long: 1, "tokenize": 1})),
        (TEXT, {"prompt": [long, 5]}),
        (TEXT, {"prompt": "x", "logit_bias": {long: 1}}),
        (TEXT, {"prompt": "x", "stop": {long: long}}),
        (TEXT, {"prompt": "x", "cache_salt": long}),
    ]:
        response = await client.post(path, json=body)
        error = await error_of(response, 404 if "model" in body else 400)
        assert len(str(error)) < 2000, (path, error)


async def test_long_errors_of_the_engine_are_cut(connect: Connect) -> None:
    engine = FakeEngine()
    client = await connect(engine)
    engine.refuse = RequestError("\0" * 100_000, param="\0" * 100_000)
    error = await error_of(await client.post(TEXT, json={"prompt": "x"}), 400)
    assert error["message"].endswith("...")


async def test_bugs_are_500_without_internals(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client = await connect()
    body = {"messages": [{"role": "user", "content": "bug"}]}
    response = await client.post(CHAT, json=body, headers={"X-Request-Id": "r1"})
    error = await error_of(response, 500)
    assert error["message"] == "internal error (request r1)"
    assert error["type"] == "server_error"
    assert response.headers["x-should-retry"] == "false"
    assert any(r.exc_info and "r1" in r.getMessage() for r in caplog.records)


class Full(FakeEngine):
    """An engine with no room for anything."""

    def require_room(self, n: int) -> None:
        raise Overloaded("the queue is full")


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_what_can_never_run_is_400_even_when_the_queue_is_full(
    connect: Connect, path: str
) -> None:
    client = await connect(Full())
    body = chat() if path == CHAT else {"prompt": "x"}
    response = await client.post(path, json={**body, "n": 1000})
    error = await error_of(response, 400)
    assert (error["message"], error["param"]) == ("n must be in [1, 128], got 1000", "n")
    await error_of(await client.post(path, json={**body, "temperature": 3}), 400)
    await error_of(await client.post(path, json={**body, "n": 128}), 503, "queue_full")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("", "the request body is empty"),
        (" \n", "the request body is empty"),
        ("[]", "the request body must be an object, got a list"),
        ('{"n": "1"}', "n must be an integer, got a string"),
        ('{"n": true}', "n must be an integer, got a boolean"),
        ('{"n": 1234567.5}', "n must be an integer, got 1234567.5"),
        ('{"temperature": "1"}', "temperature must be a number, got a string"),
        ('{"stop": {}}', "stop must be a string or a list, got an object"),
        ('{"stop_token_ids": [1.5]}', "stop_token_ids[0] must be an integer, got a number with"),
        ('{"max_tokens": -12345678}', "got -12345678"),
        ('{"max_tokens": 3000000000}', "got 3000000000"),
        ('{"max_tokens": 2147483648}', "max_tokens must be in [1, 2147483647], got 2147483648"),
        ('{"temperature": 1e300}', "temperature must be in [0, 2], got 1e+300"),
        (f'{{"seed": 1{"9" * 400}}}', "got an integer of 401 digits"),
        ('{"stop": "\\ud83d"}', "half of a surrogate pair at byte 10"),
        ('{"stop": "a\\uDE00 \\ud83d\\ude00"}', "half of a surrogate pair at byte 11"),
    ],
)
async def test_errors_speak_of_json_and_give_exact_numbers(
    connect: Connect, body: str, said: str
) -> None:
    client = await connect()
    headers = {"Content-Type": "application/json"}
    error = await error_of(await client.post(CHAT, data=body, headers=headers), 400)
    assert said in error["message"]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (None, "got nothing"),
        ({}, "got an object"),
        ([], "got an empty list"),
        ([1.0], "prompt[0] must be a token id, a string or a list of token ids, and of the kind"),
        (["a", 5], "prompt[1] must be a token id, a string or a list of token ids, and of the"),
        ([True], "got a boolean"),
        ([[5], None], "got nothing"),
    ],
)
async def test_errors_of_prompts_say_what_was_there(
    connect: Connect, prompt: Any, said: str
) -> None:
    client = await connect()
    error = await error_of(await client.post(TEXT, json={"prompt": prompt}), 400)
    assert said in error["message"]


@pytest.mark.parametrize(
    "field", ["n", "seed", "top_k", "min_tokens", "logprobs", "priority", "max_tokens"]
)
async def test_integers_that_no_float_can_be_are_400(connect: Connect, field: str) -> None:
    client = await connect()
    headers = {"Content-Type": "application/json"}
    for sign in ("", "-"):
        body = f'{{"prompt": "x", "{field}": {sign}{"9" * 400}}}'
        error = await error_of(await client.post(TEXT, data=body, headers=headers), 400)
        assert error["param"] == field


async def test_errors_of_messages_name_the_place_and_the_roles(connect: Connect) -> None:
    client = await connect()
    messages = [*USER, {"role": "critic", "content": "x"}]
    error = await error_of(await client.post(CHAT, json={"messages": messages}), 400)
    assert error["param"] == "messages[1].role"
    assert "assistant, developer" in error["message"] and "'critic'" in error["message"]
    messages = [{"role": "assistant", "content": None}]
    error = await error_of(await client.post(CHAT, json={"messages": messages}), 400)
    assert error["param"] == "messages[0].content"
    assert error["message"] == "messages[0] has neither content nor tool_calls"
