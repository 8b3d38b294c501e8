"""Servers with settings or checkpoints that made other servers fail."""

import asyncio
import json

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from safetensors.torch import load_file, save_file

from tests.end_to_end.conftest import Client, served
from tests.end_to_end.smollm2 import ALPHA, ALPHA_TEXT, CHAT, NUM, NUM_TEXT
from tests.end_to_end.variants import tiny, variant
from xylite.config import EngineConfig, ServerConfig
from xylite.errors import ConfigError, RequestError
from xylite.http import make_app
from xylite.runtime.request import SamplingParams
from xylite.text_engine import TextEngine

pytestmark = pytest.mark.model

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def tiny_dir(smollm2_dir, tmp_path_factory):
    return tiny(smollm2_dir, tmp_path_factory.mktemp("servers") / "tiny")


@pytest.fixture
def serving(tiny_dir):
    """serving(settings...) -> a server of a tiny model with random weights."""

    def start(server=None, **settings):
        return served(tiny_dir, server, load_format="dummy", **settings)

    return start


# Weights


async def test_tied_head_may_be_absent_or_present(smollm2_dir, tmp_path):
    tensors = load_file(smollm2_dir / "model.safetensors")
    assert "lm_head.weight" not in tensors
    present = variant(smollm2_dir, tmp_path / "present", without="model.safetensors")
    # Of a tied model the embedding counts, whatever a leftover head says.
    head = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file({**tensors, "lm_head.weight": head}, present / "model.safetensors")
    for model in (smollm2_dir, present):
        async with served(model) as client:
            assert await client.text(NUM, 8) == NUM_TEXT[:8]


async def test_untied_model_without_a_head_is_refused_by_the_tensors_name(smollm2_dir, tmp_path):
    model = variant(
        smollm2_dir, tmp_path / "untied", config=lambda c: {**c, "tie_word_embeddings": False}
    )
    with pytest.raises(ConfigError, match=r"untied: tensor 'lm_head\.weight' is missing"):
        async with served(model):
            pass


# Limits


async def test_context_that_the_kv_cache_cannot_hold_stops_the_start(serving):
    small = {"kv_cache_memory_bytes": None, "num_blocks": 4}
    with pytest.raises(ConfigError, match="max_model_len is 8192.*256 tokens.*at most 256"):
        async with serving(max_model_len=8192, **small):
            pass
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes is 5.*one block"):
        async with serving(kv_cache_memory_bytes=5):
            pass
    async with serving(max_model_len=200, **small) as client:
        (card,) = (await client.get("/v1/models"))["data"]
        assert card["max_model_len"] == 200
        for prompt, max_tokens in (([5] * 300, 1), ([5] * 200, 1), ([5] * 150, 51)):
            body = {"prompt": prompt, "max_tokens": max_tokens}
            error = (await client.post(COMPLETIONS, body, 400))["error"]
            assert error["code"] == "context_length_exceeded" and "200" in error["message"]
        # Without max_tokens an answer may be as long as the context has room, if there is any.
        for num in (190, 1000):
            body = {"messages": [{"role": "user", "content": "hello " * num}], "ignore_eos": True}
            error = (await client.post(CHATS, body, 400))["error"]
            assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
        body["messages"] = [{"role": "user", "content": "hello " * 90}]
        assert (await client.post(CHATS, body))["usage"]["total_tokens"] == 200
        full = await client.complete([5] * 150, 50, ignore_eos=True)
        assert full["usage"]["total_tokens"] == 200
        # One sequence fits, two at once do not: the second waits for the first.
        both = await client.complete([[5] * 150, [6] * 150], 50, ignore_eos=True)
        assert both["usage"]["total_tokens"] == 400


@pytest.mark.parametrize("own", [{}, {"max_new_tokens": 30}], ids=["plain", "generation_config"])
async def test_only_a_length_that_the_request_names_is_refused(serving, own):
    given = own.get("max_new_tokens")
    async with serving(max_model_len=200, override_generation_config=own) as client:
        completion = {"prompt": [5] * 195, "ignore_eos": True}
        # "hello" is a token and 30 are the template's.
        chat = {"messages": [{"role": "user", "content": "hello " * 165}], "ignore_eos": True}
        for path, body in ((COMPLETIONS, completion), (CHATS, chat)):
            usage = (await client.post(path, body))["usage"]
            assert usage["total_tokens"] == 200 and usage["completion_tokens"] > 0
            events = await client.events(path, {**body, "stream_options": {"include_usage": True}})
            totals = ("prompt_tokens", "completion_tokens", "total_tokens")
            assert all(events[-2]["usage"][name] == usage[name] for name in totals)
            for name in ("max_tokens", *(["max_completion_tokens"] if path is CHATS else [])):
                error = (await client.post(path, {**body, name: 16 + 30}, 400))["error"]
                assert error["code"] == "context_length_exceeded" and error["param"] == name
        # With room the default counts in full.
        short = {"prompt": [5] * 100, "ignore_eos": True}
        usage = (await client.post(COMPLETIONS, short))["usage"]
        assert usage["completion_tokens"] == (given or 16)
        short = {"messages": CHAT, "ignore_eos": True}
        usage = (await client.post(CHATS, short))["usage"]
        assert usage["completion_tokens"] == (given or 200 - usage["prompt_tokens"])
        # The library's callers bring their defaults themselves.
        for params, num in (
            (SamplingParams(default_max_tokens=16, ignore_eos=True), 5),
            (SamplingParams(default_max_tokens=3, ignore_eos=True), 3),
            (SamplingParams(ignore_eos=True), 5),
        ):
            events = [e async for e in client.engine.generate([5] * 195, params)]
            assert events[-1].num_output == num and events[-1].finish_reason == "length"
        with pytest.raises(RequestError, match="requested 201 tokens"):
            await client.engine.submit([5] * 195, SamplingParams(max_tokens=6))


async def test_prompt_is_never_cut_in_silence(serving):
    async with serving() as client:
        (card,) = (await client.get("/v1/models"))["data"]
        assert card["max_model_len"] == 8192
        prompt = [100 + i % 1000 for i in range(5000)]
        whole = await client.complete(prompt, 1, return_token_ids=True)
        assert whole["usage"]["prompt_tokens"] == 5000
        assert whole["choices"][0]["prompt_token_ids"] == prompt
        for side, kept in (("left", prompt[-10:]), ("right", prompt[:10])):
            cut = await client.complete(
                prompt, 1, return_token_ids=True, truncate_prompt_tokens=10, truncation_side=side
            )
            assert cut["usage"]["prompt_tokens"] == 10
            assert cut["choices"][0]["prompt_token_ids"] == kept


# Names


async def test_every_served_name_is_echoed_and_listed_and_the_path_is_not_told(serving, tiny_dir):
    names = ("main/name", "alias")
    async with serving(served_model_name=names) as client:
        for asked, echoed in ((None, names[0]), (names[0], names[0]), (names[1], names[1])):
            for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHATS, {"messages": CHAT})):
                body = {**body, "model": asked, "max_tokens": 1}
                assert (await client.post(path, body))["model"] == echoed
                events = await client.events(path, body)
                assert {e["model"] for e in events[:-1]} == {echoed}
        for unknown in (str(tiny_dir), tiny_dir.name, "name", "main/name/", "other"):
            error = (await client.post(CHATS, {"messages": CHAT, "model": unknown}, 404))["error"]
            assert error["code"] == "model_not_found" and error["param"] == "model"
            assert (await client.get(f"/v1/models/{unknown}", 404))["error"]
        listed = await client.get("/v1/models")
        assert tuple(card["id"] for card in listed["data"]) == names
        for name in names:
            assert (await client.get(f"/v1/models/{name}"))["id"] == name
        assert str(tiny_dir.parent) not in json.dumps(listed)
        async with client.http.get("/metrics") as response:
            assert str(tiny_dir.parent) not in await response.text()


# Keys


async def test_key_covers_every_route_that_computes_or_tells(serving):
    async with serving(ServerConfig(api_key=("sesame", "other"))) as client:
        routes = {
            (route.method, route.resource.canonical)
            for route in client.http.server.app.router.routes()
        }
        assert len(routes) > 10
        opened = set()
        for method, path in routes:
            async with client.http.request(method, path.replace("{id}", "tiny")) as response:
                if response.status != 401:
                    opened.add(path)
                elif method != "HEAD":
                    error = (await response.json())["error"]
                    assert error["code"] == "invalid_api_key"
        assert opened == {"/health", "/ready", "/metrics"}
        body = {"prompt": "x", "max_tokens": 1}
        used = client.engine.snapshot()["prompt_tokens"]
        for headers, status in (
            ({"Authorization": "Bearer sesame"}, 200),
            ({"Authorization": "bearer sesame"}, 200),
            ({"Authorization": "Bearer other"}, 200),
            ({"x-api-key": "sesame"}, 200),
            ({"Authorization": "Bearer x"}, 401),
            ({"Authorization": "Bearer sesame2"}, 401),
            ({"Authorization": "Bearer sesam"}, 401),
            ({"Authorization": "Bearer"}, 401),
            ({"Authorization": "sesame"}, 401),
            ({"Authorization": "Basic sesame"}, 401),
            ({}, 401),
        ):
            await client.post(COMPLETIONS, body, status, headers=headers)
        assert client.engine.snapshot()["prompt_tokens"] == used + 4
        for path in ("//v1/completions", "/v1//completions", "/V1/completions", "/v2/embed"):
            url = f"http://{client.http.host}:{client.http.port}{path}"
            async with client.http.session.post(url, json=body) as response:
                assert response.status == 401


# Two engines


async def test_two_engines_in_one_application_do_not_mix(smollm2_dir, tiny_dir):
    def config(model, **settings):
        small = {"kv_cache_memory_bytes": 50 * 2**20, "max_num_batched_tokens": 64}
        return EngineConfig(model=str(model), dtype="float32", **small, **settings)

    app = web.Application()
    async with (
        TextEngine(config(smollm2_dir)) as one,
        TextEngine(config(tiny_dir, load_format="dummy", seed=3)) as two,
    ):
        app.add_subapp("/one", make_app(one))
        app.add_subapp("/two", make_app(two))
        async with TestClient(TestServer(app, host="127.0.0.1")) as http:

            async def text(place, prompt, n):
                body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True}
                async with http.post(f"/{place}{COMPLETIONS}", json=body) as response:
                    assert response.status == 200
                    return (await response.json())["choices"][0]["text"]

            alone = [await text("two", p, 14) for p in (ALPHA, NUM)]
            crowd = await asyncio.gather(
                *(text(place, p, 14) for place in ("one", "two") for p in (ALPHA, NUM))
            )
            assert crowd[0] == ALPHA_TEXT and NUM_TEXT.startswith(crowd[1])
            assert crowd[2:] == alone and not set(alone) & set(crowd[:2])
            clients = [Client(http, engine) for engine in (one, two)]
            for client, place, num in zip(clients, ("one", "two"), (2, 4), strict=True):
                (card,) = (await client.get(f"/{place}/v1/models"))["data"]
                assert card["id"] == client.engine.model_names[0]
                now = client.engine.snapshot()
                assert now["finished"] == {"length": num}
                assert now["num_free_blocks"] == now["num_blocks"]
            error = {"prompt": "x", "model": "tiny"}
            await clients[0].post(f"/one{COMPLETIONS}", error, 404)
        assert one.state == two.state == "ready"
