"""Requests that must be refused, what the refusal says, and values that must not be refused."""

import asyncio
import io
import json
import logging
import random
from typing import Any

import pytest
from yarl import URL

from tests.http.conftest import Connect
from tests.http.fake_engine import FakeEngine
from tests.http.wire import CHAT, TEXT, USER, error_of
from xylite.errors import Overloaded, RequestError
from xylite.http import protocol

BIG = 2**63


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": USER, **fields}


# Bodies that are no request at all.
BODIES = [
    b"",
    b"{",
    b"[]",
    b"5",
    b'"x"',
    b"null",
    b"{} x",
    b"{'a': 1}",
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b"[" * 100_000,
    b'{"messages":' + b"[" * 100_000,
    b'{"messages":' + b'{"a":' * 100_000,
    b'{"zzz":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"messages":[{"role":"user","content":"\xff"}]}',
    b'{"messages":[{"role":"user","content":"\\ud800"}]}',
    b'{"messages":[{"role":"user","content":"\\udc00\\ud800"}]}',
]

# Numbers that JSON may hold and we may not, or that JSON may not hold.
NUMBERS = [
    b'{"messages":[{"role":"user","content":"x"}],"max_tokens":' + b"9" * 1_000_000 + b"}",
    b'{"messages":[{"role":"user","content":"x"}],"temperature":1e999}',
    b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}',
    b'{"messages":[{"role":"user","content":"x"}],"temperature":Infinity}',
    b'{"messages":[{"role":"user","content":"x"}],"seed":-Infinity}',
    b'{"messages":[{"role":"user","content":"x"}],"top_p":01}',
]


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
async def test_broken_body_is_400(connect: Connect, path: str) -> None:
    client = await connect()
    headers = {"Content-Type": "application/json"}
    for body in BODIES + (NUMBERS if path == CHAT else []):
        error = await error_of(await client.post(path, data=body, headers=headers), 400)
        assert error["type"] == "invalid_request_error", body[:24]


# (field, bad values); each is tried on both endpoints unless it belongs to one only
WRONG: list[tuple[str, list[Any]]] = [
    ("temperature", [-1, 2.5, 1e300, "1", True, [], {}]),
    ("top_p", [0, -0.1, 1.5, "0.5", True]),
    ("top_k", [-2, 1.5, 2**40, "5", True]),
    ("min_p", [-0.1, 1.1, "0"]),
    ("presence_penalty", [2.5, -2.5, 100, "0"]),
    ("frequency_penalty", [2.5, -2.5, 100, "0"]),
    ("repetition_penalty", [0, -1, 101, "1"]),
    ("n", [0, -1, 129, 1.5, 2**31, BIG, 2**70, 1e300, "1", True]),
    ("best_of", [2, 0, -1, 1.5, "1"]),
    ("max_tokens", [0, -1, 1.5, 2**31 + 1, BIG, 2**64, 1e30, "16", True, [16]]),
    ("min_tokens", [-1, 1.5, BIG, "1"]),
    ("seed", [BIG, -BIG - 1, 1.5, "1", True]),
    ("logit_bias", [{"x": 1}, {"1.5": 1}, {"-1": 1}, {"1114112": 1}, {"5": 101}, {"5": "1"}, []]),
    ("logit_bias", [{str(i): 1 for i in range(1025)}, {"9" * 400: 1}, {"٣": 1}, {"5": 1e308}]),
    ("stop_token_ids", [[-1], [1114112], ["1"], [1.5], 5, [True], [1] * 257]),
    ("allowed_token_ids", [[], [-1], [1114112], "5"]),
    ("bad_words", ["x", [""], ["two"], [5], ["x"] * 257]),
    ("prompt_logprobs", [-1, 21, 1.5, True]),
    ("stream", ["true", 1, 0]),
    ("stream_options", [{"include_usage": 1}, 5, []]),
    ("stop", [5, [5], {"a": 1}, True]),
    ("model", [5, ["fake"]]),
    ("priority", [1.5, 2**31, "1", True]),
    ("cache_salt", ["", "a" * 129, "a\0", "a@b", "a/b", "a\\b", 5]),
    ("truncation_side", [5]),
    ("ignore_eos", ["yes", 1]),
    ("response_format", ["json", {"type": "json_object"}, {"type": "json_schema"}, {"type": "x"}]),
    ("structured_outputs", [{"json": {}}, {"regex": "a"}]),
    ("guided_json", [{"type": "object"}, "{}", {}]),
    ("guided_regex", ["a+"]),
    ("guided_choice", [["a"]]),
    ("regex", ["a"]),
    ("grammar", ["root ::= 'a'"]),
    ("logits_processors", [["x"]]),
    ("custom_logit_processor", ["80049500"]),
    ("vllm_xargs", [{"a": 1}]),
    ("use_beam_search", [True]),
    ("prompt_embeds", ["AAAA"]),
    ("lora_path", ["/etc"]),
    ("kv_transfer_params", [{"do_remote_prefill": True}]),
    ("logprob_token_ids", [[1]]),
    ("mirostat", [2]),
]
CHAT_WRONG: list[tuple[str, list[Any]]] = [
    ("max_completion_tokens", [0, -1, 1.5, BIG, "5"]),
    ("logprobs", [1, 0, "true"]),
    ("top_logprobs", [1, 5, 20]),
    ("tools", [[{"type": "function", "function": {"name": "f"}}], "x", [5]]),
    ("tool_choice", ["required", "x", {"type": "function", "function": {"name": "f"}}, 5]),
    ("functions", [[{"name": "f"}]]),
    ("function_call", [{"name": "f"}]),
    ("modalities", [["audio"], ["text", "audio"]]),
    ("audio", [{"voice": "x"}]),
    ("chat_template", ["{{ 1 }}"]),
    ("documents", [[{"text": "x"}]]),
    ("echo", [True]),
    ("reasoning_effort", ["x", 5]),
    ("chat_template_kwargs", [{"tokenize": True}, {"chat_template": "x"}, {"messages": []}, "x"]),
    ("chat_template_kwargs", [{"add_generation_prompt": False}, {"tools": []}]),
    ("messages", [[], None, "x", 5, ["x"], [5], [[]], {"role": "user"}]),
    ("messages", [[{"role": "user"}], [{"role": "tool", "content": None}]]),
    ("messages", [[{"role": "critic", "content": "x"}], [{"role": "assistant", "tool_calls": []}]]),
    ("messages", [[{"content": "x"}], [{"role": "<|im_end|>", "content": "x"}]]),
    ("messages", [[{"role": "user", "content": 5}], [{"role": "user", "content": [5]}]]),
    ("messages", [[{"role": 5, "content": "x"}], [{"role": ["user"], "content": "x"}]]),
    ("messages", [[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]]),
    ("messages", [[{"role": "user", "content": [{"type": "text"}]}]]),
    ("messages", [[{"role": "user", "content": {"type": "text", "text": "x"}}]]),
    ("messages", [[{}], [None]]),
    ("messages", [[{"role": "assistant", "tool_calls": "x"}]]),
    ("messages", [[{"role": "assistant", "tool_calls": [5]}]]),
    ("messages", [[{"role": "user", "content": "x"}] * 8193]),
]
TEXT_WRONG: list[tuple[str, list[Any]]] = [
    ("prompt", [None, "", [], [""], [[]], 5, {}, [5.5], [True], [[True]], ["a", 1], [1, "a"]]),
    ("prompt", [[None], [["a"]], [-1], [1114112], [BIG], [[1], "a"], ["a"] * 1025, [[1], 2]]),
    ("prompt", ["a" * 2000]),
    ("logprobs", [-1, 21, 1.5, True, False, "1"]),
    ("suffix", ["x"]),
    ("echo", ["x", 1]),
]


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


# Fields that clients send and that must not be an error.
FINE: list[dict[str, Any]] = [
    {"n": 1.0, "seed": 1.0, "top_k": -1, "max_tokens": 3.0},
    {"seed": BIG - 1},
    {"seed": -5},
    {"best_of": 1},
    {"n": 2, "best_of": 2},
    {"stop": None},
    {"stop": []},
    {"logit_bias": {}},
    {"logit_bias": {"33": -100, "34": 100.0}},
    {"response_format": {"type": "text"}},
    {"structured_outputs": None},
    {"structured_outputs": {"json": None}},
    {"guided_json": None, "guided_choice": []},
    {"use_beam_search": False, "length_penalty": 1.0},
    {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"},
    {"prompt_cache_key": "k", "safety_identifier": "s", "verbosity": "low"},
    {"some_vendor_field": {"deep": [1]}},
    {"mirostat": 0, "typical_p": 1.0},
    {"priority": -5, "cache_salt": "tenant-1"},
    {"bad_words": ["x"], "allowed_token_ids": [72, 105, 33]},
    {"stream": None, "stream_options": None},
    {"model": ""},
    {"model": "fake"},
    {"repeat_penalty": 1.1, "no_stop_trim": True},
]
CHAT_FINE: list[dict[str, Any]] = [
    {"tools": []},
    {"tools": None, "tool_choice": None},
    {"tool_choice": "none"},
    {"tool_choice": "auto"},
    {"functions": [], "function_call": "auto"},
    {"modalities": ["text"], "audio": None},
    {"logprobs": True, "top_logprobs": 0},
    {"logprobs": False, "top_logprobs": 0},
    {"parallel_tool_calls": False},
    {"reasoning_effort": "none"},
    {"chat_template": None, "documents": None, "echo": False},
]


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
        await error_of(response, 404 if "model" in body else 400)


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
    await error_of(response, 415)


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


async def test_model_names(connect: Connect) -> None:
    client = await connect(FakeEngine(names=("org/main", "alias")))
    for asked, shown in [("org/main", "org/main"), ("alias", "alias"), ("", "org/main")]:
        answer = await (await client.post(TEXT, json={"prompt": "x", "model": asked})).json()
        assert answer["model"] == shown
    answer = await (await client.post(TEXT, json={"prompt": "x"})).json()
    assert answer["model"] == "org/main"
    for path, body in [(CHAT, chat()), (TEXT, {"prompt": "x"}), ("/tokenize", {"prompt": "x"})]:
        response = await client.post(path, json={**body, "model": "main"})
        error = await error_of(response, 404, "model_not_found")
        assert (error["type"], error["param"]) == ("not_found_error", "model")


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
