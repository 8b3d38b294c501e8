"""Tables of decodes alone, which are made by a shorter way, are those of any chunks."""

import dataclasses
import random
from typing import Any

import numpy as np

from xylite.runtime.blocks import KVBlocks
from xylite.runtime.commit import commit
from xylite.runtime.plan import Plan
from xylite.runtime.queues import Queues
from xylite.runtime.request import Limits, SamplingParams, make_request
from xylite.runtime.scheduler import Scheduler
from xylite.runtime.step import Step, StepResult
from xylite.runtime.token_table import Tabulator

LIMITS = Limits(vocab_size=50, max_model_len=200, max_kv_tokens=200)
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "logprobs": 2},
    {"presence_penalty": 1.0, "seed": 5},
    {"logit_bias": {3: 1.0}, "top_k": 4},
    {"min_tokens": 6, "stop_token_ids": [7], "top_p": 0.5},
    {"n": 2, "min_p": 0.1, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
    {"allowed_token_ids": [1, 2, 3]},
]


def arrays(record: Any) -> Any:
    """What a record holds, as lists with their types."""
    if isinstance(record, np.ndarray):
        return str(record.dtype), record.shape, record.tolist()
    if dataclasses.is_dataclass(record):
        return {f.name: arrays(getattr(record, f.name)) for f in dataclasses.fields(record)}
    return list(map(arrays, record)) if isinstance(record, tuple) else record


def tabulated_both_ways(plan: Plan, one: Tabulator, other: Tabulator) -> Step:
    rows_before = [c.seq.sample_row for c in plan.chunks]
    step = one.build(plan)
    rows = [c.seq.sample_row for c in plan.chunks]
    for chunk, row in zip(plan.chunks, rows_before, strict=True):
        chunk.seq.sample_row = row
    for seq in plan.admitted:
        other._set_row(seq)
    assert arrays(other._mixed(plan)) == arrays(step)
    assert [c.seq.sample_row for c in plan.chunks] == rows
    return step


def test_decodes_have_the_tables_of_any_chunks(monkeypatch):
    """Requests of every kind come and go, iterations are planned ahead, blocks run out."""
    rng = random.Random(0)
    num_decodes = 0
    decodes = Tabulator._decodes

    def counted(self: Tabulator, plan: Plan) -> Step:
        nonlocal num_decodes
        num_decodes += 1
        return decodes(self, plan)

    monkeypatch.setattr(Tabulator, "_decodes", counted)
    queues = Queues(KVBlocks(30, 8), max_num_seqs=6, max_queued=999)
    scheduler = Scheduler(queues, budget=24)
    one, other = (Tabulator(6, 25, 8) for _ in range(2))
    now, num, flight = 0.0, 0, None
    while num < 40 or queues.num_unfinished or flight is not None:
        now += 0.01
        if num < 40 and rng.random() < 0.15:
            num += 1
            prompt = [rng.randrange(50) for _ in range(rng.choice([1, 3, 17, 40]))]
            if rng.random() < 0.3:
                prompt = [1] * len(prompt)  # of which the prefix tree holds some
            params = SamplingParams(max_tokens=rng.randint(8, 40), **KINDS[num % len(KINDS)])
            request = make_request(
                f"{num}",
                prompt,
                params,
                limits=LIMITS,
                end_tokens=frozenset([9]),
                default_seed=num,
            )
            queues.add(request, now)
        ahead = flight is not None and rng.random() < 0.7
        following = scheduler.plan(now, ahead=True) if ahead else None
        step = None if following is None else tabulated_both_ways(following, one, other)
        if flight is not None:
            plan, made = flight
            ids = np.array([rng.randrange(10, 50) for _ in made.table.logit_rows], np.int32)
            ones = np.ones(len(plan.chunks), np.bool_)
            commit(queues, plan, StepResult(ids, np.ones(len(ids), np.bool_), ones, None, None))
        if following is None or step is None:
            following = scheduler.plan(now)
            step = None if following is None else tabulated_both_ways(following, one, other)
        flight = None if following is None or step is None else (following, step)
    assert num_decodes > 100
