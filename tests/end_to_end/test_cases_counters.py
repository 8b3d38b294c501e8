"""What /metrics says after a known set of requests, number for number."""

import asyncio

import pytest

from tests.end_to_end.conftest import served
from tests.end_to_end.smollm2 import ALPHA, CHAT, CHAT_TEXT, NUM

pytestmark = pytest.mark.model

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
NEVER_FALLS = ("_total", "_count", "_sum", "_bucket")
PER_REQUEST = (
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "time_to_first_token_seconds",
)


class Grown:
    """By how much each sample of /metrics is larger than before."""

    def __init__(self, before, after):
        self._by = {key: value - before.get(key, 0.0) for key, value in after.items()}

    def of(self, name, **labels):
        """The sum over the samples of this name that have these labels."""
        wanted = [f'{k}="{v}"' for k, v in labels.items()]
        return sum(
            by
            for key, by in self._by.items()
            if key.partition("{")[0] == name and all(w in key for w in wanted)
        )

    def falling(self):
        """Counters that fell, which none may."""
        return [k for k, by in self._by.items() if by < 0 and k.split("{")[0].endswith(NEVER_FALLS)]


async def cut_after_one_line(client, **body):
    """Begin a stream that would never end, and leave."""
    asked = {"prompt": NUM, "max_tokens": 4000, "ignore_eos": True, "stream": True, **body}
    async with client.http.post(COMPLETIONS, json=asked) as response:
        assert response.status == 200
        await response.content.readline()


async def at_rest(client):
    """The metrics once nothing runs and the last iteration has given its blocks back."""
    async with asyncio.timeout(20):
        while (now := client.engine.snapshot())["num_running"] + now["num_waiting"] or (
            now["num_free_blocks"] < now["num_blocks"]
        ):
            await asyncio.sleep(0.01)
    return await client.metrics()


async def test_counters_are_those_of_the_very_requests_that_were_sent(smollm2_dir):
    """Three that end by themselves, one at its limit, one whose client leaves, one refused."""
    async with served(smollm2_dir) as client:
        before = await client.metrics()
        assert not [k for k in before if k.startswith("vllm:request_success_total")]
        answers = [await client.chat(CHAT) for _ in range(3)]
        answers.append(await client.complete(NUM, 12))
        assert answers[0]["choices"][0]["message"]["content"] == CHAT_TEXT
        assert answers[3]["choices"][0]["finish_reason"] == "length"
        await cut_after_one_line(client)
        await client.post(COMPLETIONS, {"prompt": NUM, "temperature": -1}, 400)
        after = await at_rest(client)
        grown = Grown(before, after)

        for reason, num in (("stop", 3), ("length", 1), ("abort", 1), ("error", 0)):
            assert grown.of("vllm:request_success_total", finished_reason=reason) == num, reason
        assert grown.of("vllm:request_success_total") == 5
        for name in PER_REQUEST:
            assert grown.of(f"vllm:{name}_count") == 5, name
        for path, status, num in (
            (CHATS, 200, 3), (COMPLETIONS, 200, 1), (COMPLETIONS, 400, 1), (COMPLETIONS, 499, 1)
        ):  # fmt: skip
            labels = {"method": "POST", "handler": path, "status": status}
            assert grown.of("http_requests_total", **labels) == num, labels
        assert grown.of("http_requests_total", method="POST") == 6

        usages = [answer["usage"] for answer in answers]
        prompts = sum(u["prompt_tokens"] for u in usages) + usages[3]["prompt_tokens"]
        assert grown.of("vllm:prompt_tokens_total") == prompts
        assert grown.of("vllm:request_prompt_tokens_sum") == prompts
        assert grown.of("vllm:prefix_cache_queries_total") == prompts
        cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
        cached += usages[3]["prompt_tokens"] - 1  # the one that was cut begins as the fourth
        assert grown.of("vllm:prefix_cache_hits_total") == cached
        given = grown.of("vllm:generation_tokens_total")
        assert 1 <= given - sum(u["completion_tokens"] for u in usages) < 200
        assert grown.of("vllm:request_generation_tokens_sum") == given
        assert grown.of("vllm:inter_token_latency_seconds_count") == given - 5

        assert not grown.falling()
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert [v for k, v in after.items() if k.startswith(f"vllm:{gauge}{{")] == [0], gauge


async def test_request_of_several_sequences_counts_once_and_by_its_worst_end(smollm2_dir):
    async with served(smollm2_dir) as client:
        before = await client.metrics()
        await client.complete(NUM, 12, n=3)
        await client.complete([NUM, ALPHA], 2, n=2)
        await cut_after_one_line(client, n=2, temperature=1.0)
        grown = Grown(before, await at_rest(client))
        for reason, num in (("length", 3), ("abort", 1)):
            assert grown.of("vllm:request_success_total", finished_reason=reason) == num, reason
        assert grown.of("vllm:request_success_total") == 4
        for name in PER_REQUEST:
            assert grown.of(f"vllm:{name}_count") == 4, name
        assert grown.of("vllm:request_params_n_sum") == 3 + 2 + 2 + 2
        assert grown.of("http_requests_total", handler=COMPLETIONS) == 3
        async with client.http.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        (unit,) = [x for x in lines if x.startswith("# HELP vllm:request_success_total")]
        assert "Requests" in unit and "counts once" in unit
