"""Forward passes of few tokens, recorded once and replayed without the interpreter.

A layer makes eight calls; of a pass over one token, Python would take a third, and give up its
lock to the event loop between any two of them. So the calls are recorded, with all their arguments,
and made in one. A recording depends on the number of tokens; every other number that changes
is read from arrays, which have room for any batch of as many tokens and are filled anew.
"""

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xylite import tree
from xylite.kernels_cpu.library import Foreign, Kernels, Recording
from xylite.kernels_cpu.packed import Packer

MAX_TOKENS: Final = 64  # beyond, products take so long that calls hardly count
# Where every sequence has one token, batches of the same size come again and again, and the event
# loop has most to do meanwhile.
MAX_DECODES: Final = 256
MAX_BYTES: Final = 64 * 2**20  # of one owner's recordings; the oldest go first
ALIGNMENT: Final = 64
LEAST_ROOM: Final = 128  # blocks of a sequence, tasks, merges

Forward = Callable[[Any, Any], tuple[Tensor, Any]]

_log = logging.getLogger(__name__)


class _Buffers:
    """Memory of activations. What nobody holds any more is given out again, as in the pass itself,
    so that all layers work in the same few buffers; each has room for `max_tokens`, so that all
    recordings do.

    tokens  of the pass that is being recorded; sizes are multiples of it
    """

    def __init__(self, max_tokens: int) -> None:
        self.tokens = max_tokens
        self._max_tokens = max_tokens
        self._free: dict[int, list[np.ndarray]] = {}
        self._all: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor; its memory is kept and reused."""
        size = int(np.prod(shape)) * dtype.itemsize
        unit = -(-size // self.tokens)
        free = self._free.setdefault(unit, [])
        buffer = free.pop() if free else self._new(unit * self._max_tokens)
        lent = buffer[:size]  # lives as long as a tensor looks at it
        weakref.finalize(lent, free.append, buffer)
        return torch.from_numpy(lent).view(dtype).view(shape)

    def alias(self, x: Tensor) -> Tensor:
        """The same elements; their memory may be given out again when x has gone."""
        place = (ctypes.c_char * x.nbytes).from_address(x.data_ptr())
        return torch.frombuffer(place, dtype=x.dtype).view(x.shape)

    def _new(self, size: int) -> np.ndarray:
        whole = np.empty(size + ALIGNMENT, np.uint8)
        start = -whole.ctypes.data % ALIGNMENT
        self._all.append(whole)
        return whole[start : start + size]


class _Watch(TorchDispatchMode):
    """Raises Foreign where torch computes itself: a replay would not do it again."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch's compiler is imported: a second, and 100 MiB

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _EMPTY and not func.is_view:
            raise Foreign(str(func))
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY:
            self.made.append(result)  # its address is in the recording
        return result


_EMPTY: Final = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)


@dataclass(slots=True, eq=False)
class _Replayed:
    """One number of tokens: arrays for a batch, the calls over them, where the result is left."""

    arrays: list[np.ndarray]
    calls: Recording
    hidden: Tensor
    keeps: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """Of the arrays; those of long sequences are most of what a recording takes."""
        return sum(a.nbytes for a in self.arrays)

    def fill(self, leaves: list[Tensor]) -> bool:
        """Copy a batch into the arrays; False if one does not fit."""
        for array, leaf in zip(self.arrays, leaves, strict=True):
            values = leaf.numpy()
            shape = values.shape
            if shape == array.shape:
                array[...] = values
            elif len(shape) == 1 and shape[0] <= array.shape[0]:
                array[: shape[0]] = values
            elif len(shape) == 2 and shape[0] <= array.shape[0] and shape[1] <= array.shape[1]:
                array[: shape[0], : shape[1]] = values
            else:
                return False
        return True


@dataclass(slots=True, eq=False)
class _Passes:
    """What is known of one owner's passes: its cache, and the recordings by number of tokens.

    cache   where its memory is, and of what shape
    latest  the object, which mostly is that of the pass before
    """

    cache: tuple[Any, ...]
    latest: Any
    recorded: dict[int, _Replayed]
    foreign: bool = False

    def forget_oldest(self) -> None:
        """Keep no more than MAX_BYTES, and the newest whatever it takes."""
        left = sum(r.nbytes for r in self.recorded.values())
        while left > MAX_BYTES and len(self.recorded) > 1:
            oldest = next(iter(self.recorded))
            left -= self.recorded.pop(oldest).nbytes


class Replays:
    """Runs forward passes; those of few tokens are recorded when their number comes up, and
    replayed.

    max_tokens  the most tokens of a recorded pass that is not decode alone
    """

    def __init__(self, kernels: Kernels, packer: Packer, max_tokens: int = MAX_TOKENS):
        self._kernels = kernels
        self._packer = packer
        self._max_tokens = max_tokens
        self._buffers = _Buffers(max(max_tokens, MAX_DECODES))
        # By the object whose method the pass is: addresses in a recording are those of its weights.
        self._passes: weakref.WeakKeyDictionary[Any, _Passes] = weakref.WeakKeyDictionary()

    def __call__(self, forward: Forward, kv: Any, batch: Any) -> tuple[Tensor, Any]:
        """forward(kv, batch), with its hidden states [T, C] and the cache to use next.

        The hidden states last until the next pass. `forward` must be the same pass whenever it is
        a method of the same object, and write the cache in place. A function runs as it is: one
        made for the call would be recorded at every call.
        """
        tokens = batch.tokens.shape[0]
        is_decode = batch.q_start.shape[0] == tokens + 1
        most = MAX_DECODES if is_decode else self._max_tokens
        owner = getattr(forward, "__self__", None)
        if owner is None or not 0 < tokens <= most or batch.tree_mask.numel():
            return forward(kv, batch)
        passes = self._passes.get(owner)
        if passes is None or passes.latest is not kv:
            cache = tuple((leaf.data_ptr(), leaf.shape, leaf.dtype) for leaf in tree.leaves(kv))
            if passes is None or passes.cache != cache:
                passes = self._passes[owner] = _Passes(cache, kv, {})
            passes.latest = kv
        if passes.foreign:
            return forward(kv, batch)
        leaves = tree.leaves(batch)
        found = passes.recorded.get(tokens)
        if found is None or not found.fill(leaves):
            try:
                passes.recorded.pop(tokens, None)
                found = passes.recorded[tokens] = self._record(forward, kv, batch)
            except Foreign as e:
                _log.info("forward passes are not replayed: %s is none of the kernels", e)
                passes.foreign = True
                passes.recorded.clear()
                return forward(kv, batch)
            fits = found.fill(leaves)
            assert fits
            passes.forget_oldest()
        found.calls.replay()
        return found.hidden, kv

    def _record(self, forward: Forward, kv: Any, batch: Any) -> _Replayed:
        """The pass over arrays with room for any batch of as many tokens; nothing is computed."""
        tokens = batch.tokens.shape[0]
        named = list(tree.named_leaves(batch))
        arrays = [np.zeros(_room(name, x.shape, tokens), x.numpy().dtype) for name, x in named]
        held = iter(arrays)
        inside = tree.map(lambda _: torch.from_numpy(next(held)), batch)
        watch, self._buffers.tokens = _Watch(), tokens
        made = _Replayed(arrays, Recording(self._kernels), torch.empty(0), (inside, watch.made))
        with self._in_buffers(), self._kernels.recorded(made.calls), watch:
            hidden, _ = forward(kv, inside)
        made.hidden = self._buffers.alias(hidden)
        return made

    @contextmanager
    def _in_buffers(self) -> Iterator[None]:
        """Let the kernels' results lie in memory that stays, for the calls of this thread."""
        before, buffers, here = self._packer.empty, self._buffers, threading.get_ident()

        def empty(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
            if threading.get_ident() != here:
                return before[dtype](shape)
            return buffers.empty(tuple(shape), dtype)

        self._packer.empty = {dtype: partial(empty, dtype) for dtype in before}
        try:
            yield
        finally:
            self._packer.empty = before


def _room(name: str, shape: torch.Size, tokens: int) -> tuple[int, ...]:
    """The shape that holds this array of any batch of as many tokens, or nearly any: those whose
    size follows from the batch in other ways get room, and are recorded anew if they outgrow it."""
    path = name.split(".")
    field = path[2] if path[0] == "tasks" else path[0]
    if field in ("core_start", "parts", "tree_mask"):
        return tuple(shape)
    if field in ("tasks", "merges"):
        return (_some_more(shape[0]), *shape[1:])
    if field == "block_table":
        return tokens, _some_more(shape[1])
    return (tokens + (field == "q_start"),)


def _some_more(n: int) -> int:
    """Room for n and as many again, a power of two."""
    return max(LEAST_ROOM, 1 << (2 * n - 1).bit_length()) if n else LEAST_ROOM
