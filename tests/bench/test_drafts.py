"""What `bench serve` says about drafts, from a server's metrics."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.http.fake_engine import Call, FakeEngine, Item, paused, said
from xylite.bench.drafts import DraftCounts, figures, read
from xylite.bench.report import measure, table
from xylite.bench.serve import BenchConfig, run
from xylite.config import ServerConfig
from xylite.http import make_app

# Two engines of one server, as vLLM writes them.
TEXT = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="position=\\"7\\""} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 2.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 4e+01
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0",model_name="m"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 3.0
"""


def test_counters_of_all_engines_are_added_up():
    assert read(TEXT) == DraftCounts(12, 40, 12, {0: 9.0, 2: 3.0})
    assert read("vllm:spec_decode_num_drafts 3\n") == DraftCounts(3, 0, 0, {})
    assert read("vllm:num_requests_running 3\nhello\n") is None


def test_a_run_is_what_came_between():
    found = figures(
        DraftCounts(10, 40, 20, {0: 9.0, 1: 6.0}), DraftCounts(14, 60, 25, {0: 12.0, 1: 7.0, 2: 1})
    )
    assert found == {
        "spec_decode_acceptance_rate": 25.0,
        "spec_decode_acceptance_length": 2.25,
        "spec_decode_num_drafts": 4,
        "spec_decode_draft_tokens": 20,
        "spec_decode_accepted_tokens": 5,
        "spec_decode_per_position_acceptance_rates": [0.75, 0.25, 0.25],
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, DraftCounts(1, 1, 1, {})),
        (DraftCounts(1, 1, 1, {}), None),
        (DraftCounts(5, 9, 3, {0: 3}), DraftCounts(5, 9, 3, {0: 3})),
        (DraftCounts(5, 9, 3, {}), DraftCounts(1, 2, 1, {})),
        (DraftCounts(5, 9, 3, {}), DraftCounts(7, 12, 1, {})),
    ],
)
def test_a_run_without_drafts_or_of_a_server_started_anew_says_nothing(before: Any, after: Any):
    assert figures(before, after) == {}


def test_the_table_has_the_section_vllm_prints():
    result = measure([], 1.0, metrics=(), percentiles=(), goodput={})
    result |= {"max_concurrency": None, "request_rate": "inf"}
    assert "Speculative" not in table(result, metrics=(), percentiles=())
    result |= figures(DraftCounts(0, 0, 0, {}), DraftCounts(8, 40, 13, {0: 6.0, 1: 5.0, 2: 2.0}))
    lines = table(result, metrics=(), percentiles=()).splitlines()
    assert lines[lines.index("---------------Speculative Decoding---------------") :] == [
        "---------------Speculative Decoding---------------",
        "Acceptance rate (%):                     32.50",
        "Acceptance length:                       2.62",
        "Drafts:                                  8",
        "Draft tokens:                            40",
        "Accepted tokens:                         13",
        "Per-position acceptance (%):",
        "  Position 0:                            75.00",
        "  Position 1:                            62.50",
        "  Position 2:                            25.00",
        "=" * 50,
    ]


class Drafting(FakeEngine):
    """Says that it drafted three tokens for each request, of which two were accepted."""

    def snapshot(self):
        n = len(self.calls)
        return super().snapshot() | {
            "spec_num_drafts": n,
            "spec_num_draft_tokens": 3 * n,
            "spec_num_accepted_tokens": 2 * n,
            "spec_accepted_per_pos": [n, n],
        }


def speaking(call: Call) -> list[Item]:
    return paused(said("a" * (call.params.max_tokens or 1), params=call.params, finish="length"))


async def test_a_server_that_drafts_is_asked_before_and_after(tmp_path: Path, capsys: Any):
    engine = Drafting(speaking)
    app = make_app(engine, ServerConfig(api_key=("secret",)))
    async with TestServer(app, host="127.0.0.1") as server:
        config = BenchConfig(
            port=server.port or 0,
            api_key="secret",
            num_prompts=4,
            num_warmups=3,
            random_input_len=5,
            random_output_len=3,
            result_dir=str(tmp_path),
            result_filename="out.json",
        )
        assert await run(config) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["spec_decode_num_drafts"] == 4
    assert result["spec_decode_acceptance_length"] == 3.0
    assert result["spec_decode_per_position_acceptance_rates"] == [1.0, 1.0]
    out = capsys.readouterr().out
    assert re.search(r"^Acceptance rate \(%\): +66\.67$", out, re.MULTILINE)


@pytest.mark.parametrize("status", [404, 500, 200])
async def test_a_server_without_such_metrics_is_measured_all_the_same(
    status: int, tmp_path: Path, capsys: Any
):
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, body=b"\xff\x00 nothing of interest")

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def complete(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n')
        return response

    app = web.Application()
    app.router.add_get("/metrics", answer)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", complete)
    async with TestServer(app, host="127.0.0.1") as server:
        config = BenchConfig(
            port=server.port or 0,
            num_prompts=1,
            result_dir=str(tmp_path),
            result_filename="out.json",
        )
        assert await run(config) == 0
    assert not [k for k in json.loads((tmp_path / "out.json").read_text()) if "spec" in k]
    assert "Speculative" not in capsys.readouterr().out
