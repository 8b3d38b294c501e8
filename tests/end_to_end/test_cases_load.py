"""Many requests at once: nothing leaks from one to another, nothing is kept, nobody starves."""

import asyncio
import contextlib
import itertools
import json
import random
from collections import Counter

import pytest

from tests.end_to_end.conftest import served
from tests.end_to_end.smollm2 import (
    ALPHA,
    ALPHA_TEXT,
    CHAT,
    CHAT_TEXT,
    CJK,
    CJK_TEXT,
    LONG,
    LONG_TEXT,
    NUM,
    NUM_TEXT,
    NUMLONG,
    NUMLONG_TEXT,
)
from tests.end_to_end.variants import tiny
from xylite.runtime.request import SamplingParams

pytestmark = pytest.mark.model

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}


@pytest.fixture(scope="module")
def tiny_dir(smollm2_dir, tmp_path_factory):
    return tiny(smollm2_dir, tmp_path_factory.mktemp("load") / "tiny")


@pytest.fixture
def serving(tiny_dir):
    """serving(settings...) -> a server of a tiny model with random weights."""

    def start(**settings):
        return served(tiny_dir, load_format="dummy", **settings)

    return start


@pytest.fixture
def always_drafting(monkeypatch):
    """Drafts as long as the settings allow, whether or not they pay on this machine."""

    def lengths(self, sequences, num_unknown=0):
        return [
            max(min(self._proposer.expects(s), s.max_len - len(s.tokens) - 1, self.max_draft), 0)
            for s in sequences
        ]

    monkeypatch.setattr("xylite.runtime.speculation.Speculation._lengths", lengths)


async def idle(client):
    """The engine's counters once nothing runs any more and the last iteration has ended."""
    now = client.engine.snapshot()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(30):
            while now["num_running"] + now["num_waiting"] or is_short_of_blocks(now):
                await asyncio.sleep(0.01)
                now = client.engine.snapshot()
    assert now["num_running"] == now["num_waiting"] == 0
    assert not is_short_of_blocks(now), "blocks were lost"
    return now


def is_short_of_blocks(now):
    return now["num_free_blocks"] < now["num_blocks"]


# Speculation: the same answers, ends and counts


async def test_drafts_change_neither_text_nor_end_nor_counts(smollm2_dir, always_drafting):
    def asked():
        for n in range(1, 11):
            yield NUM, {"max_tokens": n, "logprobs": 1}
        for n in (7, 9, 10):
            yield NUM, {"max_tokens": n, "logprobs": 1, "stop": [", 10"]}
        yield NUM, {"max_tokens": 20, "stop_token_ids": [32]}
        yield NUM, {"max_tokens": 12, "logit_bias": {"216": -100}}
        yield NUM, {"max_tokens": 12, "temperature": 1.0, "seed": 5, "presence_penalty": 1.0}

    async def answers(client):
        whole = await asyncio.gather(
            *(
                client.complete(prompt, return_token_ids=True, stream=False, **body)
                for prompt, body in asked()
            )
        )
        return [
            (
                {k: v for k, v in a["choices"][0].items() if k != "logprobs"},
                a["usage"]["completion_tokens"],
            )
            for a in whole
        ], [a["choices"][0]["logprobs"] for a in whole]

    async with served(smollm2_dir) as client:
        plain, scores = await answers(client)
    async with served(smollm2_dir, speculative_config=NGRAM) as client:
        drafted, drafted_scores = await answers(client)
        assert drafted == plain
        for one, other in zip(scores, drafted_scores, strict=True):
            if one is not None:
                assert one["tokens"] == other["tokens"]
                assert one["token_logprobs"] == pytest.approx(other["token_logprobs"], abs=1e-4)
        stopped = [c for c, _ in drafted[10:13]]
        assert [c["finish_reason"] for c in stopped] == ["length", "stop", "stop"]
        assert [c["text"] for c in stopped] == [" 8, 9, ", " 8, 9", " 8, 9"]
        assert [n for _, n in drafted[10:13]] == [7, 9, 9]
        texts = await asyncio.gather(
            client.text(ALPHA, 14), client.text(CJK, 20), client.text(LONG, 16),
            client.text(NUMLONG, 24), client.text(NUM, 20),
        )  # fmt: skip
        assert texts == [ALPHA_TEXT, CJK_TEXT, LONG_TEXT, NUMLONG_TEXT, NUM_TEXT]
        answer = await client.chat(CHAT)
        assert answer["choices"][0]["message"]["content"] == CHAT_TEXT
        assert answer["usage"]["completion_tokens"] == 12
        now = await idle(client)
        assert now["spec_num_draft_tokens"] > now["spec_num_accepted_tokens"] > 0


# Secrets


def secret_of(i):
    """Six digits of request i, never alike and never a part of another's."""
    return f"{(i * 7919 + 104729) % 900000 + 100000}"


@pytest.mark.parametrize(
    ("num", "max_tokens", "settings"),
    [
        (48, 16, {"speculative_config": NGRAM}),
        (24, 80, {"num_blocks": 24, "block_size": 32, "kv_cache_memory_bytes": None}),
    ],
    ids=["drafts", "preemption"],
)
async def test_no_secret_of_one_request_is_told_to_another(
    smollm2_dir, always_drafting, num, max_tokens, settings
):
    """Each prompt repeats its own number and the model goes on with it; half leave early."""
    secrets = [secret_of(i) for i in range(num)]
    assert len(set(secrets)) == num
    told = Counter()

    async with served(smollm2_dir, max_num_seqs=24, **settings) as client:

        async def ask(i):
            body = {
                "prompt": f"The key is {secrets[i]}. " * 4 + "The key is",
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "cache_salt": f"tenant-{i % 3}" if i % 2 else None,
            }
            headers = {"X-Request-Id": f"same-{i % 2}"}
            text, lines = "", 0
            async with client.http.post(COMPLETIONS, json=body, headers=headers) as response:
                assert response.status == 200
                async for line in response.content:
                    text += line.decode()
                    lines += line.startswith(b"data:")
                    if i % 4 == 3 and lines > i // 4 % 2:
                        told["left"] += 1
                        break
            digits = "".join(c for c in _text_of(text) if c.isdigit())
            for j, other in enumerate(secrets):
                assert j == i or other not in digits, f"request {i} was told the key of {j}"
            told["own"] += secrets[i] in digits

        await asyncio.gather(*(ask(i) for i in range(num)))
        now = await idle(client)
        assert told["left"] == num // 4
        assert told["own"] >= num // 2, "the model says no secrets: this test sees nothing"
        hard = "num_preemptions" if "num_blocks" in settings else "spec_num_accepted_tokens"
        assert now[hard] > 0, "the server was not under the pressure that this test is about"


def _text_of(stream):
    events = (line[6:] for line in stream.splitlines() if line.startswith("data: {"))
    return "".join(c["text"] for e in events for c in json.loads(e)["choices"])


# Nothing is kept


async def test_mixed_requests_leave_every_block_free_and_every_gauge_at_zero(
    serving, always_drafting
):
    rng = random.Random(7)
    num = 200
    seen = Counter()
    wrong = [
        {"temperature": -1},
        {"n": 0},
        {"prompt": ""},
        {"prompt": [49152]},
        {"max_tokens": 9000},
        {"logit_bias": {"99999": 1}},
        {"stop_token_ids": [-1]},
        {"model": "other"},
    ]
    extras = [
        {},
        {"n": 2, "temperature": 1.0},
        {"n": 3, "temperature": 0.7, "top_p": 0.9},
        {"logprobs": 2},
        {"logprobs": 0, "echo": True},
        {"prompt_logprobs": 1},
        {"presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"frequency_penalty": 0.5, "min_p": 0.1, "temperature": 1.0},
        {"stop": ["e", "the "]},
        {"stop_token_ids": list(range(100, 300))},
        {"logit_bias": {"5": 5.0}},
        {"cache_salt": "tenant"},
        {"priority": -1},
        {"min_tokens": 3},
    ]
    settings = {
        "num_blocks": 14,
        "kv_cache_memory_bytes": None,
        "max_num_seqs": 16,
        "max_num_queued_reqs": 90,
        "speculative_config": {**NGRAM, "prompt_lookup_min": 1},
    }
    async with serving(**settings) as client:
        gate = asyncio.Semaphore(40)

        async def ask(i):
            prompt = [5 + i % 4] * rng.choice([1, 3, 63, 64, 65, 130, 300])
            body = {
                "prompt": prompt,
                "max_tokens": rng.choice([1, 2, 10, 30, 150]),
                "temperature": rng.choice([0, 1.0]),
                "ignore_eos": i % 3 > 0,
                "stream": rng.random() < 0.5,
                "seed": i,
                **rng.choice(extras),
            }
            if "prompt_logprobs" in body:
                body["stream"] = False
            is_wrong, leaves = rng.random() < 0.1, rng.random() < 0.2
            if is_wrong:
                leaves = False
                body.update(rng.choice(wrong))
            elif leaves:
                body["max_tokens"] = 500
            patience = rng.randint(0, 4)
            async with gate, asyncio.timeout(100):
                try:
                    async with asyncio.timeout(0.05 * patience if leaves else None):
                        async with client.http.post(COMPLETIONS, json=body) as response:
                            async for line in response.content:
                                if response.status == 200:
                                    assert b'"error"' not in line, line
                            seen[response.status] += 1
                            if is_wrong and response.status == 200:
                                raise AssertionError(f"accepted: {body}")
                except TimeoutError:
                    if not leaves:
                        raise
                    seen["left"] += 1

        await asyncio.gather(*(ask(i) for i in range(num)))
        now = await idle(client)
        assert set(seen) <= {200, 400, 404, 503, "left"}, seen
        assert min(seen[200], seen[400], seen["left"]) > 10, seen
        finished = now["finished"]
        assert set(finished) <= {"stop", "length", "abort"} and finished["abort"] > 0
        assert now["failed_steps"] == 0
        assert now["num_preemptions"] > 0 and now["spec_num_accepted_tokens"] > 0
        gauges = {
            name: value
            for name, value in (await client.metrics()).items()
            if name.startswith(
                ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage")
            )
        }
        assert len(gauges) >= 3 and set(gauges.values()) == {0.0}
        # The pool is as good as new: the same request alone gives the same.
        asked = {"prompt": [9] * 70, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        texts = [
            (await client.post(COMPLETIONS, {**asked, **salt}))["choices"][0]["text"]
            for salt in ({"cache_salt": "new"}, {}, {})
        ]
        assert len(set(texts)) == 1


# Nobody starves


@pytest.mark.parametrize("priority", [0, -3])
async def test_long_request_ends_among_short_ones_that_never_stop_coming(
    serving, monkeypatch, priority
):
    """The pool holds the long one only if most of the others give way."""
    monkeypatch.setattr("xylite.runtime.scheduler.AGEING_S", 1.0)
    settings = {"num_blocks": 64, "kv_cache_memory_bytes": None, "max_num_seqs": 8}
    async with serving(**settings) as client:
        ended = asyncio.Event()
        num_short = 0

        async def shorts(lane):
            nonlocal num_short
            while not ended.is_set():
                body = {
                    "prompt": [100 + lane] * 50 + [200 + num_short % 1000] * 100,
                    "max_tokens": 50,
                    "ignore_eos": True,
                    "priority": priority,
                }
                answer = await client.post(COMPLETIONS, body)
                assert answer["usage"]["completion_tokens"] == 50
                num_short += 1

        lanes = [asyncio.ensure_future(shorts(i)) for i in range(16)]
        while num_short < 8:
            await asyncio.sleep(0.01)
        try:
            async with asyncio.timeout(120):
                long = await client.complete([7] * 3800, 20, ignore_eos=True)
        finally:
            ended.set()
            await asyncio.gather(*lanes)
        assert long["usage"]["completion_tokens"] == 20
        assert num_short > 20, "the short ones had to wait for the long one"
        await idle(client)


async def test_running_stream_gets_its_tokens_while_a_long_prompt_is_computed(serving):
    """Counted in iterations, one of which has one chunk of the prompt; the machine may be slow."""
    budget, length = 128, 7000
    async with serving(max_num_batched_tokens=budget) as client:
        engine, seen = client.engine, []
        params = SamplingParams(max_tokens=1000, ignore_eos=True, temperature=0.0)
        stream = await engine.submit(NUM, params)
        await anext(stream)
        long = asyncio.ensure_future(client.complete([7, 8] * (length // 2), 1))
        async for event in stream:
            now = engine.snapshot()
            if now["num_running"] == 2 and event.finish_reason is None:
                seen.append((now["num_steps"], event.num_output))
            if long.done():
                break
        await stream.aclose()
        assert (await long)["usage"]["prompt_tokens"] == length
        steps, tokens = zip(*seen, strict=True)
        assert length // budget <= steps[-1] - steps[0] + 2 <= length // budget + 8
        assert max(b - a for a, b in itertools.pairwise(steps)) < 3
        assert tokens[-1] - tokens[0] >= steps[-1] - steps[0] - 2, "a token in each iteration"


async def test_streams_that_start_together_all_move(serving):
    async with serving(max_num_batched_tokens=64) as client:
        order = []

        async def stream(i):
            body = {"prompt": NUM, "max_tokens": 30, "ignore_eos": True, "stream": True}
            async with client.http.post(COMPLETIONS, json=body) as response:
                async for _ in response.content:
                    order.append(i)  # noqa: PERF401 (the order in which they come is the point)

        await asyncio.gather(*(stream(i) for i in range(8)))
        firsts = [order.index(i) for i in range(8)]
        lasts = [len(order) - 1 - order[::-1].index(i) for i in range(8)]
        assert max(firsts) < min(lasts), "a stream ended before another had begun"
