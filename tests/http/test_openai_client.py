"""The official client, unchanged, over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.http.conftest import Connect
from tests.http.fake_engine import FakeEngine, engine_fault, paused, said
from xylite.errors import Overloaded
from xylite.text_engine import TextEvent

MESSAGES: Any = [{"role": "user", "content": "x"}]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(names=("org/model",))


@pytest.fixture
async def client(connect: Connect, engine: FakeEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    served = await connect(engine, api_key=("key",), sse_keep_alive_interval=0.01)
    url = f"http://{served.host}:{served.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0) as api:
        yield api


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="org/model", messages=MESSAGES, n=2, logprobs=True, top_logprobs=2
    )
    assert [c.message.content for c in answer.choices] == ["Hi!", "Hi!"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage and answer.usage.completion_tokens == 6
    assert answer.usage.prompt_tokens_details
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.content and logprobs.content[0].top_logprobs[1].logprob == -1.5


async def test_chat_stream_with_keep_alives(client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    more = asyncio.Event()
    engine.script = lambda call: [more, *paused(said("Hi!"))]
    asyncio.get_running_loop().call_later(0.1, more.set)
    stream = await client.chat.completions.create(
        model="org/model",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hi!"
    assert chunks[-1].usage and chunks[-1].usage.total_tokens == 10


async def test_chat_stream_helper(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="org/model", messages=MESSAGES) as stream:
        async for _ in stream:
            pass
        answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == "Hi!"


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="org/model", prompt=["a", "b"], echo=True, logprobs=1, max_tokens=2
    )
    assert [c.text for c in answer.choices] == ["aHi", "bHi"]
    assert answer.choices[0].finish_reason == "length"
    stream = await client.completions.create(model="org/model", prompt="a", stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == "Hi!"


async def test_models(client: openai.AsyncOpenAI) -> None:
    listed = await client.models.list()
    assert [m.id for m in listed.data] == ["org/model"]
    assert (await client.models.retrieve("org/model")).owned_by == "xylite"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_errors_become_their_classes(client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        await create(model="org/model", messages=MESSAGES, temperature=5)
    assert bad.value.param == "temperature" and bad.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
    long: Any = [{"role": "user", "content": "x" * 5000}]
    with pytest.raises(openai.BadRequestError) as too_long:
        await create(model="org/model", messages=long)
    assert too_long.value.code == "context_length_exceeded"
    engine.script = lambda call: [TextEvent(index=0, finish_reason="error", error=engine_fault())]
    with pytest.raises(openai.InternalServerError):
        await create(model="org/model", messages=MESSAGES)


async def test_error_in_the_middle_is_an_api_error(
    client: openai.AsyncOpenAI, engine: FakeEngine
) -> None:
    engine.script = lambda call: [
        *paused(said("abc", finish=None)),
        TextEvent(index=0, finish_reason="error", error=engine_fault()),
    ]
    stream = await client.chat.completions.create(model="org/model", messages=MESSAGES, stream=True)
    text = ""
    with pytest.raises(openai.APIError, match="not finite"):
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == "abc"


async def test_full_queue_is_retried_after_the_time_we_name(
    client: openai.AsyncOpenAI, engine: FakeEngine
) -> None:
    engine.refuse = Overloaded("full", retry_after_s=0.02)
    asyncio.get_running_loop().call_later(0.005, lambda: setattr(engine, "refuse", None))
    answer = await client.with_options(max_retries=5).chat.completions.create(
        model="org/model", messages=MESSAGES
    )
    assert answer.choices[0].message.content == "Hi!"


async def test_client_that_closes_its_stream_stops_the_work(
    client: openai.AsyncOpenAI, engine: FakeEngine
) -> None:
    engine.script = lambda call: [*said("a", finish=None), asyncio.Event()]
    stream = await client.chat.completions.create(model="org/model", messages=MESSAGES, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    async with asyncio.timeout(5):
        await engine.until(lambda: engine.num_running == 0)
    assert engine.finished == {"abort": 1}


async def test_sync_client(connect: Connect) -> None:
    served = await connect()
    url = f"http://{served.host}:{served.port}/v1"

    def talk() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as api:
            answer = api.chat.completions.create(model="fake", messages=MESSAGES)
            stream = api.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
            text = "".join(c.choices[0].delta.content or "" for c in stream)
            assert [m.id for m in api.models.list()] == ["fake"]
            return answer.choices[0].message.content, text

    assert await asyncio.to_thread(talk) == ("Hi!", "Hi!")
