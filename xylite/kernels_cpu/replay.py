"""Forward passes, recorded once and replayed without the interpreter.

A layer makes eight calls; of a pass over one token, Python would take a third, and give up its
lock to the event loop between any two of them. So the calls are recorded, with all their arguments,
and made in one. A recording depends on the number of tokens; every other number that changes
is read from arrays, which have room for any batch and are filled anew.
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

# Passes of so few tokens are recorded at once: calls take much of their time, and where every
# sequence has one token, the event loop has most to do meanwhile.
SMALL: Final = 64
SMALL_DECODES: Final = 256
# Others when their number comes up again, as that of a full iteration does: 2 to 5 % of 100 to 500
# tokens' time. Beyond this, calls hardly count, and memory would.
MAX_TOKENS: Final = 2048
MAX_BYTES: Final = 16 * 2**20  # of one owner's recordings; the longest unused go first
MAX_MET: Final = 1024  # of one owner
ALIGNMENT: Final = 64
LEAST_ROOM: Final = 128  # sequences, blocks of a sequence, tasks, merges

Forward = Callable[[Any, Any], tuple[Tensor, Any]]

_log = logging.getLogger(__name__)


class _Buffers:
    """Memory of activations. What nobody holds any more is given out again, as in the pass itself,
    so that all layers work in the same few buffers; each has room for `max_tokens`, so that all
    recordings do.

    tokens  of the pass that is being recorded
    """

    def __init__(self, max_tokens: int) -> None:
        self.tokens = max_tokens
        self._max_tokens = max_tokens
        self._free: dict[tuple[int, int], list[np.ndarray]] = {}
        self._all: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor; its memory is kept and reused."""
        size = int(np.prod(shape)) * dtype.itemsize
        if shape[0] == self.tokens or len(shape) == 3:  # q has heads first
            unit, whole = size // self.tokens, size // self.tokens * self._max_tokens
        else:  # of the last layer, which may have fewer rows
            unit = whole = 1 << max(size - 1, 1).bit_length()
        free = self._free.setdefault((unit, whole), [])
        buffer = free.pop() if free else self._new(whole)
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
    """Numbers of tokens and of last ones: the calls over the arrays, where the result is left."""

    calls: Recording
    hidden: Tensor
    keeps: tuple[Any, ...]


class _Passes:
    """What is known of one owner's passes over one cache.

    cache     where its memory is, and of what shape
    latest    the object, which mostly is that of the pass before
    arrays    a batch, as the recordings read it
    recorded  by numbers of tokens and of `num_last`, the longest unused first
    met       such numbers that are recorded when they come up again
    """

    def __init__(self, cache: tuple[Any, ...]) -> None:
        self.cache = cache
        self.latest: Any = None
        self.arrays: dict[str, np.ndarray] = {}
        self.recorded: dict[tuple[int, int], _Replayed] = {}
        self.met: dict[tuple[int, int], None] = {}
        self.foreign = False

    def fill(self, batch: Any) -> None:
        """Copy a batch into the arrays; where it does not fit, into new ones, and recordings that
        read the old ones are forgotten."""
        leaves = tree.leaves(batch)
        if self._fits(leaves):
            return
        self.recorded.clear()
        before = self.arrays
        self.arrays = {}
        for name, leaf in tree.named_leaves(batch):
            room = _room(name, leaf.shape)
            if name in before:  # never less: else batches of two kinds would outgrow each other
                room = tuple(map(max, room, before[name].shape))
            self.arrays[name] = np.zeros(room, leaf.numpy().dtype)
        fits = self._fits(leaves)
        assert fits

    def _fits(self, leaves: list[Tensor]) -> bool:
        """Copies as much as fits; whether all does."""
        if len(leaves) != len(self.arrays):
            return False
        for array, leaf in zip(self.arrays.values(), leaves, strict=True):
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

    def note(self, key: tuple[int, int]) -> None:
        """Have a pass recorded when it comes up again, unless MAX_MET others do before."""
        self.met[key] = None
        if len(self.met) > MAX_MET:
            del self.met[next(iter(self.met))]

    def forget_oldest(self) -> None:
        """Keep no more than MAX_BYTES, and the newest whatever it takes."""
        left = sum(r.calls.nbytes for r in self.recorded.values())
        while left > MAX_BYTES and len(self.recorded) > 1:
            oldest = next(iter(self.recorded))
            left -= self.recorded.pop(oldest).calls.nbytes
            self.met.pop(oldest, None)


class Replays:
    """Runs forward passes; those of a number of tokens that comes up are recorded, and replayed."""

    def __init__(self, kernels: Kernels, packer: Packer):
        self._kernels = kernels
        self._packer = packer
        self._buffers: dict[int, _Buffers] = {}  # by the most tokens
        # By the object whose method the pass is: addresses in a recording are those of its weights.
        self._passes: weakref.WeakKeyDictionary[Any, _Passes] = weakref.WeakKeyDictionary()

    def __call__(self, forward: Forward, kv: Any, batch: Any) -> tuple[Tensor, Any]:
        """forward(kv, batch), with its hidden states and the cache to use next.

        The hidden states last until the next pass. `forward` must be the same pass whenever it is
        a method of the same object, and write the cache in place. A function runs as it is: one
        made for the call would be recorded at every call.
        """
        tokens = batch.tokens.shape[0]
        owner = getattr(forward, "__self__", None)
        if owner is None or not 0 < tokens <= MAX_TOKENS or batch.tree_mask.numel():
            return forward(kv, batch)
        passes = self._passes_of(owner, kv)
        key = tokens, batch.num_last
        is_decode = batch.q_start.shape[0] == tokens + 1
        is_small = tokens <= (SMALL_DECODES if is_decode else SMALL)
        if passes.foreign:
            return forward(kv, batch)
        if not (is_small or key in passes.met):
            passes.note(key)
            return forward(kv, batch)
        passes.fill(batch)
        found = passes.recorded.pop(key, None)
        if found is None:
            try:
                found = self._record(forward, kv, batch, passes.arrays)
            except Foreign as e:
                _log.info("forward passes are not replayed: %s is none of the kernels", e)
                passes.foreign = True
                passes.recorded.clear()
                return forward(kv, batch)
            passes.recorded[key] = found
            passes.forget_oldest()
        else:
            passes.recorded[key] = found  # as the newest
        found.calls.replay()
        return found.hidden, kv

    def _passes_of(self, owner: Any, kv: Any) -> _Passes:
        passes = self._passes.get(owner)
        if passes is None or passes.latest is not kv:
            cache = tuple((leaf.data_ptr(), leaf.shape, leaf.dtype) for leaf in tree.leaves(kv))
            if passes is None or passes.cache != cache:
                passes = self._passes[owner] = _Passes(cache)
            passes.latest = kv
        return passes

    def _record(
        self, forward: Forward, kv: Any, batch: Any, arrays: dict[str, np.ndarray]
    ) -> _Replayed:
        """The pass over the arrays, for as many tokens as the batch has; nothing is computed."""
        tokens = batch.tokens.shape[0]
        held = iter([a[:tokens] if name in _BY_TOKEN else a for name, a in arrays.items()])
        inside = tree.map(lambda _: torch.from_numpy(next(held)), batch)
        # The system gives memory for the tokens that are really there.
        most = SMALL_DECODES if tokens <= SMALL_DECODES else MAX_TOKENS
        buffers = self._buffers.setdefault(most, _Buffers(most))
        watch, buffers.tokens = _Watch(), tokens
        made = _Replayed(Recording(self._kernels), torch.empty(0), (inside, watch.made))
        with self._in(buffers), self._kernels.recorded(made.calls), watch:
            hidden, _ = forward(kv, inside)
        made.hidden = buffers.alias(hidden)
        return made

    @contextmanager
    def _in(self, buffers: _Buffers) -> Iterator[None]:
        """Let the kernels' results lie in memory that stays, for the calls of this thread."""
        before, here = self._packer.empty, threading.get_ident()

        def empty(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
            if threading.get_ident() != here:
                return before[dtype](shape)
            return buffers.empty(tuple(shape), dtype)

        self._packer.empty = {dtype: partial(empty, dtype) for dtype in before}
        try:
            yield
        finally:
            self._packer.empty = before


_BY_TOKEN: Final = ("tokens", "positions", "slots", "seq_of")


def _room(name: str, shape: torch.Size) -> tuple[int, ...]:
    """The shape that holds this array of any batch, or nearly any: those whose size does not follow
    from the number of tokens get room, and are made anew if a batch outgrows it."""
    path = name.split(".")
    field = path[2] if path[0] == "tasks" else path[0]
    if field in _BY_TOKEN:
        return (MAX_TOKENS,)
    if field in ("core_start", "parts", "tree_mask"):
        return tuple(shape)
    if field in ("tasks", "merges"):
        return (_some_more(shape[0]), *shape[1:])
    return tuple(_some_more(n) for n in shape)  # by sequence, and its blocks


def _some_more(n: int) -> int:
    """Room for n and as many again, a power of two."""
    return max(LEAST_ROOM, 1 << (2 * n - 1).bit_length()) if n else LEAST_ROOM
