"""Forward passes of few tokens, recorded once and replayed without the interpreter.

A layer makes eight calls; of a pass over one token, Python would take a third, and give up its
lock to the event loop between any two of them. So the calls are recorded, with all their arguments,
and made again in one. A recording depends on the number of tokens; every other number that changes
is read from arrays, which have room for any batch of as many tokens and are filled anew.
"""

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xylite import tree
from xylite.kernels_cpu.library import Foreign, Kernels, Recording
from xylite.kernels_cpu.packed import Packer

MAX_TOKENS: Final = 64  # beyond, products take so long that calls do not count
MAX_RECORDINGS: Final = 32
ALIGNMENT: Final = 64
LEAST_ROOM: Final = 16

Forward = Callable[[Any, Any], tuple[Tensor, Any]]

_log = logging.getLogger(__name__)


class _Buffers:
    """Memory of one recording's activations. What nobody holds any more is given out again, as in
    the pass itself, so that all layers work in the same few buffers."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self._all: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor; its memory is kept and reused."""
        size = int(np.prod(shape)) * dtype.itemsize
        free = self._free.setdefault(size, [])
        buffer = free.pop() if free else self._new(size)
        lent = buffer[:]  # lives as long as a tensor looks at it
        weakref.finalize(lent, free.append, buffer)
        return torch.from_numpy(lent).view(dtype).view(shape)

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
    """What is known of one owner's passes: its cache, and the recordings by number of tokens, the
    one used last at the end."""

    cache: tuple[int, ...]
    recorded: dict[int, _Replayed]
    foreign: str | None = None


class Replays:
    """Runs forward passes; those of few tokens are recorded at the first and replayed after.

    max_tokens  the most tokens of a recorded pass
    """

    def __init__(self, kernels: Kernels, packer: Packer, max_tokens: int = MAX_TOKENS):
        self._kernels = kernels
        self._packer = packer
        self._max_tokens = max_tokens
        # By the object whose method the pass is: addresses in a recording are those of its weights.
        self._passes: weakref.WeakKeyDictionary[Any, _Passes] = weakref.WeakKeyDictionary()

    def __call__(self, forward: Forward, kv: Any, batch: Any) -> tuple[Tensor, Any]:
        """forward(kv, batch), with its hidden states [T, C] and the cache to use next.

        The hidden states last until the next pass. `forward` must be the same pass whenever it is
        a method of the same object, and write the cache in place.
        """
        tokens = batch.tokens.shape[0]
        if not 0 < tokens <= self._max_tokens or batch.tree_mask.numel():
            return forward(kv, batch)
        owner = getattr(forward, "__self__", forward)
        cache = tuple(leaf.data_ptr() for leaf in tree.leaves(kv))
        passes = self._passes.get(owner)
        if passes is None or passes.cache != cache:
            passes = self._passes[owner] = _Passes(cache, {})
        if passes.foreign is not None:
            return forward(kv, batch)
        found = passes.recorded.pop(tokens, None)
        if found is not None and found.fill(tree.leaves(batch)):
            passes.recorded[tokens] = found
            found.calls.replay()
            return found.hidden, kv
        return self._record(passes, forward, kv, batch), kv

    def _record(self, passes: _Passes, forward: Forward, kv: Any, batch: Any) -> Tensor:
        """The pass over arrays with room for any batch of as many tokens."""
        tokens = batch.tokens.shape[0]
        named = list(tree.named_leaves(batch))
        arrays = [np.zeros(_room(name, x.shape, tokens), x.numpy().dtype) for name, x in named]
        held = iter(arrays)
        inside = tree.map(lambda _: torch.from_numpy(next(held)), batch)
        watch, buffers = _Watch(), _Buffers()
        made = _Replayed(arrays, Recording(self._kernels), torch.empty(0), (inside, buffers, watch))
        assert made.fill([x for _, x in named])
        try:
            with self._in(buffers), self._kernels.recorded(made.calls), watch:
                made.hidden, _ = forward(kv, inside)
        except Foreign as e:
            # What was written so far is written again, the same.
            _log.info("forward passes are not replayed: %s is none of the kernels", e)
            passes.foreign = str(e)
            passes.recorded.clear()
            return forward(kv, batch)[0]
        passes.recorded[tokens] = made
        if len(passes.recorded) > MAX_RECORDINGS:
            del passes.recorded[next(iter(passes.recorded))]
        return made.hidden

    @contextmanager
    def _in(self, buffers: _Buffers) -> Iterator[None]:
        """Let the kernels' results lie in these buffers."""
        before = self._packer.empty
        self._packer.empty = {
            dtype: lambda shape, dtype=dtype: buffers.empty(tuple(shape), dtype) for dtype in before
        }
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
