"""Iterations before the first request: what is set up on first use is set up by them, and they show
how many tokens the device computes in a given time."""

import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from tqdm import tqdm

from xylite.config import EngineConfig
from xylite.runtime.blocks import KVBlocks
from xylite.runtime.budgets import MIN_BUDGET, Budgets, Pace
from xylite.runtime.executor import Executor
from xylite.runtime.queues import Queues
from xylite.runtime.request import Limits, Request, SamplingParams, make_request
from xylite.runtime.scheduler import Scheduler
from xylite.runtime.step import Step
from xylite.runtime.token_table import Tabulator

TARGET_ITL_MS = 40.0


@dataclass(frozen=True, slots=True, eq=False)
class TrialRuns:
    """Prefills of nobody's prompts, on an engine's parts while it has no requests."""

    executor: Executor
    tabulator: Tabulator
    limits: Limits
    block_size: int

    def warm_up(self) -> None:
        """A first pass of each size that the device compiles or records something for."""
        sizes = self._possible(self.executor.ops.warm_up)
        for n in tqdm(sizes, "warming up", disable=None if sizes else True, file=sys.stderr):
            self._seconds(n, attempts=1)

    def rehearsals(self) -> Iterator[None]:
        """Passes of sizes that are recorded when they first come, one after the other. They store
        nothing, so the cache may be in use; sequences may not, meanwhile."""
        for n in self._possible(self.executor.ops.idle_warm_up):
            step = self._step(n)
            step.table.slots[:] = -1
            self.executor.forward(dataclasses.replace(step, zero_blocks=step.zero_blocks[:0]))
            yield

    def _possible(self, sizes: Iterable[int]) -> list[int]:
        longest = min(self.limits.max_kv_tokens, self.limits.max_model_len)
        return [n for n in sizes if n <= longest]

    def budgets(self, config: EngineConfig) -> tuple[Budgets, float]:
        """The scheduler's budgets and target_itl_ms: as set, or as measured."""
        budget, target_ms = config.max_num_batched_tokens, config.target_itl_ms
        if target_ms is None:
            target_ms = TARGET_ITL_MS if budget is None else 0.0
        pace = self._pace() if budget is None or target_ms else None
        return Budgets(budget, target_ms, pace), target_ms

    def _pace(self) -> Pace | None:
        """From prefills of two lengths; None if the cache has no room for them."""
        longest = min(256, self.limits.max_kv_tokens, self.limits.max_model_len)
        if longest < MIN_BUDGET:
            return None
        short, long = longest // 4, longest
        measured = {n: self._seconds(n) for n in (short, long)}
        per_token = max((measured[long] - measured[short]) / (long - short), 1e-7)
        fixed = max(measured[short] - short * per_token, 0.0)
        return Pace(fixed, per_token, short)

    def _seconds(self, n: int, attempts: int = 4) -> float:
        """Fastest of some prefills of n tokens, on blocks that are cleared afterwards."""
        executor = self.executor
        blocks = -(-n // self.block_size)
        best = float("inf")
        for attempt in range(attempts):
            step = self._step(n)
            start = time.perf_counter()
            executor.run(step)
            executor.ops.device.synchronize()
            if attempt:  # the first one also pays for what is set up on first use
                best = min(best, time.perf_counter() - start)
        used = torch.arange(blocks, dtype=torch.int32, device=executor.ops.device.torch_device)
        executor.kv = executor.ops.zero_blocks(executor.kv, used)
        return best

    def _step(self, n: int) -> Step:
        """The prefill of a prompt of n tokens in the first blocks, whoever they belong to."""
        blocks = KVBlocks(-(-n // self.block_size), self.block_size, reuse=False)
        queues = Queues(blocks, max_num_seqs=1, max_queued=0)
        queues.add(self._request(n), 0.0)
        plan = Scheduler(queues, budget=n).plan(0.0)
        assert plan is not None
        return self.tabulator.build(plan)

    def _request(self, n: int) -> Request:
        """A prompt of n tokens."""
        ids = [(1 + i % 97) % self.limits.vocab_size for i in range(n)]
        params = SamplingParams(max_tokens=0, temperature=0.0)
        return make_request(
            "warm-up", ids, params, limits=self.limits, end_tokens=frozenset(), default_seed=0
        )
