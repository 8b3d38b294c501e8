"""Drives scheduler, tabulator and toy executor the way the engine does, one iteration at a time."""

from collections.abc import Callable

import numpy as np

from tests.toy import WORDS, ToyExecutor
from xylite.errors import EngineError
from xylite.runtime.blocks import KVBlocks
from xylite.runtime.commit import commit, fail
from xylite.runtime.masks import fill_masks
from xylite.runtime.plan import Plan
from xylite.runtime.queues import Queues
from xylite.runtime.request import Request, TokenEvent
from xylite.runtime.scheduler import Scheduler
from xylite.runtime.sequence import Sequence
from xylite.runtime.step import Step
from xylite.runtime.token_table import Tabulator


class Driver:
    """Runs requests to their end; `check()` proves the block pool after every iteration.

    ahead      decides before each iteration whether the next one is planned during it
    propose    gives a sequence its draft after each commit
    on_step    called before each iteration with its number: abort, corrupt, raise
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        budget: int = 16,
        mixed_budget: int | None = None,
        max_num_seqs: int = 8,
        max_queued: int = 1000,
        max_draft: int = 0,
        reuse: bool = True,
    ):
        self.blocks = KVBlocks(num_blocks, block_size, reuse=reuse)
        self.scheduler = Scheduler(
            Queues(self.blocks, max_num_seqs=max_num_seqs, max_queued=max_queued),
            budget=budget,
            max_draft=max_draft,
            mixed_budget=mixed_budget,
        )
        self.tabulator = Tabulator(max_num_seqs, num_blocks, block_size)
        self.executor = ToyExecutor(num_blocks, block_size)
        self.now = 0.0
        self.events: dict[tuple[str, int], list[TokenEvent]] = {}
        self.sequences: dict[tuple[str, int], Sequence] = {}
        self.plans: list[Plan] = []
        self.steps: list[Step] = []

    @property
    def queues(self) -> Queues:
        return self.scheduler.queues

    def add(self, request: Request) -> list[Sequence]:
        new = self.queues.add(request, self.now)
        for seq in new:
            self.events[request.id, seq.index] = []
            self.sequences[request.id, seq.index] = seq
        return new

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [t for e in self.events[name, index] for t in e.tokens]

    def finish(self, name: str, index: int = 0) -> str | None:
        events = self.events[name, index]
        return events[-1].finish_reason if events else None

    def check(self) -> None:
        self.blocks.check(self.queues.running)
        for seq in self.queues.running:
            assert seq.num_computed <= seq.num_planned <= len(seq.tokens) + seq.num_pending, seq
            assert len(seq.blocks) * self.blocks.block_size >= seq.num_planned

    def plan(self, *, ahead: bool = False) -> tuple[Plan, Step] | None:
        plan = self.scheduler.plan(self.now, ahead=ahead)
        self.check()
        if plan is None:
            return None
        assert plan.num_tokens <= self.scheduler.budget
        step = self.tabulator.build(plan)
        self.plans.append(plan)
        self.steps.append(step)
        return plan, step

    def _execute(self, plan: Plan, step: Step):
        mask = None
        if step.num_mask_rows:
            mask = np.zeros((step.num_mask_rows, WORDS), np.int32)
            fill_masks(plan, mask)
        try:
            return self.executor.run(step, mask)
        except RuntimeError:
            return None

    def run(
        self,
        *,
        ahead: Callable[[], bool] = lambda: False,
        propose: Callable[[Sequence], object] | None = None,
        on_step: Callable[[int], None] = lambda number: None,
        max_steps: int = 5000,
    ) -> None:
        """Iterate until nothing is left."""
        flight = None
        for _ in range(max_steps):
            self.now += 0.01
            if flight is None:
                on_step(len(self.plans))
                flight = self.plan()
                if flight is None:
                    assert not self.queues.num_unfinished, "sequences are left and none can run"
                    return
            plan, step = flight
            nxt = None
            if not plan.has_drafts and propose is None and ahead():
                on_step(len(self.plans))
                nxt = self.plan(ahead=True)
            result = self._execute(plan, step)
            if result is None:
                error = EngineError("step failed")
                outcomes = fail(self.queues, plan, error, nxt[0] if nxt else None)
                if nxt:
                    self._execute_in_vain(*nxt)
                nxt = None
            else:
                outcomes = commit(self.queues, plan, result)
            for seq, event in outcomes:
                self.events[seq.request.id, seq.index].append(event)
            self.check()
            if propose is not None:
                for seq in self.queues.running:
                    if seq.remaining == 1:
                        seq.draft = propose(seq)
            flight = nxt
        raise AssertionError(f"not done after {max_steps} iterations")

    def _execute_in_vain(self, plan: Plan, step: Step) -> None:
        """The device still runs an iteration whose result nobody wants."""
        try:
            self.executor.run(step, np.full((step.num_mask_rows, WORDS), -1, np.int32))
        except RuntimeError:
            pass
