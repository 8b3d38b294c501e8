"""The sequences there are: those that wait, those that run, and how they come and go.

A running sequence has a row and holds blocks. It loses both when it ends or is requeued, and starts
over when it is planned again.
"""

from dataclasses import dataclass, field

from xylite.errors import Overloaded, RequestError
from xylite.runtime.blocks import KVBlocks
from xylite.runtime.request import FinishReason, Request
from xylite.runtime.sequence import Sequence
from xylite.runtime.trials import Trials


@dataclass(slots=True)
class Counters:
    """What happened since the start. Tokens of prompts count once, when first computed or found."""

    num_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    spec_num_drafts: int = 0
    spec_num_draft_tokens: int = 0
    spec_num_accepted_tokens: int = 0
    spec_accepted_per_pos: list[int] = field(default_factory=list[int])
    corrupted: int = 0
    step_tokens: int = 0


class Queues:
    """Sequences that wait, those that run, and those that are suspected of making steps fail.

    max_num_seqs  sequences that run at once (rows)
    max_queued    sequences that may wait beyond them
    """

    def __init__(self, blocks: KVBlocks, *, max_num_seqs: int, max_queued: int):
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_queued = max_queued
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.counters = Counters()
        self.trials = Trials()
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._serial = 0

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def require_room(self, n: int) -> None:
        """Overloaded unless n more sequences may run or wait; RequestError if they never may."""
        limit = self.max_num_seqs + self.max_queued
        if n > limit:
            raise RequestError(
                f"this request makes {n} sequences, this server takes at most {limit} at a time",
                param="n",
            )
        if n > limit - self.num_unfinished:
            raise Overloaded(
                f"the server is full: {self.num_unfinished} sequences are running or waiting, the "
                f"limit is {limit}, and this request needs {n}"
            )

    def add(self, request: Request, now: float) -> list[Sequence]:
        """Queue a request's sequences; Overloaded if they do not fit into the queue."""
        n = request.params.n
        self.require_room(n)
        prompt = list(request.prompt) if n > 1 else None
        new = [Sequence(request, i, now, self._serial + i, prompt) for i in range(n)]
        self._serial += n
        self.waiting += new
        return new

    def admit(self, seq: Sequence) -> None:
        """Give a waiting sequence a row; there is one."""
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.row = self.free_rows.pop()
        self.blocks.attach(seq)

    def stop(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence now, whatever it is doing; its blocks come back when no step uses them."""
        if seq.finish is None:
            seq.finish = reason
            self.leave(seq)

    def leave(self, seq: Sequence) -> None:
        """Let go of a finished sequence, unless a step in flight still holds its blocks."""
        if seq.row < 0:
            if seq in self.waiting:
                self.waiting.remove(seq)
        elif not seq.num_inflight:
            self.give_back(seq)
            self.running.remove(seq)

    def give_back(self, seq: Sequence) -> None:
        """Blocks and row return; the sequence starts over when planned again."""
        self.blocks.release(seq)
        self.free_rows.append(seq.row)
        seq.row = -1
        seq.num_computed = seq.num_planned = seq.num_pending = 0
        seq.draft = None
        seq.epoch += 1

    def requeue(self, seq: Sequence, *, poisoned: bool = False) -> None:
        """Start over later. poisoned: a step has written to its blocks what nobody may read."""
        seq.poisoned = poisoned
        self.give_back(seq)
        seq.poisoned = False
        self.running.remove(seq)
        self.waiting.append(seq)

    def preempt(self, seq: Sequence) -> None:
        self.requeue(seq)
        seq.num_preemptions += 1
        self.counters.num_preemptions += 1
