"""What an engine counts: request records with their times, and one snapshot of everything."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from xylite.runtime import task_table
from xylite.runtime.queues import Queues
from xylite.runtime.request import FinishReason
from xylite.runtime.step import TaskTable

_SEVERITY = {"error": 3, "abort": 2, "length": 1, "stop": 0}


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request's course; all times in seconds. A request of n sequences is one record.

    finish_reason  the worst of its sequences': error, abort, length, stop
    queue_s        arrival to the first iteration that computes it
    prefill_s      from there to the first token
    decode_s       first to last token
    inference_s    prefill_s + decode_s
    ttft_s         arrival to the first token; None if there was none
    itl_s          gaps between deliveries of one sequence
    """

    request_id: str
    num_prompt: int
    max_tokens: int
    n: int
    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_output: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason = "stop"
    ended: float = 0.0
    itl_s: list[float] = field(default_factory=list[float])

    def worst(self, reason: FinishReason) -> None:
        """Take over the reason of one more sequence that ended."""
        if _SEVERITY[reason] > _SEVERITY[self.finish_reason]:
            self.finish_reason = reason

    @property
    def e2e_s(self) -> float:
        return self.ended - self.arrival

    @property
    def queue_s(self) -> float:
        return (self.ended if self.scheduled is None else self.scheduled) - self.arrival

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def prefill_s(self) -> float:
        if self.scheduled is None:
            return 0.0
        return (self.ended if self.first_token is None else self.first_token) - self.scheduled

    @property
    def decode_s(self) -> float:
        if self.first_token is None or self.last_token is None:
            return 0.0
        return self.last_token - self.first_token

    @property
    def inference_s(self) -> float:
        return self.prefill_s + self.decode_s


class Observer(Protocol):
    """Told about every request once, when it has ended."""

    def on_finished(self, record: RequestRecord) -> None: ...


@dataclass(slots=True)
class Tallies:
    """What the engine loop counts beside the queues' counters.

    generation_tokens  tokens delivered to clients: what usage adds up to
    iterations         committed iterations by their number of tokens
    tasks              attention tasks of the latest iteration, one table per attention kind
    """

    finished: Counter[str] = field(default_factory=Counter[str])
    rejections: Counter[str] = field(default_factory=Counter[str])
    iterations: Counter[int] = field(default_factory=Counter[int])
    generation_tokens: int = 0
    step_seconds: float = 0.0
    host_gap_seconds: float = 0.0
    failed_steps: int = 0
    tasks: tuple[TaskTable, ...] = ()


def snapshot(queues: Queues, tallies: Tallies) -> dict[str, Any]:
    """Counters and gauges now."""
    blocks, c = queues.blocks, queues.counters
    used = blocks.num_blocks - blocks.num_free
    running = sum(s.finish is None for s in queues.running)
    return {
        "num_running": running,
        "num_waiting": len(queues.waiting),
        "kv_usage": used / blocks.num_blocks,
        "num_blocks": blocks.num_blocks,
        "num_free_blocks": blocks.num_free,
        "num_cached_blocks": blocks.num_cached,
        "block_size": blocks.block_size,
        "enable_prefix_caching": blocks.reuse,
        "prefix_queries": c.prefix_queries,
        "prefix_hits": c.prefix_hits,
        "num_preemptions": c.num_preemptions,
        "prompt_tokens": c.prompt_tokens,
        "prompt_tokens_cached": c.prompt_tokens_cached,
        "generation_tokens": tallies.generation_tokens,
        "num_steps": c.num_steps,
        "step_tokens": c.step_tokens,
        "iterations": dict(tallies.iterations),
        "step_seconds": tallies.step_seconds,
        "host_gap_seconds": tallies.host_gap_seconds,
        "failed_steps": tallies.failed_steps,
        "attention_balance": max(map(task_table.balance, tallies.tasks), default=1.0),
        "spec_num_drafts": c.spec_num_drafts,
        "spec_num_draft_tokens": c.spec_num_draft_tokens,
        "spec_num_accepted_tokens": c.spec_num_accepted_tokens,
        "spec_accepted_per_pos": list(c.spec_accepted_per_pos),
        "corrupted": c.corrupted,
        "rejections": dict(tallies.rejections),
        "finished": dict(tallies.finished),
    }
