"""The whole server on a stand-in device: HTTP, text, engine, graphs, and the kernels underneath.

Answers are the reference table's, streamed and not, alone and in a mixed load. Device services are
faked, a graph is one whose replay runs the pass again.
"""

from tests.kernels_triton.stand_in import stand_in  # isort: skip  (chooses the interpreter)

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.conftest import Client, served
from tests.runtime.test_speculation_build import save
from xylite import ops
from xylite.ops import Ops, reference
from xylite.runtime import task_table
from xylite.runtime.speculation import StepCosts
from xylite.runtime.step import Step
from xylite.runtime.token_table import Tabulator

SETTINGS: dict[str, Any] = {
    "load_format": "dummy", "num_blocks": 40, "block_size": 16, "max_num_seqs": 4,
    "max_num_batched_tokens": 24, "max_model_len": 112, "seed": 3,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
}  # fmt: skip
PATH = "/v1/completions"
COMMON = {"return_token_ids": True, "ignore_eos": True}
REPEATS = {**COMMON, "prompt": "abcabcabcabc", "max_tokens": 36, "temperature": 0}
VARIES = {**COMMON, "prompt": "xyz", "max_tokens": 24, "temperature": 1.0, "seed": 5}
LONG = {**COMMON, "prompt": "The quick brown fox. " * 4, "max_tokens": 6, "temperature": 0}
PENALISED = {
    **COMMON, "prompt": "Two", "max_tokens": 8, "temperature": 0.8, "top_p": 0.9, "top_k": 20,
    "frequency_penalty": 0.5, "n": 2, "seed": 3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So they are made however long the interpreter takes for them."""
    monkeypatch.setattr(StepCosts, "knows", lambda self, num_tokens: True)
    monkeypatch.setattr(StepCosts, "seconds", lambda self, sizes: np.ones(len(sizes)))
    monkeypatch.setattr(StepCosts, "largest_trial", 10**6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("served") / "tiny"
    return save(
        path, vocab_size=100, head_dim=64, num_attention_heads=3, num_key_value_heads=1,
        num_hidden_layers=2,
    )  # fmt: skip


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The iterations of the server, as they are made."""
    seen: list[Step] = []
    build = Tabulator.build

    def note(self: Tabulator, plan: Any) -> Step:
        seen.append(build(self, plan))
        return seen[-1]

    monkeypatch.setattr(Tabulator, "build", note)
    return seen


def stages(step: Step) -> set[str]:
    """What the chunks of an iteration are."""
    tokens = np.diff(step.table.q_start)
    kinds = np.where(step.table.num_draft > 0, "verify", np.where(tokens > 1, "prefill", "decode"))
    return set(kinds.tolist())


async def answer(client: Client, asked: dict[str, Any]) -> list[list[int]]:
    """Token ids of each choice, not streamed."""
    body = await client.post(PATH, asked)
    return [choice["token_ids"] for choice in body["choices"]]


async def streamed(
    client: Client, asked: dict[str, Any], started: asyncio.Event | None = None, after: int = 1
) -> list[list[int]]:
    """The same from a stream; `started` is set once `after` tokens have come."""
    ids: list[list[int]] = [[] for _ in range(asked.get("n", 1))]
    text, ended = "", False
    async with client.http.post(PATH, json={**asked, "stream": True}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.strip() == b"data: [DONE]":
                ended = True
            elif line.startswith(b"data: "):
                for choice in json.loads(line[6:])["choices"]:
                    ids[choice["index"]] += choice["token_ids"]
                    text += choice["text"]
            if started is not None and sum(map(len, ids)) >= after:
                started.set()
    assert ended and text
    return ids


async def mixed_load(client: Client) -> list[list[list[int]]]:
    """A long prompt arrives while one sequence decodes and one has drafts to verify."""
    decodes, verifies = asyncio.Event(), asyncio.Event()
    early = [
        asyncio.create_task(streamed(client, VARIES, decodes)),
        asyncio.create_task(streamed(client, REPEATS, verifies, after=4)),
    ]
    await asyncio.gather(decodes.wait(), verifies.wait())
    late = await asyncio.gather(answer(client, LONG), streamed(client, PENALISED))
    return [*await asyncio.gather(*early), *late]


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[list[int]]]:
    """Each request alone on the reference table, without drafts."""

    async def ask() -> list[list[list[int]]]:
        settings = {**SETTINGS, "speculative_config": None}
        async with served(model, **settings) as client:
            return [await answer(client, asked) for asked in (VARIES, REPEATS, LONG, PENALISED)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "load", lambda device: reference.TABLE)
        return asyncio.run(ask())


@pytest.fixture(params=["cuda", "npu"])
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ops]:
    made = stand_in(request.param, capture=lambda run: run)
    monkeypatch.setattr(ops, "load", lambda device: made)
    yield made


@pytest.mark.timeout(300)
async def test_a_mixed_load_over_http_gets_the_ids_of_the_reference(table, model, expected, steps):
    async with served(model, **SETTINGS) as client:
        assert client.engine.config.device == table.name
        assert await mixed_load(client) == expected
        metrics = await client.metrics()
    met = [stages(step) for step in steps]
    assert {"prefill", "decode", "verify"} in met, met
    accepted = [
        v for k, v in metrics.items() if re.match("vllm:spec_decode_num_accepted_tokens_total", k)
    ]
    assert accepted and accepted[0] > 0
    assert all(step.tasks for step in steps)
    (balance,) = [v for k, v in metrics.items() if k.startswith("xylite:attention_balance")]
    assert balance == task_table.balance(steps[-1].tasks[0]) > 1
