"""langchain-openai and litellm, unchanged."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.clients import close_openai_clients
from tests.http.conftest import Connect
from tests.http.fake_engine import FakeEngine, paused, said

# What these packages and theirs warn about is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
async def closing() -> AsyncIterator[None]:
    yield
    await close_openai_clients()


async def test_langchain(connect: Connect) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    engine = FakeEngine(lambda call: paused(said("Hi!", params=call.params)))
    served = await connect(engine, api_key=("key",))
    options: Any = {
        "base_url": f"http://{served.host}:{served.port}/v1",
        "api_key": "key",
        "model": "fake",
        "max_retries": 0,
    }
    chat = ChatOpenAI(**options, temperature=0.5, stream_usage=True)
    answer = await chat.ainvoke("x")
    assert answer.content == "Hi!"
    assert answer.usage_metadata and answer.usage_metadata["output_tokens"] == 3
    assert answer.response_metadata["finish_reason"] == "stop"
    chunks = [chunk async for chunk in chat.astream([("system", "s"), ("user", "x")])]
    assert "".join(str(chunk.content) for chunk in chunks) == "Hi!"
    assert sum(c.usage_metadata["total_tokens"] for c in chunks if c.usage_metadata) == 19
    assert engine.calls[0].params.temperature == 0.5
    scored = await chat.bind(logprobs=True, top_logprobs=2).ainvoke("x")
    assert len(scored.response_metadata["logprobs"]["content"]) == 3
    text = OpenAI(**options)
    assert await text.ainvoke("x") == "Hi!"
    assert [piece async for piece in text.astream("x")][:3] == ["H", "i", "!"]


async def test_litellm(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise it asks the network for a price list when it is imported.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    served = await connect(api_key=("key",))
    options: Any = {
        "api_base": f"http://{served.host}:{served.port}/v1",
        "api_key": "key",
        "messages": [{"role": "user", "content": "x"}],
        "max_retries": 0,
    }
    for provider in ("openai", "hosted_vllm"):
        model = f"{provider}/fake"
        answer: Any = await litellm.acompletion(model=model, **options)
        assert answer.choices[0].message.content == "Hi!"
        assert answer.usage.total_tokens == 10
        stream: Any = await litellm.acompletion(model=model, stream=True, **options)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == "Hi!"
    long = [{"role": "user", "content": "x" * 2000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        await litellm.acompletion(model="openai/fake", **{**options, "messages": long})
    with pytest.raises(litellm.AuthenticationError):
        await litellm.acompletion(model="openai/fake", **{**options, "api_key": "wrong"})
