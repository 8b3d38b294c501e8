"""Clients that people use, unchanged, against the real model: openai, LangChain, LiteLLM."""

import asyncio
import gc
import warnings
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from tests.clients import close_openai_clients
from tests.end_to_end.conftest import served
from tests.end_to_end.smollm2 import ALPHA, ALPHA_TEXT, CHAT, CHAT_TEXT, NUM, NUM_TEXT
from xylite.config import ServerConfig

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

KEY = "sesame"
QUESTION = CHAT[0]["content"]
TURNS: Any = CHAT


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(smollm2_dir):
    """A server with a key, for all tests here."""
    async with served(smollm2_dir, ServerConfig(api_key=(KEY,))) as made:
        yield made


@pytest.fixture
def url(client):
    """The server's base URL."""
    return f"http://127.0.0.1:{client.http.port}/v1"


@pytest_asyncio.fixture(loop_scope="module")
async def api(url):
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as made:
        yield made


# The official client


async def test_openai_chat(api):
    answer = await api.chat.completions.create(
        model="smollm2", messages=TURNS, temperature=0, logprobs=True, top_logprobs=2
    )
    (choice,) = answer.choices
    assert choice.message.content == CHAT_TEXT and choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (37, 12)
    entries = choice.logprobs.content
    assert "".join(e.token for e in entries[:-1]) == CHAT_TEXT
    assert all(e.logprob <= 0 and len(e.top_logprobs) == 2 for e in entries)


async def test_openai_chat_stream(api):
    stream = await api.chat.completions.create(
        model="smollm2",
        messages=TURNS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    choices = [c.choices[0] for c in chunks if c.choices]
    assert "".join(c.delta.content or "" for c in choices) == CHAT_TEXT
    assert [c.finish_reason for c in choices if c.finish_reason] == ["stop"]
    assert chunks[-1].usage.completion_tokens == 12
    async with api.chat.completions.stream(
        model="smollm2", messages=TURNS, temperature=0, logprobs=True
    ) as events:
        kinds = {event.type async for event in events}
        answer = await events.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert answer.choices[0].message.content == CHAT_TEXT
    assert len(answer.choices[0].logprobs.content) == 12


async def test_openai_completions(api):
    asked: Any = {"model": "smollm2", "temperature": 0, "max_tokens": 14}
    answer = await api.completions.create(prompt=[ALPHA, NUM], logprobs=1, **asked)
    assert answer.choices[0].text == ALPHA_TEXT and NUM_TEXT.startswith(answer.choices[1].text)
    assert answer.choices[0].finish_reason == "length"
    assert "".join(answer.choices[0].logprobs.tokens) == ALPHA_TEXT
    stream = await api.completions.create(prompt=ALPHA, stream=True, **asked)
    assert "".join([c.choices[0].text async for c in stream]) == ALPHA_TEXT
    stopped = await api.completions.create(prompt=ALPHA, stop=["KL"], **asked)
    assert stopped.choices[0].text == "DEFGHIJ"
    two = await api.chat.completions.create(
        model="smollm2", messages=TURNS, n=2, seed=3, max_completion_tokens=5
    )
    assert [c.index for c in two.choices] == [0, 1]


async def test_openai_models(api):
    assert [m.id async for m in await api.models.list()] == ["smollm2"]
    card = await api.models.retrieve("smollm2")
    assert card.owned_by == "xylite" and card.max_model_len == 8192
    with pytest.raises(openai.NotFoundError):
        await api.models.retrieve("nothing")


async def test_openai_errors(api, url):
    create = api.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        await create(model="smollm2", messages=TURNS, temperature=3)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="gpt-4o", messages=TURNS)
    assert missing.value.code == "model_not_found"
    long: Any = [{"role": "user", "content": "hello " * 9000}]
    with pytest.raises(openai.BadRequestError, match="8192") as too_long:
        await create(model="smollm2", messages=long)
    assert too_long.value.code == "context_length_exceeded"
    async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
    answer = await create(model="smollm2", messages=TURNS, temperature=0)
    assert answer.choices[0].message.content == CHAT_TEXT


async def test_openai_sync_client(url):
    def talk():
        with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as api:
            answer = api.chat.completions.create(model="smollm2", messages=TURNS, temperature=0)
            stream = api.chat.completions.create(
                model="smollm2", messages=TURNS, temperature=0, stream=True
            )
            streamed = "".join(c.choices[0].delta.content or "" for c in stream)
            text = api.completions.create(
                model="smollm2", prompt=ALPHA, temperature=0, max_tokens=14
            )
            pieces = api.completions.create(
                model="smollm2", prompt=ALPHA, temperature=0, max_tokens=14, stream=True
            )
            with pytest.raises(openai.BadRequestError):
                api.completions.create(model="smollm2", prompt="", max_tokens=14)
            return (
                answer.choices[0].message.content,
                streamed,
                text.choices[0].text,
                "".join(c.choices[0].text for c in pieces),
                [m.id for m in api.models.list()],
            )

    got = await asyncio.to_thread(talk)
    assert got == (CHAT_TEXT, CHAT_TEXT, ALPHA_TEXT, ALPHA_TEXT, ["smollm2"])


async def test_openai_client_that_closes_its_stream_stops_the_work(api, client):
    aborted = client.engine.snapshot()["finished"].get("abort", 0)
    stream = await api.chat.completions.create(
        model="smollm2",
        messages=TURNS,
        stream=True,
        max_tokens=4000,
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    async with asyncio.timeout(20):
        while client.engine.snapshot()["num_running"]:
            await asyncio.sleep(0.01)
    assert client.engine.snapshot()["finished"]["abort"] == aborted + 1


# LangChain


@pytest_asyncio.fixture(loop_scope="module")
async def langchain(url):
    """Options of LangChain's models; connections that it would leave open are closed."""
    async with httpx.AsyncClient() as asynchronous:
        with httpx.Client() as blocking:
            yield {
                "base_url": url,
                "api_key": KEY,
                "model": "smollm2",
                "temperature": 0,
                "max_retries": 0,
                "http_client": blocking,
                "http_async_client": asynchronous,
            }


async def test_langchain_chat(langchain):
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(**langchain, stream_usage=True)
    answer = await asyncio.to_thread(chat.invoke, QUESTION)
    assert answer.content == CHAT_TEXT
    assert answer.usage_metadata["input_tokens"] == 37
    assert answer.usage_metadata["output_tokens"] == 12
    assert answer.response_metadata["finish_reason"] == "stop"
    assert (await chat.ainvoke([("user", QUESTION)])).content == CHAT_TEXT
    chunks = await asyncio.to_thread(lambda: list(chat.stream(QUESTION)))
    assert "".join(c.content for c in chunks) == CHAT_TEXT
    assert sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata) == 12
    assert "".join([c.content async for c in chat.astream(QUESTION)]) == CHAT_TEXT
    scored = await chat.bind(logprobs=True, top_logprobs=1).ainvoke(QUESTION)
    assert len(scored.response_metadata["logprobs"]["content"]) == 12
    many = await chat.abatch([QUESTION] * 3)
    assert [m.content for m in many] == [CHAT_TEXT] * 3


async def test_langchain_text(langchain):
    from langchain_openai import OpenAI

    text = OpenAI(**langchain, max_tokens=14)
    assert await asyncio.to_thread(text.invoke, ALPHA) == ALPHA_TEXT
    assert await text.ainvoke(ALPHA) == ALPHA_TEXT
    assert "".join([piece async for piece in text.astream(ALPHA)]) == ALPHA_TEXT


# LiteLLM


@pytest_asyncio.fixture(loop_scope="module")
async def litellm(monkeypatch):
    # Otherwise it asks the network for a list of prices when it is imported.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm as package
    from litellm.llms.custom_httpx.async_client_cleanup import close_litellm_async_clients

    yield package
    await close_litellm_async_clients()
    await close_openai_clients()
    with warnings.catch_warnings():
        # LiteLLM drops some of its own sessions without closing them; none of ours are left here.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


# LiteLLM drops some of its own sessions without closing them.
@pytest.mark.filterwarnings("ignore:Unclosed:ResourceWarning")
async def test_litellm(url, litellm):
    options: Any = {"api_base": url, "api_key": KEY, "max_retries": 0, "temperature": 0}
    for provider in ("openai", "hosted_vllm"):
        asked = {"model": f"{provider}/smollm2", "messages": TURNS, **options}
        answer: Any = await asyncio.to_thread(lambda asked=asked: litellm.completion(**asked))
        assert answer.choices[0].message.content == CHAT_TEXT
        assert answer.usage.total_tokens == 37 + 12
        pieces = await asyncio.to_thread(
            lambda asked=asked: [
                c.choices[0].delta.content or "" for c in litellm.completion(stream=True, **asked)
            ]
        )
        assert "".join(pieces) == CHAT_TEXT
        stream: Any = await litellm.acompletion(stream=True, **asked)
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == CHAT_TEXT
    text: Any = await litellm.atext_completion(
        model="text-completion-openai/smollm2", prompt=ALPHA, max_tokens=14, **options
    )
    assert text.choices[0].text == ALPHA_TEXT
    with pytest.raises(litellm.BadRequestError):
        await litellm.acompletion(
            model="openai/smollm2", messages=TURNS, **{**options, "temperature": 3}
        )
    with pytest.raises(litellm.ContextWindowExceededError):
        long: Any = [{"role": "user", "content": "hello " * 9000}]
        await litellm.acompletion(model="openai/smollm2", messages=long, **options)
    with pytest.raises(litellm.AuthenticationError):
        await litellm.acompletion(
            model="openai/smollm2", messages=TURNS, **{**options, "api_key": "wrong"}
        )
