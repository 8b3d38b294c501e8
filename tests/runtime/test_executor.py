"""What the executor leaves out of the last layer changes nothing that anybody sees."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runtime import tiny_run
from tests.runtime.tiny_run import V, request
from xylite.runtime import executor
from xylite.runtime.drafters.ngram import Ngram
from xylite.runtime.executor import Executor


def made(monkeypatch: pytest.MonkeyPatch, spares: bool) -> tuple[Executor, list[int]]:
    """A tiny model, and the numbers of rows that its last layer was cut to."""
    monkeypatch.setattr(executor, "LEAST_SPARED", 1)
    model = tiny_run.executor(0)
    cut: list[int] = []

    def last_rows(x: Tensor, q_start: Tensor, num: int) -> Tensor:
        cut.append(num)
        return x[q_start[1 : num + 1].long() - 1]

    if spares:
        model.ops = dataclasses.replace(model.ops, last_rows=last_rows)
    return model, cut


def prompts() -> list[list[int]]:
    generator = torch.manual_seed(3)
    return [torch.randint(3, V, (n,), generator=generator).tolist() for n in (40, 1, 17, 60, 5, 33)]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3, "logprobs": 2},
        {"temperature": 0.0, "frequency_penalty": 0.5, "n": 2},
    ],
)
def test_answers_are_the_same(monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]) -> None:
    runs = []
    for spares in (False, True):
        model, cut = made(monkeypatch, spares)
        asked = [request(f"{i}", p, max_tokens=12, **params) for i, p in enumerate(prompts())]
        runs.append(tiny_run.run(asked, target=model))
        assert bool(cut) is spares
    assert runs[0].tokens() == runs[1].tokens()
    for key, logprobs in runs[0].logprobs().items():
        others = runs[1].logprobs()[key]
        assert [x.logprob for x in logprobs] == pytest.approx([x.logprob for x in others], abs=1e-4)
    assert runs[0].ends() == runs[1].ends()


def test_where_other_tokens_are_looked_at_the_last_layer_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts need the rows of all draft tokens, prompt logprobs those of the prompt."""
    for params, proposer in (
        ({"prompt_logprobs": 1}, None),
        ({}, Ngram(num_tokens=4, lookup_min=1, lookup_max=3)),
    ):
        runs = []
        for spares in (False, True):
            model, _ = made(monkeypatch, spares)
            asked = [
                request(f"{i}", (p * 2)[:100], max_tokens=12, temperature=0.0, **params)
                for i, p in enumerate(prompts())
            ]
            runs.append(tiny_run.run(asked, proposer, target=model))
        assert runs[0].tokens() == runs[1].tokens()
        told = [
            [
                list(e.prompt_logprobs)
                for all_of in r.events.values()
                for e in all_of
                if e.prompt_logprobs
            ]
            for r in runs
        ]
        assert [len(x) for x in told[0]] == [len(x) for x in told[1]]
        assert bool(told[0]) is ("prompt_logprobs" in params)
        for mine, plain in zip(told[1], told[0], strict=True):
            assert [x and x.token for x in mine] == [x and x.token for x in plain]


def test_a_token_in_the_middle_that_is_not_finite_fails_its_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = []
    for spares in (False, True):
        model, _ = made(monkeypatch, spares)
        model.model.params.embed[V - 1] = torch.nan
        bad, good = [5] * 9 + [V - 1] + [7] * 30, [6] * 40
        asked = [
            request(name, p, max_tokens=5, temperature=0.0, ignore_eos=True)
            for name, p in (("bad", bad), ("good", good))
        ]
        done = tiny_run.run(asked, target=model)
        last = {name: done.events[name, 0][-1] for name in ("bad", "good")}
        assert last["bad"].error is not None and last["bad"].error.code == "non_finite"
        assert last["good"].error is None
        ends.append(done.tokens())
    assert ends[0] == ends[1]


@pytest.mark.parametrize("spares", [False, True])
@pytest.mark.parametrize("neighbours", [0, 3])
def test_what_nobody_looks_at_is_judged_in_no_batch(
    monkeypatch: pytest.MonkeyPatch, neighbours: int, spares: bool
) -> None:
    """A hidden state of the middle of a prompt that is not finite is no fault, with neighbours or
    without."""
    model, _ = made(monkeypatch, spares)
    monkeypatch.setattr(executor, "LEAST_SPARED", 30)
    norm, last = model.ops.add_rms_norm, model.model.params.norm
    spoilt: list[int] = []

    def spoiled(x: Tensor, residual: Any, w: Tensor, eps: float) -> Any:
        out, total = norm(x, residual, w, eps)
        if w is last and len(out) > 5:
            out[4] = torch.nan
            spoilt.append(len(out))
        return out, total

    model.ops = dataclasses.replace(model.ops, add_rms_norm=spoiled)
    asked = [
        request(f"{i}", [5 + i] * 20, max_tokens=2, temperature=0.0, ignore_eos=True)
        for i in range(1 + neighbours)
    ]
    done = tiny_run.run(asked, target=model, budget=200)
    assert [e[-1].error for e in done.events.values()] == [None] * len(asked)
    # Where prompts of neighbours make the batch long enough, such states are not even computed.
    assert bool(spoilt) is not (spares and neighbours > 0)
