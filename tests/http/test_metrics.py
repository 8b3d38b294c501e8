"""GET /metrics: names, labels, and that the counts are right."""

import asyncio
from typing import Any

import pytest
import uvloop
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse

from tests.http.conftest import Connect
from tests.http.fake_engine import FakeEngine, record_of, said
from tests.http.wire import CHAT, TEXT, USER, error_of
from xylite.http import make_app
from xylite.http.metrics import Histogram, lengths_up_to

REQUIRED = frozenset(
    """
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc
vllm:cache_config_info vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total
vllm:num_preemptions_total vllm:prompt_tokens_total vllm:generation_tokens_total
vllm:request_success_total vllm:admission_rejections_total
vllm:time_to_first_token_seconds_bucket vllm:inter_token_latency_seconds_bucket
vllm:request_time_per_output_token_seconds_bucket vllm:e2e_request_latency_seconds_bucket
vllm:request_queue_time_seconds_bucket vllm:request_inference_time_seconds_bucket
vllm:request_prefill_time_seconds_bucket vllm:request_decode_time_seconds_bucket
vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
vllm:request_max_num_generation_tokens_bucket vllm:request_params_max_tokens_bucket
vllm:request_prefill_kv_computed_tokens_bucket vllm:prompt_tokens_cached_total
vllm:num_requests_waiting_by_reason vllm:iteration_tokens_total_bucket
vllm:iteration_tokens_total_sum vllm:iteration_tokens_total_count
vllm:request_num_preemptions_bucket vllm:corrupted_requests_total
vllm:request_params_n_bucket vllm:spec_decode_num_drafts_total
vllm:spec_decode_num_draft_tokens_total vllm:spec_decode_num_accepted_tokens_total
vllm:spec_decode_num_accepted_tokens_per_pos_total
xylite:attention_balance xylite:steps_total xylite:host_gap_seconds_total
xylite:slow_client_closed_total
    http_requests_total http_request_duration_seconds_bucket python_gc_collections_total
""".split()  # noqa: SIM905 (a word list reads better)
)


async def samples(client: TestClient) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = await (await client.get("/metrics")).text()
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in parse(text)
        for s in family.samples
    }


def value_of(found: Any, name: str, **labels: str) -> float:
    """The one sample with this name and at least these labels."""
    (value,) = (v for (n, ls), v in found.items() if n == name and labels.items() <= set(ls))
    return value


async def test_vllms_names_are_there(connect: Connect) -> None:
    client = await connect(FakeEngine(names=("org/m", "alias")))
    await client.post(TEXT, json={"prompt": "x", "model": "alias"})
    found = await samples(client)
    names = {name for name, _ in found}
    assert names >= REQUIRED
    for name, labels in found:
        if name.startswith("vllm:"):
            assert {("model_name", "org/m"), ("engine", "0")} <= set(labels)
    assert value_of(found, "vllm:kv_cache_usage_perc") == 0.25
    assert value_of(found, "vllm:cache_config_info", block_size="16", num_gpu_blocks="64") == 1
    for reason, waiting in (("capacity", 3), ("deferred", 0)):
        assert value_of(found, "vllm:num_requests_waiting_by_reason", reason=reason) == waiting
    name = "vllm:iteration_tokens_total"
    for bound, count in (("1.0", 4), ("8.0", 4), ("16.0", 6), ("+Inf", 6)):
        assert value_of(found, f"{name}_bucket", le=bound) == count
    assert value_of(found, f"{name}_sum") == 22
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert value_of(found, name, position="1") == 2


async def test_counts_agree_with_events(connect: Connect) -> None:
    engine = FakeEngine()
    client = await connect(engine)
    before = await samples(client)
    assert not [k for k in before if k[0] == "vllm:request_success_total"]
    for _ in range(3):
        await client.post(CHAT, json={"messages": USER})
    await error_of(await client.post(CHAT, json={"messages": []}), 400)
    engine.script = lambda call: [*said("a", finish=None), asyncio.Event()]
    response = await client.post(CHAT, json={"messages": USER, "stream": True})
    await response.content.readany()
    response.close()
    await engine.until(lambda: engine.num_running == 0)
    found = await samples(client)
    assert value_of(found, "vllm:request_success_total", finished_reason="stop") == 3
    assert value_of(found, "vllm:request_success_total", finished_reason="abort") == 1
    assert value_of(found, "vllm:num_requests_running") == 0
    assert value_of(found, "vllm:e2e_request_latency_seconds_count") == 4
    assert value_of(found, "vllm:time_to_first_token_seconds_count") == 4
    assert value_of(found, "vllm:inter_token_latency_seconds_count") == 6
    assert value_of(found, "vllm:request_generation_tokens_sum") == 10
    labels = {"method": "POST", "handler": CHAT}
    assert value_of(found, "http_requests_total", **labels, status="200") == 3
    assert value_of(found, "http_requests_total", **labels, status="400") == 1
    assert value_of(found, "http_requests_total", **labels, status="499") == 1


def test_durations_are_finer_than_the_ticks_of_the_loop() -> None:
    async def seconds() -> float:
        async with TestClient(TestServer(make_app(FakeEngine()))) as client:
            await client.get("/health")
            return value_of(await samples(client), "http_request_duration_seconds_sum")

    assert 0 < uvloop.run(seconds()) < 10


async def test_labels_are_bounded(connect: Connect) -> None:
    client = await connect()
    await client.get("/nope")
    await client.request("PROPFIND", "/nope")
    await client.get("/v1/models/a")
    before = set(await samples(client))
    for method in ("PROPFIND", "LOCK", "REPORT", "SEARCH", "LINK"):
        await client.request(method, f"/{method}")
    for i in range(20):
        await client.get(f"/nope{i}")
        await client.get(f"/v1/models/{i}")
        await client.post(TEXT, json={"prompt": "x", "model": f"m{i}"})
    after = set(await samples(client))
    new = {dict(labels).get("handler") for _, labels in after - before}
    assert new <= {TEXT, "/metrics"}
    counted = {dict(ls)["method"] for name, ls in after if name == "http_requests_total"}
    assert counted == {"GET", "POST", "other"}


async def test_a_request_that_never_began_is_no_time_to_first_token(connect: Connect) -> None:
    engine = FakeEngine()
    client = await connect(engine)
    record = record_of(finish_reason="abort", scheduled=None, first_token=None, last_token=None)
    for observer in engine.observers:
        observer.on_finished(record)
    found = await samples(client)
    assert value_of(found, "vllm:time_to_first_token_seconds_count") == 0
    assert value_of(found, "vllm:request_queue_time_seconds_count") == 1
    assert value_of(found, "vllm:request_time_per_output_token_seconds_count") == 0
    assert value_of(found, "vllm:request_prompt_tokens_count") == 1


async def test_time_per_output_token_excludes_the_first(connect: Connect) -> None:
    engine = FakeEngine()
    client = await connect(engine)
    for observer in engine.observers:
        observer.on_finished(record_of(num_output=11, first_token=100, last_token=100.5))
        observer.on_finished(record_of(num_output=22, n=2, first_token=100, last_token=100.5))
    found = await samples(client)
    name = "vllm:request_time_per_output_token_seconds_sum"
    assert value_of(found, name) == pytest.approx(0.1)


async def test_scrapers_get_the_format_they_ask_for(connect: Connect) -> None:
    client = await connect()
    response = await client.get("/metrics")
    assert response.headers["Content-Type"].startswith("text/plain; version=")
    response = await client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert response.headers["Content-Type"].startswith("application/openmetrics-text")
    assert list(parse_openmetrics(await response.text()))


async def test_observers_come_and_go_with_the_application(connect: Connect) -> None:
    engine = FakeEngine()
    client = await connect(engine)
    assert len(engine.observers) == 1
    await client.close()
    assert not engine.observers


def test_histogram_counts_by_upper_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe_all([0.5, 1.0, 1.5, 2.0, 9.0])
    histogram.observe(3.0)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 6.0)]
    assert histogram.total == 17.0


@pytest.mark.parametrize("longest, last", [(1, 1), (3, 5), (1000, 1000), (8192, 10000)])
def test_length_bounds_reach_the_context(longest: int, last: int) -> None:
    bounds = lengths_up_to(longest)
    assert bounds[-1] == last and bounds == tuple(sorted(bounds))
