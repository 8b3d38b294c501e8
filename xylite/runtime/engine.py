"""The engine: an event loop task that plans, submits, commits and hands tokens to their streams.

At most one iteration is in flight on the device thread; the next one may be planned while it runs.
The engine knows token ids only.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from xylite.errors import Closed, EngineError, Overloaded
from xylite.runtime.budgets import Budgets
from xylite.runtime.commit import commit, fail
from xylite.runtime.event_queue import Sink
from xylite.runtime.interfaces import Drafter, Runner
from xylite.runtime.masks import fill_masks
from xylite.runtime.plan import Plan
from xylite.runtime.request import Request
from xylite.runtime.scheduler import Scheduler
from xylite.runtime.sequence import Sequence
from xylite.runtime.stats import Observer, Tallies, snapshot
from xylite.runtime.step import Step, StepResult
from xylite.runtime.tickets import Ticket, Tickets
from xylite.runtime.token_table import Tabulator

PLAN_MARGIN_S = 0.003  # the next iteration is planned this long before the device is expected idle
MAX_FAILED_STEPS = 5  # so many failing one after the other raise the question: is it the device?

_log = logging.getLogger(__name__)


def _size_class(num_tokens: int) -> int:
    """Iterations of the same class take nearly the same time: up to 8 tokens their number, then
    eight classes to each power of two."""
    shift = max(num_tokens.bit_length() - 4, 0)
    return 8 * shift + (num_tokens >> shift)


class _Flight:
    """An iteration on its way: forward submitted, sampling submitted unless it waits for masks."""

    def __init__(self, plan: Plan, step: Step, submitted: float):
        self.plan = plan
        self.step = step
        self.submitted = submitted
        self.gap = 0.0
        self.seconds = 0.0
        self.forwarded: Future[Any] | None = None
        self.result: asyncio.Future[StepResult] | None = None


class Engine:
    """Queues requests and runs iterations until closed.

    runner     executes Steps; called on the device thread only
    num_words  int32 words of a mask row
    state      "ready", "draining", "closed" or "dead"
    observers  told about every ended request
    dead       set when the state becomes "dead"
    budgets    learn from what iterations take; None = those of the scheduler stay
    chores     short pieces of work for the device thread while there is nothing to run
    tickets    the requests that have not ended
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tabulator: Tabulator,
        runner: Runner,
        device_thread: ThreadPoolExecutor,
        *,
        num_words: int,
        async_scheduling: bool = True,
        watchdog_s: float = 300.0,
        drafter: Drafter | None = None,
        observers: list[Observer] | None = None,
        dead: asyncio.Event | None = None,
        budgets: Budgets | None = None,
        chores: Iterator[None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.scheduler = scheduler
        self.queues = scheduler.queues
        self.tallies = Tallies()
        self.state = "ready"
        self.dead = asyncio.Event() if dead is None else dead
        self._tabulator = tabulator
        self._runner = runner
        self._device_thread = device_thread
        self._num_words = num_words
        self._async_scheduling = async_scheduling
        self._watchdog_s = watchdog_s
        self._drafter = drafter
        self._budgets = budgets
        self._chores = chores
        self._clock = clock
        self._wake = asyncio.Event()
        self.tickets = Tickets(
            self.queues,
            self.tallies,
            [] if observers is None else observers,
            forget=self._forget,
            wake=self._wake.set,
            clock=clock,
        )
        self._idle = asyncio.Event()
        self._idle.set()
        self._durations: dict[int, float] = {}
        self._failed_in_a_row = 0
        self._device_free_at = 0.0
        self._gap_since: float | None = None
        self._task = asyncio.get_running_loop().create_task(self._main(), name="xylite-engine")

    # Requests

    def require_room(self, n: int) -> None:
        """Overloaded or EngineError unless a request of n sequences would be taken now."""
        if self.state == "draining":
            raise Overloaded("the server is shutting down", code="draining", retry_after_s=5)
        if self.state == "closed":
            raise Closed("the engine was closed")
        if self.state != "ready":
            raise EngineError("the engine has stopped", code="engine_dead")
        try:
            self.queues.require_room(n)
        except Overloaded as e:
            self.tallies.rejections["max_num_queued_reqs"] += 1
            e.retry_after_s = self._drain_estimate_s()
            raise

    def submit(self, request: Request, sink: Sink) -> Ticket:
        """Queue a request; Overloaded if the queue is full or the engine takes no more."""
        self.require_room(request.params.n)
        ticket = self.tickets.add(request, sink)
        self._idle.clear()
        return ticket

    def _drain_estimate_s(self) -> float:
        """When a place in the queue may be free: queued work at the measured pace, 1 to 60 s.

        Waiting prompts are matched only when they are planned, so as much of them is taken to be in
        the prefix tree already as of those before.
        """
        counters = self.queues.counters
        done = counters.step_tokens
        if not done or not self.tallies.step_seconds:
            return 1.0
        fresh = 1 - counters.prefix_hits / max(counters.prefix_queries, 1)
        ahead = fresh * sum(s.remaining for s in self.queues.waiting) + 64
        return min(max(ahead * self.tallies.step_seconds / done, 1.0), 60.0)

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests; wait until the running ones end, then abort the rest."""
        if self.state == "ready":
            self.state = "draining"
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            self.tickets.fail_all(EngineError("the server is shutting down", code="shutdown"))

    async def close(self) -> None:
        """Abort what runs and stop, once the iteration that runs has ended."""
        self.state = "closed" if self.state != "dead" else "dead"
        self.tickets.fail_all(EngineError("the engine was closed", code="shutdown"))
        self._wake.set()
        await asyncio.gather(self._task, return_exceptions=True)
        # Weights and KV go at once, however long the caller keeps this object.
        vars(self).pop("_runner", None)
        self._drafter = self._chores = None

    # The loop

    async def _main(self) -> None:
        try:
            await self._loop()
        except Exception:  # noqa: BLE001 - the edge: whatever it was, every stream is told
            _log.exception("the engine loop failed")
            self._die("the engine failed")

    async def _loop(self) -> None:
        flight: _Flight | None = None
        while True:
            if flight is None:
                flight = self._launch(ahead=False)
            if flight is None:
                if not self.queues.num_unfinished:
                    self._idle.set()
                    if self.state in ("closed", "dead"):
                        return
                self._gap_since = None
                await self._rest()
                continue
            following = await self._plan_ahead(flight)
            result = await self._await_result(flight)
            if self.state == "dead":
                return
            if isinstance(result, Exception):
                await self._commit_failure(flight, result, following)
                flight = None
                if self.state == "dead":
                    return
                continue
            self._failed_in_a_row = 0
            self.tickets.deliver(commit(self.queues, flight.plan, result))
            await self._draft(flight, following)
            if following is not None and following.result is None:
                self._submit_sampling(following)
            flight = following

    async def _rest(self) -> None:
        """Wait until there may be something to run; meanwhile do chores, one after the other."""
        self._wake.clear()
        loop = asyncio.get_running_loop()
        while self._chores is not None and not self._wake.is_set():
            if self.queues.num_unfinished:  # who waits may have rows, which rehearsals use
                break
            try:
                chore = loop.run_in_executor(self._device_thread, next, self._chores, self)
            except RuntimeError:  # the interpreter ends, and the thread has before the engine
                break
            try:
                if await chore:
                    self._chores = None  # none is left
            except Exception:  # noqa: BLE001 - what was to make requests quicker must not fail them
                _log.exception("chores are given up")
                self._chores = None
        await self._wake.wait()

    def _launch(self, *, ahead: bool) -> _Flight | None:
        """Plan an iteration and submit it; None if there is nothing to run."""
        now = self._clock()
        plan = self.scheduler.plan(now, ahead=ahead)
        if plan is None:
            return None
        step = self._tabulator.build(plan)
        self.tallies.tasks = step.tasks
        self.tickets.note_scheduled(plan, now)
        flight = _Flight(plan, step, now)
        if step.num_mask_rows and ahead:
            flight.forwarded = self._device_thread.submit(self._runner.forward, step)
        else:
            mask = self._mask(flight)
            run = self._device_thread.submit(self._runner.run, step, mask)
            flight.result = asyncio.wrap_future(run)
        if not ahead and self._gap_since is not None:
            flight.gap = self._clock() - self._gap_since
            self.tallies.host_gap_seconds += flight.gap
        return flight

    def _mask(self, flight: _Flight) -> np.ndarray | None:
        if not flight.step.num_mask_rows:
            return None
        mask = np.empty((flight.step.num_mask_rows, self._num_words), np.int32)
        for seq in fill_masks(flight.plan, mask):
            _log.error("request %s: its constraint failed", seq.request.id)
            error = EngineError("the request's constraint failed", code="constraint_failed")
            self.tickets.fail(seq, error)
        return mask

    def _submit_sampling(self, flight: _Flight) -> None:
        """The second half of an iteration whose masks had to wait for the commit before it.

        Goes to the device thread at once, before anything of the next iteration can.
        """
        forwarded, mask = flight.forwarded, self._mask(flight)
        assert forwarded is not None

        def sample() -> StepResult:
            return self._runner.sample(forwarded.result(), mask)

        flight.result = asyncio.wrap_future(self._device_thread.submit(sample))

    async def _plan_ahead(self, flight: _Flight) -> _Flight | None:
        """Plan the next iteration shortly before this one ends: late enough that requests which
        arrive meanwhile are in it, early enough that the device does not wait."""
        if not self._async_scheduling or flight.plan.has_drafts or self.state == "dead":
            return None
        if self._wants_to_draft():
            return None
        begun = max(flight.submitted, self._device_free_at)
        left = begun + self._expected_s(flight.plan.num_tokens) - PLAN_MARGIN_S - self._clock()
        if left > 0 and flight.result is not None:
            await asyncio.wait([flight.result], timeout=left)
        return self._launch(ahead=True)

    def _expected_s(self, num_tokens: int) -> float:
        """How long an iteration will take at least, as far as is known."""
        size = _size_class(num_tokens)
        smaller = [k for k in self._durations if k <= size]
        return self._durations[max(smaller)] if smaller else 0.0

    async def _await_result(self, flight: _Flight) -> StepResult | Exception:
        assert flight.result is not None
        done, _ = await asyncio.wait([flight.result], timeout=self._watchdog_s)
        if not done:
            _log.error("an iteration runs longer than %.0f s", self._watchdog_s)
            self._die("the device does not answer")
            return EngineError("hung")
        try:
            result = flight.result.result()
        except Exception as e:  # noqa: BLE001 - the edge: a step that raises fails its requests
            return e
        now = self._clock()
        seconds = now - max(flight.submitted, self._device_free_at)
        flight.seconds = seconds
        self._device_free_at = self._gap_since = now
        self.tallies.step_seconds += seconds
        self.tallies.iterations[flight.plan.num_tokens] += 1
        key = _size_class(flight.plan.num_tokens)
        known = self._durations.get(key, seconds)
        # A quick fall and a slow rise: planning too early costs less than an idle device.
        self._durations[key] = min(seconds, known + 0.1 * (seconds - known))
        budgets = self._budgets
        if budgets is not None and budgets.observe(flight.plan.num_tokens, seconds):
            self.scheduler.set_budgets(budgets.full, budgets.mixed)
            _log.info(
                "iterations are faster than at the start: of %d tokens from now on, %d beside "
                "decodes",
                self.scheduler.budget,
                self.scheduler.mixed_budget,
            )
        return result

    async def _commit_failure(
        self, flight: _Flight, cause: Exception, following: _Flight | None
    ) -> None:
        self.tallies.failed_steps += 1
        self._failed_in_a_row += 1
        _log.error("iteration %d failed", flight.plan.number, exc_info=cause)
        error = EngineError("the model failed on this request's iteration", code="step_failed")
        ahead = None if following is None else following.plan
        self.tickets.deliver(fail(self.queues, flight.plan, error, ahead))
        if following is not None:
            vain = following.result
            if vain is None and following.forwarded is not None:
                vain = asyncio.wrap_future(following.forwarded)
            assert vain is not None
            done, _ = await asyncio.wait([vain], timeout=self._watchdog_s)
            if not done:
                self._die("the device does not answer")
                return
            vain.exception()  # its outcome is of no interest, failed or not
        if self._failed_in_a_row >= MAX_FAILED_STEPS:
            if await self._device_answers():
                self._failed_in_a_row = 0
            else:
                self._die("the device fails every iteration")

    async def _device_answers(self) -> bool:
        """Whether an iteration without anybody's data succeeds; nothing is in flight now."""
        plan = self.scheduler.probe(self._clock())
        if plan is None:
            return True
        step = self._tabulator.build(plan)
        run = asyncio.wrap_future(self._device_thread.submit(self._runner.run, step, None))
        try:
            await asyncio.wait_for(asyncio.shield(run), self._watchdog_s)
        except Exception:  # noqa: BLE001 - the edge: whatever it was, the device does not work
            _log.exception("an iteration of one token of nobody's failed too")
            return False
        finally:
            self.scheduler.end_probe(plan)
        return True

    def _wants_to_draft(self) -> bool:
        if self._drafter is None:
            return False
        try:
            return self._drafter.wants_to_draft()
        except Exception:  # noqa: BLE001 - a plug-in's fault is not the requests' fault
            self._switch_drafting_off()
            return False

    async def _draft(self, flight: _Flight, following: _Flight | None) -> None:
        """Let the drafter learn, and propose if nothing is in flight."""
        drafter = self._drafter
        if drafter is None:
            return
        loop = asyncio.get_running_loop()
        try:
            gap = flight.gap if self._async_scheduling else 0.0
            drafter.observe(flight.plan, flight.seconds, gap)
            if following is None:
                running = self.queues.running
                ready = [s for s in running if s.remaining == 1 and s.finish is None]
                async with asyncio.timeout(self._watchdog_s):
                    await drafter.propose(
                        ready, lambda work: loop.run_in_executor(self._device_thread, work)
                    )
        except Exception:  # noqa: BLE001 - a plug-in's fault is not the requests' fault
            self._switch_drafting_off()

    def _forget(self, seq: Sequence) -> None:
        """A sequence has ended."""
        try:
            if self._drafter is not None:
                self._drafter.forget(seq)
        except Exception:  # noqa: BLE001 - a plug-in's fault is not the requests' fault
            self._switch_drafting_off()

    def _switch_drafting_off(self) -> None:
        _log.exception("the drafter failed and is switched off")
        self._drafter = None

    def _die(self, why: str) -> None:
        self.state = "dead"
        self._idle.set()
        self.dead.set()
        self.tickets.fail_all(EngineError(why, code="engine_dead"))

    def snapshot(self) -> dict[str, Any]:
        """Counters and gauges now."""
        return snapshot(self.queues, self.tallies)
