"""Forward passes recorded once per bucket of tokens and replayed: CUDA graphs, NPU graphs.

The kernels read every number that changes from memory, so a recording depends on the bucket of T
and on nothing else: prefill, decode and verify in any mix replay the same one. An iteration's
arrays are copied into the recording's own, which have room for the bucket; arrays whose size
follows from the batch in other ways (tasks, blocks of a sequence) get twice the room when they
outgrow it, and the bucket is recorded anew.
"""

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from xylite import tree
from xylite.kernels_triton.launch import Counts

# Beyond the last, the kernels run longer than their launches take.
BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LEAST_ROOM: Final = 64

Run = Callable[[], None]
Forward = Callable[[Any, Any], tuple[Tensor, Any]]

_log = logging.getLogger(__name__)


def _room(n: int) -> int:
    """Room for n elements and some more."""
    return max(LEAST_ROOM, 1 << (n - 1).bit_length()) if n else LEAST_ROOM


def _shape(name: str, shape: Sequence[int], tokens: int) -> tuple[int, ...]:
    """The shape that holds the field `name` of any batch of at most `tokens` tokens."""
    path = name.split(".")
    field = path[2] if path[0] == "tasks" else path[0]
    if field in ("core_start", "parts", "tree_mask"):
        return tuple(shape)
    if field in ("tasks", "merges"):
        return (_room(shape[0]), *shape[1:])
    if field == "block_table":
        return tokens, _room(shape[1])
    return (tokens + (field == "q_start"),)


@dataclass(slots=True, eq=False)
class _Recording:
    """One bucket's arrays, and what replays the pass over them."""

    arrays: dict[str, Tensor]
    rows: Tensor
    hidden: list[Tensor]  # one: where a replay leaves its result
    replay: Run

    def holds(self, batch: Any) -> bool:
        """Every array of the batch fits."""
        return all(
            len(leaf.shape) == len(self.arrays[name].shape)
            and all(a <= b for a, b in zip(leaf.shape, self.arrays[name].shape, strict=True))
            for name, leaf in tree.named_leaves(batch)
        )


def _fill(arrays: dict[str, Tensor], batch: Any) -> None:
    for name, leaf in tree.named_leaves(batch):
        arrays[name][tuple(slice(0, n) for n in leaf.shape)].copy_(leaf)


class Graphs:
    """Runs forward passes, recorded where that is possible.

    capture  records a pass and gives what replays it: same arrays, same addresses. It may run the
             pass first, as often as it likes; RuntimeError if it cannot record it
    """

    def __init__(
        self,
        counts: Counts,
        capture: Callable[[Run], Run],
        buckets: Sequence[int] = BUCKETS,
    ):
        self._counts = counts
        self._capture = capture
        self._buckets = buckets
        self._recorded: dict[int, _Recording] = {}
        self._cache: list[int] = []
        self._cannot: str | None = None
        self._told: set[str] = set()

    def __call__(self, forward: Forward, kv: Any, batch: Any) -> tuple[Tensor, Any]:
        """forward(kv, batch), with its hidden states [T, C] and the cache to use next.

        `forward` must be the same pass at every call. It writes the cache in place; when another
        cache is given, everything is recorded anew.
        """
        tokens = batch.tokens.shape[0]
        reason = self._eager_reason(batch, tokens)
        if reason is not None:
            if reason not in self._told:
                self._told.add(reason)
                _log.info("forward passes are not replayed %s", reason)
            return forward(kv, batch)
        addresses = [leaf.data_ptr() for leaf in tree.leaves(kv)]
        if self._cache != addresses:
            self._recorded.clear()
            self._cache = addresses
        bucket = self._buckets[bisect.bisect_left(self._buckets, tokens)]
        recording = self._recorded.get(bucket)
        if recording is None or not recording.holds(batch):
            try:
                recording = self._record(forward, kv, batch, bucket)
            except RuntimeError as e:
                self._cannot = f"at all: recording one failed ({e})"
                self._recorded.clear()
                return self(forward, kv, batch)
            self._recorded[bucket] = recording
        _fill(recording.arrays, batch)
        recording.rows.copy_(self._counts(tokens))
        recording.replay()
        return recording.hidden[0][:tokens].clone(), kv

    def _eager_reason(self, batch: Any, tokens: int) -> str | None:
        if self._cannot is not None:
            return self._cannot
        if not tokens:
            return "without tokens"
        if tokens > self._buckets[-1]:
            return f"beyond {self._buckets[-1]} tokens"
        if batch.tree_mask.numel():
            return "with draft trees"
        return None

    def _record(self, forward: Forward, kv: Any, batch: Any, bucket: int) -> _Recording:
        """The pass in arrays of the bucket's size; they hold this batch while it is recorded."""
        arrays = {
            name: torch.zeros(
                _shape(name, leaf.shape, bucket), dtype=leaf.dtype, device=leaf.device
            )
            for name, leaf in tree.named_leaves(batch)
        }
        _fill(arrays, batch)
        rows = self._counts(batch.tokens.shape[0]).clone()
        hidden: list[Tensor] = []

        def run() -> None:
            # A batch object of its own: what layers share is computed within the recording.
            held = iter(arrays.values())
            with self._counts.telling(rows):
                out, _ = forward(kv, tree.map(lambda _: next(held), batch))
            hidden[:] = [out]

        replay = self._capture(run)
        _log.info("recorded the forward pass for up to %d tokens", bucket)
        return _Recording(arrays, rows, hidden, replay)
