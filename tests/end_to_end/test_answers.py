"""What a client gets from the real model over HTTP: texts, streams, ends, counts."""

import asyncio

import pytest

from tests.end_to_end.smollm2 import (
    ALPHA,
    ALPHA_IDS,
    ALPHA_TEXT,
    CHAT,
    CHAT_TEXT,
    CJK,
    CJK_TEXT,
    CZ,
    CZ_TEXT,
    HELLO,
    LONG,
    LONG_TEXT,
    NUM,
    NUM_IDS,
    NUM_TEXT,
    NUMLONG,
    NUMLONG_TEXT,
)

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

TEXTS = {
    "alpha": (ALPHA, 14, ALPHA_TEXT),
    "num": (NUM, 20, NUM_TEXT),
    "cjk": (CJK, 20, CJK_TEXT),
    "cz": (CZ, 20, CZ_TEXT),
    "long": (LONG, 16, LONG_TEXT),
    "numlong": (NUMLONG, 24, NUMLONG_TEXT),
}


def streamed_text(events):
    return "".join(c["text"] for e in events[:-1] for c in e["choices"])


@pytest.mark.parametrize("name", TEXTS)
async def test_greedy_text_is_the_reference_streamed_and_not(client, name):
    prompt, n, expected = TEXTS[name]
    answer = await client.complete(prompt, n)
    assert answer["choices"][0]["text"] == expected
    assert answer["usage"]["completion_tokens"] == n
    assert answer["choices"][0]["finish_reason"] == "length"
    body = {"prompt": prompt, "max_tokens": n, "temperature": 0}
    events = await client.events("/v1/completions", body)
    assert streamed_text(events) == expected
    assert all("\ufffd" not in c["text"] for e in events[:-1] for c in e["choices"])


async def test_chat_answers_and_stops_at_the_models_end(client):
    answer = await client.chat(CHAT)
    assert answer["choices"][0]["message"]["content"] == CHAT_TEXT
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 37
    assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(("max_tokens", "finish"), [(11, "length"), (12, "stop"), (13, "stop")])
async def test_length_is_told_apart_from_the_models_end(client, max_tokens, finish):
    answer = await client.chat(CHAT, max_tokens=max_tokens)
    assert answer["choices"][0]["finish_reason"] == finish
    assert answer["usage"]["completion_tokens"] == min(max_tokens, 12)


@pytest.mark.parametrize(
    ("options", "has_usage"),
    [
        (None, False),
        ({}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
    ],
)
async def test_usage_chunk_comes_only_when_asked_for(client, options, has_usage):
    body = {"messages": CHAT, "temperature": 0}
    if options is not None:
        body["stream_options"] = options
    events = await client.events("/v1/chat/completions", body)
    assert events[-1] == "[DONE]"
    without_choice = [e for e in events[:-1] if e["choices"] == []]
    assert len(without_choice) == has_usage
    if has_usage:
        assert events[-2] is without_choice[0]
        assert without_choice[0]["usage"]["prompt_tokens"] == 37
        assert without_choice[0]["usage"]["completion_tokens"] == 12


async def test_stream_options_without_a_stream_are_refused(client):
    body = {"messages": CHAT, "stream_options": {"include_usage": True}}
    error = await client.post("/v1/chat/completions", body, 400)
    assert error["error"]["param"] == "stream_options"


async def test_each_choice_says_once_why_it_ended(client):
    for body, reason in (
        ({"prompt": ALPHA, "max_tokens": 5}, "length"),
        ({"prompt": NUM, "max_tokens": 20, "stop_token_ids": [28]}, "stop"),
    ):
        events = await client.events("/v1/completions", {**body, "temperature": 0})
        reasons = [c["finish_reason"] for e in events[:-1] for c in e["choices"]]
        assert reasons[-1] == reason and set(reasons[:-1]) <= {None}


async def test_no_empty_chunks_come_while_text_is_held_back(client):
    body = {"messages": CHAT, "temperature": 0, "stop": ["ZZZZZZ"], "max_tokens": 12}
    events = await client.events("/v1/chat/completions", body)
    deltas = [c for e in events[1:-1] for c in e["choices"]]
    assert all(c["delta"].get("content") or c["finish_reason"] for c in deltas)


@pytest.mark.parametrize(
    ("stop", "expected", "reason", "tokens"),
    [
        (["DEFGHIJ"], "", "DEFGHIJ", 4),
        (["GHIX"], ALPHA_TEXT, None, 14),
        (["KL"], "DEFGHIJ", "KL", 6),
        (["H"], "DEFG", "H", 2),
        (["XY", "LM"], "DEFGHIJK", "LM", 6),
    ],
)
async def test_stop_strings_cut_exactly_and_never_leak(client, stop, expected, reason, tokens):
    answer = await client.complete(ALPHA, 14, stop=stop)
    choice = answer["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == (expected, reason)
    assert choice["finish_reason"] == ("length" if reason is None else "stop")
    assert answer["usage"]["completion_tokens"] == tokens
    body = {"prompt": ALPHA, "max_tokens": 14, "temperature": 0, "stop": stop}
    body["stream_options"] = {"include_usage": True}
    events = await client.events("/v1/completions", body)
    assert streamed_text(events) == expected
    assert events[-2]["usage"]["completion_tokens"] == tokens


async def test_stop_string_may_be_kept(client):
    assert await client.text(NUM, 20, stop=[", 10"]) == " 8, 9"
    kept = await client.complete(NUM, 20, stop=[", 10"], include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == " 8, 9, 10"
    assert kept["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize(("max_tokens", "expected"), [(2, " "), (4, " 你")])
async def test_length_limit_inside_a_character_gives_valid_text(client, max_tokens, expected):
    answer = await client.complete(CJK, max_tokens)
    text = answer["choices"][0]["text"]
    assert text in (expected, expected + "\ufffd")
    assert answer["usage"]["completion_tokens"] == max_tokens
    body = {"prompt": CJK, "max_tokens": max_tokens, "temperature": 0}
    assert streamed_text(await client.events("/v1/completions", body)) == text


async def test_prompt_may_be_text_ids_or_lists_of_them(client):
    ids = (await client.post("/tokenize", {"prompt": ALPHA}))["tokens"]
    assert len(ids) == 7
    for prompt, num in ((ALPHA, 1), (ids, 1), ([ALPHA, NUM], 2), ([ids, ids], 2)):
        choices = (await client.complete(prompt, 5))["choices"]
        assert [c["index"] for c in choices] == list(range(num))
        assert choices[0]["text"] == "DEFGHIJK"[:7] or choices[0]["text"] == "DEFGHIJK"
    texts = [c["text"] for c in (await client.complete([ALPHA, NUM], 6))["choices"]]
    assert ALPHA_TEXT.startswith(texts[0]) and NUM_TEXT.startswith(texts[1])


async def test_token_ids_are_returned_when_asked_for(client):
    answer = await client.complete(ALPHA, 14, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == ALPHA_IDS


async def test_n_gives_choices_of_their_own_and_usage_counts_them_all(client):
    body = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 8, "ignore_eos": True}
    first = await client.chat(CHAT, **body)
    texts = [c["message"]["content"] for c in first["choices"]]
    assert [c["index"] for c in first["choices"]] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert first["usage"]["completion_tokens"] == 24
    again = await client.chat(CHAT, **body)
    assert [c["message"]["content"] for c in again["choices"]] == texts
    one = await client.chat(CHAT, **{**body, "n": 1})
    assert one["choices"][0]["message"]["content"] == texts[0]


async def test_seed_repeats_alone_and_among_others(client):
    async def draw(seed):
        answer = await client.chat(CHAT, temperature=1.0, seed=seed, max_tokens=30)
        return answer["choices"][0]["message"]["content"]

    alone = [await draw(123) for _ in range(2)]
    crowd = await asyncio.gather(draw(123), *(draw(1000 + i) for i in range(7)))
    assert alone[0] == alone[1] == crowd[0]
    assert await draw(124) != alone[0]
    unseeded = [await draw(None) for _ in range(3)]
    assert len(set(unseeded)) > 1


async def test_neighbours_do_not_change_greedy_text(client):
    alone = await asyncio.gather(client.complete(NUM, 20, logprobs=1))
    crowd = await asyncio.gather(
        client.complete(NUM, 20, logprobs=1),
        *(client.complete(p, n) for p, n, _ in TEXTS.values()),
        client.chat(CHAT, temperature=1.0, seed=3, max_tokens=20),
    )
    one, other = alone[0]["choices"][0], crowd[0]["choices"][0]
    assert one["text"] == other["text"] == NUM_TEXT
    assert one["logprobs"]["token_logprobs"] == pytest.approx(
        other["logprobs"]["token_logprobs"], abs=1e-4
    )


async def test_second_time_hits_the_cache_and_says_the_same(client):
    for prompt, n, expected in (TEXTS["long"], TEXTS["numlong"]):
        answers = [await client.complete(prompt, n) for _ in range(3)]
        assert [a["choices"][0]["text"] for a in answers] == [expected] * 3
        usage = answers[-1]["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert usage["prompt_tokens"] - 1 == cached


async def test_penalties_count_what_they_should(client):
    plain = await client.complete(NUM, 1, logprobs=3)
    presence = await client.complete(NUM, 1, logprobs=3, presence_penalty=2.0)
    first = plain["choices"][0]["logprobs"]
    assert first == presence["choices"][0]["logprobs"]
    assert first["token_logprobs"][0] == pytest.approx(-0.037, abs=5e-3)
    repeated = await client.text(NUM, 4, repetition_penalty=2.0)
    assert " and so on.".startswith(repeated)
    assert await client.text(NUM, 4, repetition_penalty=2.0) == repeated  # after a cache hit


async def test_logit_bias_forces_and_bans(client):
    assert await client.text(NUM, 3, logit_bias={str(HELLO): 100}) == "HelloHelloHello"
    banned = await client.complete(NUM, 1, logit_bias={"216": -100}, return_token_ids=True)
    assert banned["choices"][0]["token_ids"] != NUM_IDS[:1]
    assert await client.text(NUM, 2, allowed_token_ids=[HELLO]) == "HelloHello"
    error = await client.post("/v1/completions", {"prompt": NUM, "logit_bias": {"999999": 1}}, 400)
    assert "999999" in error["error"]["message"]


async def test_min_tokens_puts_off_the_end(client):
    answer = await client.chat(CHAT, min_tokens=20, max_tokens=25)
    assert answer["usage"]["completion_tokens"] >= 20


async def test_logprobs_have_one_entry_per_delivered_token(client):
    whole = await client.chat(CHAT, logprobs=True, top_logprobs=2)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert len(entries) == 12
    assert "".join(e["token"] for e in entries[:11]) == CHAT_TEXT
    assert all(len(e["top_logprobs"]) == 2 for e in entries)
    assert all(e["logprob"] == max(t["logprob"] for t in e["top_logprobs"]) for e in entries)
    assert bytes(entries[0]["bytes"]).decode() == entries[0]["token"]
    body = {"messages": CHAT, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    events = await client.events("/v1/chat/completions", body)
    streamed = [
        e
        for ev in events[:-1]
        for c in ev["choices"]
        if c["logprobs"]
        for e in c["logprobs"]["content"]
    ]
    assert streamed == entries


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_text_offsets_point_at_the_text_of_their_tokens(client, stream, as_ids):
    """Characters of one token, of several, and two characters' bytes in turn."""
    prompt = "Hello 😀 wörld, 你好 👩‍👧, end"
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 0}
    body |= {"return_tokens_as_token_ids": as_ids, "return_token_ids": True}
    if stream:
        events = (await client.events("/v1/completions", body))[:-1]
        choices = [choice for event in events for choice in event["choices"]]
    else:
        choices = (await client.post("/v1/completions", body))["choices"]
    text = "".join(c["text"] for c in choices)
    offsets = [n for c in choices for n in c["logprobs"]["text_offset"]]
    ids = [*choices[0]["prompt_token_ids"], *(t for c in choices for t in c["token_ids"])]
    assert text.startswith(prompt) and len(ids) == len(offsets) > 20
    data, at = text.encode(), 0
    for token, offset in zip(ids, offsets, strict=True):
        assert offset == len(data[:at].decode(errors="ignore")), (token, at)
        at += len(client.engine.tokenizer.token_bytes(token))
    assert at == len(data)
    assert len(set(offsets)) < len(offsets), "no character has several tokens"


async def test_logprobs_without_alternatives_and_the_other_way_round(client):
    plain = await client.chat(CHAT, logprobs=True)
    assert all(e["top_logprobs"] == [] for e in plain["choices"][0]["logprobs"]["content"])
    body = {"messages": CHAT, "top_logprobs": 2}
    assert (await client.post("/v1/chat/completions", body, 400))["error"]["param"]
    body = {"messages": CHAT, "logprobs": True, "top_logprobs": 21}
    assert "21" in (await client.post("/v1/chat/completions", body, 400))["error"]["message"]


async def test_masked_tokens_leave_no_infinity_in_the_json(client):
    answer = await client.complete(
        NUM, 3, logprobs=5, top_k=1, logit_bias={"216": -100, "28": -100}, temperature=1.0
    )
    for top in answer["choices"][0]["logprobs"]["top_logprobs"]:
        assert all(-10000 <= p <= 0 for p in top.values())


async def test_echoed_prompt_is_scored_the_same_with_and_without_cached_blocks(client):
    async def scores(prompt):
        answer = await client.complete(prompt, 1, echo=True, logprobs=1)
        return answer["choices"][0]["logprobs"]

    cold = await scores(LONG)
    assert cold["token_logprobs"][0] is None
    assert len(cold["token_logprobs"]) == 403 + 1
    await client.text(LONG[: len(LONG) // 2] + " and then", 4)
    warm = await scores(LONG)
    assert warm["token_logprobs"][1:] == pytest.approx(cold["token_logprobs"][1:], abs=1e-4)
    assert warm["tokens"] == cold["tokens"] and "".join(warm["tokens"][:403]) == LONG


async def test_ranks_of_prompt_tokens_do_not_end_where_the_alternatives_do(client):
    """As many ranks are known as the alternatives asked for show, and all are the same."""

    async def ranks(top):
        answer = await client.complete(LONG[:200], 1, prompt_logprobs=top, return_token_ids=True)
        (choice,) = answer["choices"]
        tokens = choice["prompt_token_ids"]
        rows = choice["prompt_logprobs"]
        assert rows[0] is None
        for row in rows[1:]:
            assert sorted(entry["rank"] for entry in row.values())[:top] == [*range(1, top + 1)]
        return [row[str(token)]["rank"] for token, row in zip(tokens[1:], rows[1:], strict=True)]

    most, least = await ranks(20), await ranks(0)
    assert most == least and max(least) > 20


async def test_prompt_is_scored_without_generating_anything(client):
    answer = await client.complete(ALPHA, 0, echo=True, logprobs=0)
    assert answer["choices"][0]["text"] == ALPHA
    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 7
    assert answer["usage"]["completion_tokens"] == 0
