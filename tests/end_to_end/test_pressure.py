"""The real model under pressure: any chunking, small pools, full queues, clients that leave."""

import asyncio
import ctypes
import gc
import json
import random
import weakref
from pathlib import Path

import aiohttp
import psutil
import pytest

from bench.host import write_small_model
from tests.end_to_end.conftest import served
from tests.end_to_end.smollm2 import (
    ALPHA,
    ALPHA_TEXT,
    CHAT,
    CHAT_TEXT,
    LONG,
    LONG_TEXT,
    NUM,
    NUM_TEXT,
    NUMLONG,
    NUMLONG_TEXT,
)
from xylite.runtime import task_table
from xylite.runtime.request import SamplingParams

pytestmark = pytest.mark.model

REFERENCE = json.loads(
    (Path(__file__).parents[1] / "data" / "models" / "smollm2_greedy.json").read_text()
)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=len(REFERENCE[0]["ids"]))


async def ids_of(engine, prompt, params=GREEDY):
    return [t async for event in engine.generate(prompt, params) for t in event.token_ids]


@pytest.mark.parametrize("budget", [1, 7, 64, 1000])
@pytest.mark.parametrize("reuse", [True, False])
async def test_greedy_ids_are_the_references_in_any_chunks(smollm2_dir, budget, reuse):
    settings = {"max_num_batched_tokens": budget, "enable_prefix_caching": reuse}
    prompts = REFERENCE if budget > 1 else REFERENCE[:2]
    async with served(smollm2_dir, **settings) as client:
        neighbours = [
            asyncio.ensure_future(
                ids_of(
                    client.engine,
                    [100 + 31 * i + k for k in range(5 + 9 * i)],
                    SamplingParams(temperature=1.0, seed=i, max_tokens=20, ignore_eos=True),
                )
            )
            for i in range(16 if budget > 1 else 2)
        ]
        answers = await asyncio.gather(*(ids_of(client.engine, r["prompt_ids"]) for r in prompts))
        await asyncio.gather(*neighbours)
        assert answers == [r["ids"] for r in prompts]
        if budget > 7:
            again = await asyncio.gather(*(ids_of(client.engine, r["prompt_ids"]) for r in prompts))
            assert again == answers
            assert (client.engine.snapshot()["prefix_hits"] > 0) == reuse


async def test_chunks_of_any_size_beside_a_decode_say_the_same(smollm2_dir):
    for budget in (2, 16, 63, 64, 402, 403):
        async with served(smollm2_dir, max_num_batched_tokens=budget) as client:
            if budget == 2:
                assert await client.text(ALPHA, 14) == ALPHA_TEXT
                continue
            beside = asyncio.ensure_future(client.text(NUM, 20))
            assert await client.text(LONG, 16) == LONG_TEXT
            assert await beside == NUM_TEXT


async def test_those_who_attend_to_a_prefix_together_say_what_they_say_alone(
    smollm2_dir, monkeypatch
):
    system = [100 + 37 * k % 4000 for k in range(600)]
    prompts = [[*system, *range(200 + i, 200 + 5 * i)] for i in range(1, 6)] + [system] * 3
    sampled = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=12, ignore_eos=True)
        for i in range(len(prompts))
    ]
    built, num_shared = task_table.build, [0]

    def counted(*args, **kwargs):
        table = built(*args, **kwargs)
        num_shared[0] += int(table.parts[2])
        return table

    monkeypatch.setattr(task_table, "build", counted)
    asked = list(zip(prompts, sampled, strict=True))
    async with served(smollm2_dir, enable_prefix_caching=False) as client:
        alone = [await ids_of(client.engine, p, params) for p, params in asked]
        assert num_shared == [0]
    async with served(smollm2_dir) as client:
        together = await asyncio.gather(*(ids_of(client.engine, p, params) for p, params in asked))
        assert together == alone
        assert num_shared[0] > 0


async def test_preempted_requests_say_what_they_say_alone(smollm2_dir):
    prompts = [f"{i}. " + LONG[: 45 * 8] for i in range(4)]
    bodies = [
        {"temperature": 0} if i % 2 else {"temperature": 1.0, "seed": i, "presence_penalty": 0.5}
        for i in range(4)
    ]

    async def answers(client):
        asked = zip(prompts, bodies, strict=True)
        return await asyncio.gather(
            *(client.text(p, 130, ignore_eos=True, **body) for p, body in asked)
        )

    name = 'vllm:num_preemptions_total{engine="0",model_name="smollm2"}'
    async with served(smollm2_dir) as client:
        undisturbed = await answers(client)
        assert (await client.metrics())[name] == 0
    async with served(smollm2_dir, kv_cache_memory_bytes=None, num_blocks=9) as client:
        assert await answers(client) == undisturbed
        assert (await client.metrics())[name] > 0


async def test_small_pool_limits_the_context_and_says_so(smollm2_dir):
    async with served(smollm2_dir, kv_cache_memory_bytes=None, num_blocks=4) as client:
        (card,) = (await client.get("/v1/models"))["data"]
        assert card["max_model_len"] == 256
        error = await client.post("/v1/completions", {"prompt": LONG, "max_tokens": 5}, 400)
        assert error["error"]["code"] == "context_length_exceeded"
        assert "256" in error["error"]["message"]
        assert await client.text(NUM, 20) == NUM_TEXT


async def test_prompt_beyond_the_context_is_refused_at_once_and_others_live(smollm2_dir):
    async with served(smollm2_dir) as client:
        (card,) = (await client.get("/v1/models"))["data"]
        assert card["max_model_len"] == 8192
        for prompt in (" hello" * 9000, "a" * 900_000, [5] * 8193):
            error = await client.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}, 400)
            assert error["error"]["code"] == "context_length_exceeded"
            assert "maximum context length" in error["error"]["message"]
            assert "8192" in error["error"]["message"]
        assert await client.text(NUM, 20) == NUM_TEXT


async def test_more_than_the_queue_holds_is_refused_at_once(smollm2_dir):
    async with served(smollm2_dir, max_num_seqs=1, max_num_queued_reqs=1) as client:

        async def ask():
            body = {"prompt": NUM, "max_tokens": 20, "temperature": 0}
            async with client.http.post("/v1/completions", json=body) as response:
                return response.status, response.headers, await response.json()

        answers = await asyncio.gather(*(ask() for _ in range(10)))
        statuses = sorted(status for status, _, _ in answers)
        assert statuses == [200] * 2 + [503] * 8
        for status, headers, body in answers:
            if status == 503:
                assert 1 <= int(headers["Retry-After"]) <= 60
                assert body["error"]["code"] == "queue_full"
            else:
                assert body["choices"][0]["text"] == NUM_TEXT
        assert await client.text(NUM, 20) == NUM_TEXT
        rejected = [v for k, v in (await client.metrics()).items() if "rejections" in k]
        assert sum(rejected) == 8


async def test_client_that_leaves_stops_its_work_in_every_state(smollm2_dir):
    async with served(smollm2_dir, max_num_seqs=2) as client:
        endless = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0}
        sibling = asyncio.ensure_future(client.text(ALPHA, 14))

        async def leave(body, after_first_byte):
            async with client.http.post("/v1/completions", json={**endless, **body}) as response:
                if after_first_byte:
                    await response.content.readline()

        running = asyncio.ensure_future(leave({"prompt": NUM}, False))
        queued = [asyncio.ensure_future(leave({"prompt": LONG}, False)) for _ in range(3)]
        await leave({"prompt": NUM, "stream": True}, True)
        while client.engine.snapshot()["num_waiting"] == 0 and not running.done():
            await asyncio.sleep(0.01)
        for task in (running, *queued):
            task.cancel()
        async with asyncio.timeout(20):
            while (now := client.engine.snapshot())["num_running"] + now["num_waiting"] > 1:
                await asyncio.sleep(0.01)
            assert await sibling == ALPHA_TEXT
            while (now := client.engine.snapshot())["num_free_blocks"] < now["num_blocks"]:
                await asyncio.sleep(0.01)
        assert now["finished"]["abort"] >= 4


async def test_long_prefill_does_not_stop_a_stream(smollm2_dir):
    async with served(smollm2_dir, max_num_batched_tokens=64) as client:
        long = asyncio.ensure_future(client.complete([7] * 1500, 1))
        body = {"prompt": NUM, "max_tokens": 20, "temperature": 0}
        events = await client.events("/v1/completions", body)
        assert "".join(c["text"] for e in events[:-1] for c in e["choices"]) == NUM_TEXT
        assert not long.done(), "the stream ended while the long prompt was still computed"
        await long


async def test_metrics_add_up_to_what_clients_got(smollm2_dir):
    async with served(smollm2_dir) as client:
        before = await client.metrics()
        usages = [
            (await client.complete(ALPHA, 14, stop=["KL"]))["usage"],
            (await client.complete(ALPHA, 14))["usage"],
            (await client.chat(CHAT))["usage"],
            (await client.chat(CHAT, n=2, temperature=1.0, max_tokens=9))["usage"],
        ]
        await client.post("/v1/completions", {"prompt": "", "max_tokens": 3}, 400)
        async with client.http.post(
            "/v1/completions",
            json={"prompt": NUM, "max_tokens": 4000, "ignore_eos": True, "stream": True},
        ) as response:
            await response.content.readline()
        async with asyncio.timeout(10):
            while client.engine.snapshot()["num_running"]:
                await asyncio.sleep(0.01)
        now = client.engine.snapshot()
        after = await client.metrics()

        def grown(name):
            return sum(v - before.get(k, 0) for k, v in after.items() if k.startswith(name))

        finished = now["finished"]
        assert sum(finished.values()) == 5 and finished["abort"] == 1
        assert grown("vllm:request_success_total") == 5
        assert grown("vllm:time_to_first_token_seconds_count") == 5
        counted = grown("vllm:generation_tokens_total")
        assert counted == now["generation_tokens"]
        aborted = counted - sum(u["completion_tokens"] for u in usages)
        assert 1 <= aborted < 100
        assert grown("vllm:num_requests_running") == grown("vllm:num_requests_waiting") == 0


def memory_in_use():
    """Bytes that are allocated; resident ones would count what the allocator keeps for later, which
    depends on the order in which threads happen to free the logits of iterations, 12 MB or more."""
    gc.collect()
    if not hasattr(libc := ctypes.CDLL(None), "mallinfo2"):
        return psutil.Process().memory_info().rss
    libc.mallinfo2.restype = _MallInfo
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


class _MallInfo(ctypes.Structure):
    """What glibc's mallinfo2 returns, of all arenas together."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),  # hblkhd: bytes in mappings
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),  # uordblks: others in use
        )
    ]


async def test_two_hundred_streams_cut_at_random_ten_times_over_leave_nothing_behind(tmp_path):
    write_small_model(tmp_path)
    rng = random.Random(1)
    memory = []
    # A pool that the first rounds fill, since its memory is given as it is used.
    pool = {"kv_cache_memory_bytes": 64 * 2**20}
    async with (
        served(tmp_path, max_num_seqs=200, load_format="dummy", **pool) as client,
        # aiohttp's test client keeps every response.
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        url = client.http.make_url("/v1/completions")

        async def stream(i, patience):
            body = {
                "prompt": [50 + i % 5] * rng.randint(1, 12),
                "max_tokens": 6,
                "stream": True,
                "ignore_eos": True,
                "seed": i,
            }
            async with session.post(url, json=body) as response:
                assert response.status == 200
                lines = 0
                async for line in response.content:
                    assert b'"error"' not in line
                    lines += line.startswith(b"data:")
                    if patience is not None and lines > patience:
                        return None
                return lines

        for _ in range(10):
            plan = [rng.randint(0, 5) if i < 50 else None for i in range(200)]
            rng.shuffle(plan)
            got = await asyncio.gather(*(stream(i, p) for i, p in enumerate(plan)))
            assert sum(lines is not None for lines in got) == 150
            async with asyncio.timeout(30):
                while (now := client.engine.snapshot())["num_running"] + now["num_waiting"]:
                    await asyncio.sleep(0.01)
            memory.append(memory_in_use())
        assert now["num_free_blocks"] == now["num_blocks"]
        assert set(now["finished"]) <= {"length", "abort"}
        assert sum(now["finished"].values()) == 2000
    # The first rounds meet new sizes of passes, which are recorded.
    assert memory[-1] - memory[2] < 4 * 2**20, memory


async def test_engine_that_was_left_holds_no_weights_and_no_kv(tmp_path):
    write_small_model(tmp_path)
    gc.disable()  # the memory must not wait for a collection
    try:
        async with served(tmp_path, load_format="dummy") as client:
            await client.text([5, 6, 7], 3)
            executor = weakref.ref(client.engine._engine._runner)
            assert executor() is not None
        assert executor() is None
        assert client.engine.state == "closed"
    finally:
        gc.enable()


async def test_numbers_after_a_long_prompt_go_on(smollm2_dir):
    async with served(smollm2_dir, block_size=64) as client:
        assert await client.text(NUMLONG, 24) == NUMLONG_TEXT
        assert await client.text(NUMLONG, 24) == NUMLONG_TEXT
        answer = await client.chat(CHAT)
        assert answer["choices"][0]["message"]["content"] == CHAT_TEXT
