"""POST /v1/completions: forms of prompts, answers and streams."""

import asyncio
import json
from typing import Any

import pytest

from tests.http.conftest import Connect
from tests.http.fake_engine import Call, FakeEngine, Item, logprob, paused, said
from tests.http.wire import CHAT, TEXT, error_of, masked, stream_of
from xylite.errors import Overloaded
from xylite.text_engine import TextEvent

HEAD = 'data: {"id":"cmpl","object":"text_completion","created":0,"model":"fake","choices":['
DETAILS = (
    '"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":0}'
)


async def test_answer_has_openai_form(connect: Connect) -> None:
    client = await connect(FakeEngine(lambda call: said("Hi", finish="length")))
    response = await client.post(TEXT, json={"prompt": "ab", "max_tokens": 2})
    assert masked(await response.text()) == (
        '{"id":"cmpl","object":"text_completion","created":0,"model":"fake","choices":['
        '{"index":0,"text":"Hi","logprobs":null,"finish_reason":"length","stop_reason":null}],'
        f'"usage":{{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4,{DETAILS}}},'
        '"service_tier":null,"system_fingerprint":null}'
    )


async def test_stream_transcript(connect: Connect) -> None:
    client = await connect(FakeEngine(lambda call: paused(said("Hi"))))
    body = {"prompt": "ab", "stream": True, "stream_options": {"include_usage": True}}
    response = await client.post(TEXT, json=body)
    assert masked(await response.text()) == (
        f'{HEAD}{{"index":0,"text":"H","logprobs":null,"finish_reason":null,"stop_reason":null}}],'
        '"usage":null}\n\n'
        f'{HEAD}{{"index":0,"text":"i","logprobs":null,"finish_reason":"stop",'
        '"stop_reason":null}],"usage":null}\n\n'
        f'{HEAD}],"usage":{{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4,{DETAILS}}}}}'
        "\n\ndata: [DONE]\n\n"
    )


@pytest.mark.parametrize(
    "prompt, contents",
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
async def test_prompts_have_four_forms(connect: Connect, prompt: Any, contents: list[Any]) -> None:
    engine = FakeEngine()
    client = await connect(engine)
    answer = await (await client.post(TEXT, json={"prompt": prompt, "n": 2})).json()
    assert [c["index"] for c in answer["choices"]] == list(range(2 * len(contents)))
    assert [call.prompt for call in engine.calls] == contents
    assert answer["usage"]["prompt_tokens"] == sum(map(len, contents))
    assert answer["usage"]["completion_tokens"] == 3 * 2 * len(contents)


async def test_streams_of_several_prompts_interleave(connect: Connect) -> None:
    second = asyncio.Event()

    def script(call: Call) -> list[Item]:
        p = "".join(map(chr, call.ids))
        events = [said(f"{p}{i}", index=i) for i in range(2)]
        (a0, b0), (a1, b1) = events
        if p == "b":
            return paused([a1, a0]) + paused([b0, b1])
        return [*paused([a0, a1]), second, b0, b1]

    engine = FakeEngine(script)
    client = await connect(engine)
    body = {"prompt": ["a", "b"], "n": 2, "stream": True}
    response = await client.post(TEXT, json=body)
    received = b""
    while received.count(b'"finish_reason":"stop"') < 2:
        received += await response.content.readany()
    second.set()
    text = (received + await response.read()).decode()
    choices = [c for line in text.split("\n\n")[:-2] for c in _choices(line)]
    whole = {i: "".join(c["text"] for c in choices if c["index"] == i) for i in range(4)}
    assert whole == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}
    ends = [c["index"] for c in choices if c["finish_reason"]]
    assert sorted(ends[:2]) == [2, 3] and sorted(ends[2:]) == [0, 1]


def _choices(line: str) -> list[dict[str, Any]]:
    return json.loads(line.removeprefix("data: "))["choices"]


async def test_echo_with_logprobs_scores_the_prompt(connect: Connect) -> None:
    client = await connect()
    body = {"prompt": [97, 98], "echo": True, "logprobs": 1, "max_tokens": 1}
    answer = await (await client.post(TEXT, json=body)).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "abH"
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [None, -0.5, -0.5],
        "tokens": ["a", "b", "H"],
        "top_logprobs": [None, {"b": -0.5}, {"H": -0.5}],
    }
    assert "prompt_logprobs" not in choice


async def test_max_tokens_zero_with_echo_only_scores(connect: Connect) -> None:
    client = await connect()
    body = {"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = await (await client.post(TEXT, json=body)).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": -0.5}]
    assert answer["usage"]["completion_tokens"] == 0


async def test_streamed_echo_waits_for_the_scores_of_its_prompt(connect: Connect) -> None:
    def script(call: Call) -> list[Item]:
        (a,) = said("A", index=0, params=call.params)
        (b,) = said("B", index=1, params=call.params)
        first = TextEvent(
            index=0,
            text=a.text,
            token_ids=a.token_ids,
            logprobs=a.logprobs,
            prompt_logprobs=(None, logprob("b", k=1)),
            finish_reason="stop",
            num_output=1,
        )
        return paused([b, first])

    client = await connect(FakeEngine(script))
    body = {"prompt": "ab", "n": 2, "echo": True, "logprobs": 1, "stream": True}
    events = await stream_of(await client.post(TEXT, json=body))
    choices = sorted((c for e in events for c in e["choices"]), key=lambda c: c["index"])
    assert [c["text"] for c in choices] == ["abA", "abB"]
    for choice, token in zip(choices, "AB", strict=True):
        assert choice["logprobs"]["tokens"] == ["a", "b", token]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]


@pytest.mark.parametrize("echo", [False, True])
async def test_streamed_pieces_equal_the_whole(connect: Connect, echo: bool) -> None:
    def script(call: Call) -> list[Item]:
        events = said("cdé!", params=call.params)
        events[1] = TextEvent(
            index=0, token_ids=events[1].token_ids, logprobs=events[1].logprobs, num_output=2
        )
        if call.params.prompt_logprobs is not None:
            e = events[0]
            events[0] = TextEvent(
                index=0,
                text=e.text,
                token_ids=e.token_ids,
                logprobs=e.logprobs,
                prompt_logprobs=(None, logprob("b", k=2)),
                num_output=1,
            )
        return paused(events)

    client = await connect(FakeEngine(script))
    body = {"prompt": "ab", "logprobs": 2, "echo": echo, "return_token_ids": True}
    whole = (await (await client.post(TEXT, json=body)).json())["choices"][0]
    events = await stream_of(await client.post(TEXT, json={**body, "stream": True}))
    pieces = [e["choices"][0] for e in events]
    assert len(pieces) == 3
    assert "".join(p["text"] for p in pieces) == whole["text"]
    assert [i for p in pieces for i in p["token_ids"]] == whole["token_ids"]
    for key, values in whole["logprobs"].items():
        assert [v for p in pieces for v in p["logprobs"][key]] == values
    assert pieces[0]["prompt_token_ids"] == whole["prompt_token_ids"] == [97, 98]


async def test_impossible_tokens_have_a_finite_logprob(connect: Connect) -> None:
    client = await connect()
    answer = await (await client.post(TEXT, json={"prompt": "a", "logprobs": 4})).json()
    assert answer["choices"][0]["logprobs"]["top_logprobs"][0]["z"] == -9999.0


async def test_prompt_logprobs_belong_to_each_choice(connect: Connect) -> None:
    client = await connect()
    body = {"prompt": ["ab", "cd"], "prompt_logprobs": 0}
    answer = await (await client.post(TEXT, json=body)).json()
    assert [sorted(c["prompt_logprobs"][1]) for c in answer["choices"]] == [["98"], ["100"]]


async def test_max_tokens_defaults_to_16(connect: Connect) -> None:
    engine = FakeEngine()
    client = await connect(engine)
    for value in ({}, {"max_tokens": None}, {"max_tokens": 3}):
        assert (await client.post(TEXT, json={"prompt": "a", **value})).status == 200
    assert [call.params.max_tokens for call in engine.calls] == [None, None, 3]
    assert {call.params.default_max_tokens for call in engine.calls} == {16}
    engine.sampling_defaults = {"default_max_tokens": 50}
    assert (await client.post(TEXT, json={"prompt": "a"})).status == 200
    assert engine.calls[-1].params.default_max_tokens == 50


async def test_prompts_can_be_truncated_on_request(connect: Connect) -> None:
    engine = FakeEngine(max_model_len=20)
    client = await connect(engine)
    for body in (
        {"prompt": "abcdef", "truncate_prompt_tokens": 2},
        {"prompt": [97, 98, 99], "truncate_prompt_tokens": 2, "truncation_side": "right"},
        {"prompt": "a" * 30, "truncate_prompt_tokens": 4.0, "max_tokens": 1},
    ):
        assert (await client.post(TEXT, json=body)).status == 200
    assert [call.ids for call in engine.calls] == [(101, 102), (97, 98), (97,) * 4]
    for bad in (0, 21, -2, 1.5):
        body = {"prompt": "abc", "truncate_prompt_tokens": bad}
        error = await error_of(await client.post(TEXT, json=body), 400)
        assert error["param"] == "truncate_prompt_tokens"
    for more in ({}, {"truncate_prompt_tokens": 2}):
        body = {"prompt": "abc", "truncation_side": "rigth", **more}
        error = await error_of(await client.post(TEXT, json=body), 400)
        assert error["param"] == "truncation_side" and "'rigth'" in error["message"]


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"max_tokens": 5}, 15),
        ({"max_tokens": 5.0, "truncation_side": "right"}, 15),
        ({"max_tokens": 0, "echo": True}, 20),
        ({}, 4),  # room for the answer of a completion that asks for no number
        ({"max_tokens": None}, 4),
    ],
)
async def test_minus_one_truncates_to_what_the_context_holds_beside_the_answer(
    connect: Connect, more: dict[str, Any], kept: int
) -> None:
    engine = FakeEngine(max_model_len=20)
    client = await connect(engine)
    text = "".join(map(chr, range(97, 122))) * 4
    body = {"prompt": text, "truncate_prompt_tokens": -1, **more}
    assert (await client.post(TEXT, json=body)).status == 200
    cut = text[:kept] if "truncation_side" in more else text[-kept:]
    assert engine.calls[-1].ids == tuple(map(ord, cut))


@pytest.mark.parametrize(("default", "kept"), [(3, 17), (16, 4), (500, 4)])
@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_minus_one_leaves_room_for_the_models_default_answer_but_not_for_a_long_one(
    connect: Connect, path: str, default: int, kept: int
) -> None:
    engine = FakeEngine(max_model_len=20)
    engine.sampling_defaults = {"default_max_tokens": default}
    client = await connect(engine)
    text = "a" * 30
    asked = {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
    assert (await client.post(path, json={**asked, "truncate_prompt_tokens": -1})).status == 200
    assert len(engine.calls[-1].ids) == kept


async def test_truncation_makes_no_room_for_an_answer_longer_than_the_context(
    connect: Connect,
) -> None:
    client = await connect(FakeEngine(max_model_len=20))
    body = {"prompt": "a" * 30, "truncate_prompt_tokens": -1, "max_tokens": 20}
    error = await error_of(await client.post(TEXT, json=body), 400)
    assert error["code"] == "context_length_exceeded"


async def test_all_prompts_are_queued_or_none(connect: Connect) -> None:
    engine = FakeEngine()
    client = await connect(engine)

    def script(call: Call) -> list[Item]:
        engine.refuse = Overloaded("full")
        return [asyncio.Event()]

    engine.script = script
    await error_of(await client.post(TEXT, json={"prompt": ["a", "b"]}), 503, "queue_full")
    assert engine.num_running == 0
    assert engine.calls[0].is_closed


async def test_an_error_names_the_prompt_it_concerns(connect: Connect) -> None:
    client = await connect()
    error = await error_of(await client.post(TEXT, json={"prompt": ["a", ""]}), 400)
    assert error["param"] == "prompt[1]"
    assert error["message"].startswith("prompt[1]: ")
