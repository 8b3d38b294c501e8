"""POST /v1/chat/completions: forms of answers and streams."""

import json
from typing import Any

import pytest

from tests.http.conftest import Connect
from tests.http.fake_engine import Call, FakeEngine, Item, paused, said
from tests.http.wire import CHAT, USER, error_of, events_of, masked, stream_of
from xylite.text_engine import TextEvent

HEAD = (
    'data: {"id":"chatcmpl","object":"chat.completion.chunk","created":0,"model":"fake","choices":['
)
ROLE = '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
DETAILS = (
    '"prompt_tokens_details":{"cached_tokens":2},"completion_tokens_details":{"reasoning_tokens":0}'
)


def slowly(call: Call) -> list[Item]:
    """Two events, delivered one by one."""
    return paused(said("Hi", num_cached=2))


async def test_answer_has_openai_form(connect: Connect) -> None:
    client = await connect(FakeEngine(lambda call: said("Hi", num_cached=2)))
    response = await client.post(CHAT, json={"messages": USER})
    assert masked(await response.text()) == (
        '{"id":"chatcmpl","object":"chat.completion","created":0,"model":"fake","choices":['
        '{"index":0,"message":{"role":"assistant","content":"Hi","refusal":null},'
        '"logprobs":null,"finish_reason":"stop","stop_reason":null}],'
        '"service_tier":null,"system_fingerprint":null,'
        f'"usage":{{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9,{DETAILS}}}}}'
    )


async def test_stream_transcript(connect: Connect) -> None:
    client = await connect(FakeEngine(slowly))
    response = await client.post(CHAT, json={"messages": USER, "stream": True})
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Accel-Buffering"] == "no"
    assert masked(await response.text()) == (
        f"{HEAD}{ROLE}]}}\n\n"
        f'{HEAD}{{"index":0,"delta":{{"content":"H"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{HEAD}{{"index":0,"delta":{{"content":"i"}},"logprobs":null,"finish_reason":"stop",'
        '"stop_reason":null}]}\n\n'
        "data: [DONE]\n\n"
    )


async def test_stream_transcript_with_usage_of_every_chunk(connect: Connect) -> None:
    client = await connect(FakeEngine(slowly))
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await client.post(
        CHAT, json={"messages": USER, "stream": True, "stream_options": options}
    )

    def usage(n: int) -> str:
        total = 7 + n
        counts = f'"prompt_tokens":7,"completion_tokens":{n},"total_tokens":{total}'
        return f'"usage":{{{counts},{DETAILS}}}'

    # Usage counts what is sent so far; the role chunk leaves together with the first text.
    text = masked(await response.text())
    assert text.endswith(f"{HEAD}],{usage(2)}}}\n\ndata: [DONE]\n\n")
    assert f'"delta":{{"content":"H"}},"logprobs":null,"finish_reason":null}}],{usage(1)}}}' in text
    assert all(e["usage"]["prompt_tokens"] == 7 for e in events_of(text))


@pytest.mark.parametrize(
    "options, has_usage",
    [
        (None, False),
        ({}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
    ],
)
async def test_usage_chunk_comes_only_when_asked_for(
    connect: Connect, options: Any, has_usage: bool
) -> None:
    client = await connect()
    body = {"messages": USER, "stream": True, "stream_options": options}
    events = await stream_of(await client.post(CHAT, json=body))
    last = [e for e in events if e["choices"] == []]
    assert len(last) == has_usage
    if has_usage:
        assert events[-1] is last[0]
        assert last[0]["usage"]["total_tokens"] == 7 + 3
    assert all(e.get("usage") is None for e in events if e["choices"])


async def test_stream_options_without_stream_are_refused(connect: Connect) -> None:
    client = await connect()
    body = {"messages": USER, "stream_options": {"include_usage": True}}
    error = await error_of(await client.post(CHAT, json=body), 400)
    assert error["param"] == "stream_options"


async def test_every_sequence_has_role_text_and_end(connect: Connect) -> None:
    client = await connect()
    body = {"messages": USER, "n": 3, "stream": True, "max_tokens": 2}
    events = await stream_of(await client.post(CHAT, json=body))
    for i in range(3):
        own = [c for e in events for c in e["choices"] if c["index"] == i]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in own) == "Hi"
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["length"]
        assert all("finish_reason" in c for c in own)
    whole = await (await client.post(CHAT, json={**body, "stream": False})).json()
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 6


async def test_no_chunk_is_empty_while_text_is_held_back(connect: Connect) -> None:
    def script(call: Call) -> list[Item]:
        a, b, c = said("abc", params=call.params)
        held = [TextEvent(index=0, token_ids=e.token_ids, logprobs=e.logprobs) for e in (a, b)]
        whole = TextEvent(
            index=0, text="abc", token_ids=c.token_ids, logprobs=c.logprobs, num_output=3
        )
        return paused([*held, whole, TextEvent(index=0, finish_reason="length", num_output=3)])

    client = await connect(FakeEngine(script))
    body = {"messages": USER, "stream": True, "logprobs": True, "return_token_ids": True}
    events = await stream_of(await client.post(CHAT, json=body))
    choices = [e["choices"][0] for e in events[1:]]
    assert [c["delta"] for c in choices] == [{"content": "abc"}, {}]
    assert [t["token"] for t in choices[0]["logprobs"]["content"]] == ["a", "b", "c"]
    assert choices[0]["token_ids"] == [97, 98, 99]
    assert choices[1]["logprobs"] is None
    assert events[0]["prompt_token_ids"] == [ord(c) for c in "user:x\n"]


async def test_held_tokens_are_told_with_the_end(connect: Connect) -> None:
    def script(call: Call) -> list[Item]:
        (a,) = said("a", params=call.params)
        return paused(
            [
                TextEvent(index=0, token_ids=a.token_ids, logprobs=a.logprobs, num_output=1),
                TextEvent(index=0, finish_reason="stop", stop_reason="a", num_output=1),
            ]
        )

    client = await connect(FakeEngine(script))
    body = {"messages": USER, "stream": True, "logprobs": True}
    events = await stream_of(await client.post(CHAT, json=body))
    (choice,) = events[-1]["choices"]
    assert choice["delta"] == {"content": ""}
    assert [t["token"] for t in choice["logprobs"]["content"]] == ["a"]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == "a"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_finite_and_complete(connect: Connect, stream: bool) -> None:
    client = await connect()
    body = {"messages": USER, "logprobs": True, "top_logprobs": 4, "stream": stream}
    response = await client.post(CHAT, json=body)
    text = await response.text()
    assert "Infinity" not in text and "NaN" not in text
    events = events_of(text) if stream else [json.loads(text)]
    entries = [
        entry
        for e in events
        for c in e["choices"]
        for entry in (c["logprobs"] or {"content": []})["content"]
    ]
    assert [e["token"] for e in entries] == ["H", "i", "!"]
    assert entries[0]["bytes"] == [72]
    assert [t["logprob"] for t in entries[0]["top_logprobs"]] == [-0.5, -1.5, -2.5, -9999.0]


async def test_logprobs_without_alternatives_have_an_empty_list(connect: Connect) -> None:
    engine = FakeEngine()
    client = await connect(engine)
    answer = await (await client.post(CHAT, json={"messages": USER, "logprobs": True})).json()
    assert engine.calls[0].params.logprobs == 0
    assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    answer = await (await client.post(CHAT, json={"messages": USER, "logprobs": False})).json()
    assert answer["choices"][0]["logprobs"] is None
    assert engine.calls[1].params.logprobs is None


async def test_tokens_can_be_shown_as_ids(connect: Connect) -> None:
    client = await connect()
    body = {
        "messages": USER,
        "logprobs": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    answer = await (await client.post(CHAT, json=body)).json()
    choice = answer["choices"][0]
    assert choice["token_ids"] == [72, 105, 33]
    assert choice["logprobs"]["content"][0]["token"] == "token_id:72"
    assert answer["prompt_token_ids"] == [ord(c) for c in "user:x\n"]


async def test_prompt_logprobs_have_vllms_form(connect: Connect) -> None:
    client = await connect()
    body = {"messages": USER, "prompt_logprobs": 2}
    answer = await (await client.post(CHAT, json=body)).json()
    rows = answer["prompt_logprobs"]
    assert len(rows) == 7 and rows[0] is None
    assert rows[1]["115"] == {"logprob": -0.5, "rank": 1, "decoded_token": "s"}
    assert rows[1]["120"] == {"logprob": -1.5, "rank": 2, "decoded_token": "x"}
    error = await error_of(await client.post(CHAT, json={**body, "stream": True}), 400)
    assert error["param"] == "prompt_logprobs"


async def test_stop_reason_names_what_ended_it(connect: Connect) -> None:
    client = await connect(FakeEngine(lambda call: said("Hi", stop_reason="!")))
    answer = await (await client.post(CHAT, json={"messages": USER, "stop": "!"})).json()
    assert answer["choices"][0]["stop_reason"] == "!"


async def test_response_role_is_configurable(connect: Connect) -> None:
    client = await connect(response_role="model")
    answer = await (await client.post(CHAT, json={"messages": USER})).json()
    assert answer["choices"][0]["message"]["role"] == "model"
    events = await stream_of(await client.post(CHAT, json={"messages": USER, "stream": True}))
    assert events[0]["choices"][0]["delta"]["role"] == "model"


async def test_messages_reach_the_template_as_they_are(connect: Connect) -> None:
    engine = FakeEngine()
    client = await connect(engine)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"text": "brief"}]},
        {"role": "user", "content": "x", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
        {"role": "user", "content": ""},
    ]
    assert (await client.post(CHAT, json={"messages": messages})).status == 200
    assert engine.renders[0]["messages"] == messages
    assert "".join(map(chr, engine.calls[0].ids)) == (
        "system:be\nbrief\nuser:x\nassistant:\nassistant:\ntool:42\nuser:\n"
    )


async def test_template_options_pass_through(connect: Connect) -> None:
    engine = FakeEngine()
    client = await connect(engine)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = {
        "messages": [*USER, {"role": "assistant", "content": "So "}],
        "continue_final_message": True,
        "add_special_tokens": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "tools": tools,
        "tool_choice": "none",
    }
    assert (await client.post(CHAT, json=body)).status == 200
    (render,) = engine.renders
    assert render["add_generation_prompt"] is False
    assert render["continue_final_message"] is True
    assert render["add_special_tokens"] is True
    assert render["template_kwargs"] == {"enable_thinking": False, "reasoning_effort": "low"}
    assert render["tools"] == tools
    assert engine.calls[0].add_special_tokens is False
    await client.post(CHAT, json={"messages": USER})
    assert engine.renders[1] == {
        "messages": USER,
        "tools": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "add_special_tokens": False,
        "template_kwargs": {},
        "raw": False,
    }


async def test_control_tokens_in_messages_are_text_unless_configured(connect: Connect) -> None:
    engine = FakeEngine()
    client = await connect(engine, raw_control_tokens=True)
    await client.post(CHAT, json={"messages": USER})
    await client.post("/tokenize", json={"messages": USER})
    assert [render["raw"] for render in engine.renders] == [True, True]


async def test_max_completion_tokens_wins(connect: Connect) -> None:
    engine = FakeEngine(defaults={"default_max_tokens": 50})
    client = await connect(engine)
    for body in ({"max_tokens": 9, "max_completion_tokens": 4.0}, {"max_tokens": 9}, {}):
        assert (await client.post(CHAT, json={"messages": USER, **body})).status == 200
    assert [call.params.max_tokens for call in engine.calls] == [4, 9, None]
    assert {call.params.default_max_tokens for call in engine.calls} == {50}


async def test_ids_are_the_servers_own(connect: Connect) -> None:
    engine = FakeEngine()
    client = await connect(engine)
    body = {"messages": USER, "request_id": "mine"}
    answers = [await client.post(CHAT, json=body) for _ in range(2)]
    ids = [(await a.json())["id"] for a in answers]
    assert [a.headers["X-Request-Id"] for a in answers] == ["mine", "mine"]
    assert len(set(ids)) == 2
    assert [call.request_id for call in engine.calls] == ids


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_minus_one_truncates_a_chat_beside_the_tokens_asked_for(
    connect: Connect, name: str
) -> None:
    engine = FakeEngine(max_model_len=20)
    client = await connect(engine)
    messages = [{"role": "user", "content": "a" * 30}]
    body = {"messages": messages, "truncate_prompt_tokens": -1, "max_tokens": 1, name: 5}
    assert (await client.post(CHAT, json=body)).status == 200
    assert len(engine.calls[-1].ids) == 15
    body = {"messages": messages, "truncate_prompt_tokens": -1}
    assert (await client.post(CHAT, json=body)).status == 200
    assert len(engine.calls[-1].ids) == 4
