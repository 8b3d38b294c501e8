"""Answers that are long to write down are written in slices, between which others are served."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.http.conftest import Connect
from tests.http.fake_engine import Call, FakeEngine, Item
from tests.http.wire import CHAT, TEXT, USER
from xylite.http.logprobs import SLICE
from xylite.http.token_text import DECODE_INLINE, STRINGS_PER_TURN
from xylite.text_engine import TextEvent, TextLogprob

NUM_TOKENS, K = 300, 20


class Turns:
    """Counts the turns of the event loop, and the log-probabilities that are read in each."""

    def __init__(self) -> None:
        self.number = 0
        self.read = Counter[int]()

    @contextmanager
    def counting(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def tick() -> None:
            nonlocal handle
            self.number += 1
            handle = loop.call_soon(tick)

        handle = loop.call_soon(tick)
        try:
            yield
        finally:
            handle.cancel()


class Tops(tuple[TextLogprob, ...]):
    """Alternatives that note when they are gone through."""

    turns: Turns

    def __iter__(self) -> Iterator[TextLogprob]:
        self.turns.read[self.turns.number] += 1 + len(self)
        return super().__iter__()


def scores(turns: Turns, num: int = NUM_TOKENS, k: int = K) -> tuple[TextLogprob, ...]:
    found: list[TextLogprob] = []
    for i in range(num):
        tops = Tops(TextLogprob(f"t{i}.{j}", j, -1.0 - j, b"t") for j in range(k))
        tops.turns = turns
        found.append(TextLogprob(chr(97 + i % 26), i, -0.5, b"x", tops))
    return tuple(found)


def long_engine(turns: Turns) -> FakeEngine:
    def script(call: Call) -> list[Item]:
        p = call.params
        return [
            TextEvent(
                index=i,
                text="x" * NUM_TOKENS,
                token_ids=tuple(range(NUM_TOKENS)),
                logprobs=None if p.logprobs is None else scores(turns),
                prompt_logprobs=(
                    (None, *scores(turns)) if p.prompt_logprobs is not None and not i else None
                ),
                finish_reason="stop",
                num_output=NUM_TOKENS,
            )
            for i in range(p.n)
        ]

    return FakeEngine(script)


LONG: dict[str, tuple[str, dict[str, Any], int]] = {
    "chat logprobs": (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": K}, 1),
    "chat prompt_logprobs": (CHAT, {"messages": USER, "prompt_logprobs": K}, 1),
    "text logprobs": (TEXT, {"prompt": "a", "logprobs": K}, 1),
    "text prompt_logprobs": (TEXT, {"prompt": "a", "prompt_logprobs": K}, 1),
    "text echo": (TEXT, {"prompt": "a", "logprobs": K, "echo": True}, 2),
    "n": (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": K, "n": 3}, 3),
    "stream": (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": K, "stream": True}, 1),
    "streamed echo": (TEXT, {"prompt": "a", "logprobs": K, "echo": True, "stream": True}, 2),
}


@pytest.mark.parametrize("name", LONG)
async def test_no_turn_of_the_loop_writes_more_than_a_slice(connect: Connect, name: str) -> None:
    path, body, num_lists = LONG[name]
    turns = Turns()
    client = await connect(long_engine(turns))
    with turns.counting():
        answers = await asyncio.gather(*(client.post(path, json=body) for _ in range(3)))
        for answer in answers:
            await answer.read()
    assert [answer.status for answer in answers] == [200] * 3
    assert sum(turns.read.values()) == 3 * num_lists * NUM_TOKENS * (1 + K)
    # Whole entries only, of any of the three requests.
    assert max(turns.read.values()) <= SLICE
    assert len(turns.read) >= 3 * num_lists * NUM_TOKENS * (1 + K) / SLICE


async def test_slices_join_to_one_list_without_a_seam(connect: Connect) -> None:
    turns = Turns()
    client = await connect(long_engine(turns))
    expected = scores(turns)
    body = {"messages": USER, "logprobs": True, "top_logprobs": K, "prompt_logprobs": K}
    answer = json.loads(await (await client.post(CHAT, json=body)).text())
    content = answer["choices"][0]["logprobs"]["content"]
    assert [e["token"] for e in content] == [e.token for e in expected]
    for entry, source in zip(content, expected, strict=True):
        assert [t["token"] for t in entry["top_logprobs"]] == [t.token for t in source.top]
    rows = answer["prompt_logprobs"]
    assert rows[0] is None and len(rows) == 1 + NUM_TOKENS
    for row, source in zip(rows[1:], expected, strict=True):
        assert list(row) == [
            str(source.token_id),
            *(str(j) for j in range(K) if j != source.token_id),
        ]
    body = {"prompt": "a", "logprobs": K, "echo": True}
    answer = json.loads(await (await client.post(TEXT, json=body)).text())
    found = answer["choices"][0]["logprobs"]
    assert found["tokens"] == ["a"] + 2 * [e.token for e in expected]
    assert found["token_logprobs"] == [None] + [-0.5] * (2 * NUM_TOKENS)
    assert found["text_offset"] == list(range(1 + 2 * NUM_TOKENS))
    assert [tops and len(tops) for tops in found["top_logprobs"]] == [None] + [1 + K] * (
        2 * NUM_TOKENS
    )


class Spelling(FakeEngine):
    """Notes in which turn each token was spelt, and in which thread token ids were decoded."""

    def __init__(self, turns: Turns) -> None:
        super().__init__(max_model_len=10_000)
        self.turns = turns
        self.decoded: list[tuple[int, bool]] = []

    def token_text(self, token_id: int) -> str:
        self.turns.read[self.turns.number] += 1
        return super().token_text(token_id)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        is_main = threading.current_thread() is threading.main_thread()
        self.decoded.append((len(ids), is_main))
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("num", [1, STRINGS_PER_TURN, 5 * STRINGS_PER_TURN + 1])
async def test_no_turn_of_the_loop_spells_more_than_a_slice_of_tokens(
    connect: Connect, num: int
) -> None:
    turns = Turns()
    client = await connect(Spelling(turns))
    text = "".join(chr(97 + i % 26) for i in range(num))
    body = {"prompt": text, "return_token_strs": True}
    with turns.counting():
        answers = await asyncio.gather(*(client.post("/tokenize", json=body) for _ in range(3)))
        assert [(await answer.json())["token_strs"] for answer in answers] == [list(text)] * 3
    assert sum(turns.read.values()) == 3 * num
    assert max(turns.read.values()) <= STRINGS_PER_TURN


async def test_no_tokens_are_no_strings(connect: Connect) -> None:
    client = await connect(Spelling(Turns()))
    answer = await client.post("/tokenize", json={"prompt": "", "return_token_strs": True})
    assert (await answer.json())["token_strs"] == []


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("num", "is_main"), [(DECODE_INLINE, True), (DECODE_INLINE + 1, False)])
async def test_a_long_prompt_of_ids_is_echoed_from_a_thread_and_decoded_once(
    connect: Connect, num: int, is_main: bool, streamed: bool
) -> None:
    engine = Spelling(Turns())
    client = await connect(engine)
    body = {"prompt": [97] * num, "echo": True, "n": 3, "stream": streamed, "max_tokens": 1}
    answer = await (await client.post(TEXT, json=body)).text()
    assert answer.count("a" * num) == 3
    assert engine.decoded == [(num, is_main)]
