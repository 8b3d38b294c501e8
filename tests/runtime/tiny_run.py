"""Runs requests on a tiny random Llama without an engine, with any drafter."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tests.models import tiny
from xylite import models, ops
from xylite.models import layers, weights
from xylite.runtime.blocks import KVBlocks
from xylite.runtime.commit import commit
from xylite.runtime.drafters import Proposer
from xylite.runtime.drafters.draft_model import DraftParts
from xylite.runtime.executor import Executor, Model
from xylite.runtime.masks import fill_masks
from xylite.runtime.queues import Queues
from xylite.runtime.request import Limits, Request, SamplingParams, TokenEvent, make_request
from xylite.runtime.scheduler import Scheduler
from xylite.runtime.token_table import Tabulator

V = 60
WORDS = -(-V // 32)
BLOCK = 4


def executor(seed: int, num_blocks: int = 128, max_num_seqs: int = 8) -> Executor:
    """A tiny Llama with float32 weights that depend on the seed alone."""
    cfg = tiny.config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    family, spec = models.describe(cfg)
    table = ops.load("reference")
    params = weights.random_params(spec, family, table, torch.float32, seed)
    kv = layers.make_kv(spec, num_blocks, BLOCK, dtype=torch.float32, device=torch.device("cpu"))
    return Executor(Model(family, spec, params, V), table, kv, max_num_seqs)


def draft_parts(seed: int, *, num_blocks: int = 128, rows: int = 8, budget: int = 64) -> DraftParts:
    return DraftParts(
        executor=executor(seed, num_blocks, rows),
        tabulator=Tabulator(rows, num_blocks, BLOCK),
        blocks=KVBlocks(num_blocks, BLOCK),
        budget=budget,
        max_num_seqs=rows,
        max_len=128,
        num_words=WORDS,
    )


def request(name: str, prompt: Sequence[int], **params: Any) -> Request:
    constraint = params.pop("constraint", None)
    limits = Limits(vocab_size=V, max_model_len=128, max_kv_tokens=512)
    return make_request(
        name,
        prompt,
        SamplingParams(**params),
        limits=limits,
        end_tokens=frozenset({2}),
        default_seed=7,
        constraint=constraint,
    )


class Run:
    """What came of some requests.

    events    by (request id, index)
    counters  of the queues
    """

    def __init__(self) -> None:
        self.events: dict[tuple[str, int], list[TokenEvent]] = {}
        self.counters: Any = None

    def tokens(self) -> dict[tuple[str, int], list[int]]:
        return {k: [t for e in v for t in e.tokens] for k, v in self.events.items()}

    def ends(self) -> dict[tuple[str, int], Any]:
        return {k: (v[-1].finish_reason, v[-1].stop_token) for k, v in self.events.items()}

    def logprobs(self) -> dict[tuple[str, int], list[Any]]:
        return {k: [x for e in v for x in e.logprobs or ()] for k, v in self.events.items()}

    @property
    def acceptance(self) -> float:
        return self.counters.spec_num_accepted_tokens / self.counters.spec_num_draft_tokens


def run(
    requests: Sequence[Request],
    proposer: Proposer | None = None,
    *,
    max_draft: int = 4,
    num_blocks: int = 128,
    budget: int = 24,
    max_num_seqs: int = 8,
    seed: int = 0,
    target: Executor | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> Run:
    """All requests to their end, two arriving at each iteration.

    target  what runs them; by default the model of `seed`
    """
    blocks = KVBlocks(num_blocks, BLOCK)
    queues = Queues(blocks, max_num_seqs=max_num_seqs, max_queued=9999)
    scheduler = Scheduler(queues, budget=budget, max_draft=max_draft)
    tabulator = Tabulator(max_num_seqs, num_blocks, BLOCK)
    target = target or executor(seed, num_blocks, max_num_seqs)
    rng = random.Random(1)
    out = Run()
    left = list(requests)
    now = 0.0
    while left or queues.num_unfinished:
        now += 0.01
        for r in left[:2]:
            for seq in queues.add(r, now):
                out.events[r.id, seq.index] = []
        left = left[2:]
        plan = scheduler.plan(now)
        if plan is None:
            continue
        step = tabulator.build(plan)
        mask = np.zeros((step.num_mask_rows, WORDS), np.int32)
        fill_masks(plan, mask)
        result = target.run(step, mask if step.num_mask_rows else None)
        for seq, event in commit(queues, plan, result):
            out.events[seq.request.id, seq.index].append(event)
            if event.finish_reason is not None and proposer is not None:
                proposer.forget(seq)
        blocks.check(queues.running)
        after_step()
        if proposer is not None:
            ready = [s for s in queues.running if s.remaining == 1]
            wanted = [(s, min(proposer.expects(s), max_draft)) for s in ready]
            wanted = [(s, rng.randint(1, n)) for s, n in wanted if n]
            for (seq, _), draft in zip(wanted, proposer.propose(wanted), strict=True):
                seq.draft = draft
    out.counters = queues.counters
    return out
