"""Memory of an emulated core: byte arrays, and views on them as the compiled program names them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

STORAGE: dict[str, type[np.generic]] = {
    "i1": np.uint8,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "f16": np.float16,
    "bf16": np.uint16,
    "f32": np.float32,
}
BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "bf16": 16, "f32": 32}


class Fault(Exception):
    """The program did something that the chip would not survive, or that is not emulated."""


def to_bf16(values: Any) -> NDArray[np.uint16]:
    """The bits of bfloat16 values, rounded to nearest even; NaN stays NaN."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bf16(bits: NDArray[np.generic]) -> NDArray[np.float32]:
    """float32 values of bfloat16 bits."""
    return (np.ascontiguousarray(bits).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def row_major(sizes: Sequence[int]) -> list[int]:
    """Strides, in elements, of a dense array."""
    strides, step = [], 1
    for n in reversed(sizes):
        strides.append(step)
        step *= n
    return strides[::-1]


class View:
    """A memref: elements of `dtype` in `memory`, from bit `bit` on. Every access checks bounds.

    base  the first bit of the allocation that this is a view of
    """

    __slots__ = ("base", "bit", "dtype", "memory", "sizes", "space", "strides")

    def __init__(
        self,
        memory: Bytes,
        dtype: str,
        bit: int,
        sizes: Sequence[int],
        strides: Sequence[int],
        space: str,
        base: int | None = None,
    ):
        self.memory, self.dtype, self.bit, self.space = memory, dtype, bit, space
        self.base = bit if base is None else base
        self.sizes, self.strides = list(sizes), list(strides)

    def like(
        self, bit: int, sizes: Sequence[int], strides: Sequence[int], dtype: str | None = None
    ) -> "View":
        """Another view on the same memory."""
        return View(self.memory, dtype or self.dtype, bit, sizes, strides, self.space, self.base)

    def _empty(self) -> bool:
        """True if there is no element; Fault if any is outside the memory."""
        if any(n <= 0 for n in self.sizes):
            return True
        bits = BITS[self.dtype]
        spans = [(n - 1) * t for n, t in zip(self.sizes, self.strides, strict=True)]
        low = self.bit + sum(min(0, x) for x in spans) * bits
        high = self.bit + (sum(max(0, x) for x in spans) + 1) * bits
        if low < 0 or high > self.memory.size * 8:
            raise Fault(
                f"{self.space}: access [{low // 8}, {high // 8}) outside [0, {self.memory.size})"
            )
        return False

    def _window(self) -> NDArray[Any]:
        kind = STORAGE[self.dtype]
        if self._empty():
            return np.zeros([max(n, 0) for n in self.sizes], kind)
        size = BITS[self.dtype] // 8
        tail = self.memory[self.bit // 8 :]
        tail = tail[: tail.size // size * size].view(kind)
        return np.lib.stride_tricks.as_strided(tail, self.sizes, [t * size for t in self.strides])

    def _bit_numbers(self) -> NDArray[np.int64]:
        numbers = np.full(self.sizes, self.bit, np.int64)
        for axis, (n, stride) in enumerate(zip(self.sizes, self.strides, strict=True)):
            shape = [1] * len(self.sizes)
            shape[axis] = -1
            numbers = numbers + (np.arange(n) * stride).reshape(shape)
        return numbers

    def get(self) -> NDArray[Any]:
        """A copy of the elements; bfloat16 as float32, i1 as bool."""
        if self.dtype == "i1":
            if self._empty():
                return np.zeros([max(n, 0) for n in self.sizes], bool)
            at = self._bit_numbers()
            return ((self.memory[at >> 3] >> (at & 7)) & 1).astype(bool)
        if self.dtype == "bf16":
            return from_bf16(self._window())
        return self._window().copy()

    def put(self, values: Any) -> None:
        """Write the elements, converting `values` to the element type."""
        if self.dtype == "i1":
            if self._empty():
                return
            at = self._bit_numbers().ravel()
            on = np.broadcast_to(values, self.sizes).ravel().astype(bool)
            masks = (1 << (at & 7)).astype(np.uint8)
            np.bitwise_and.at(self.memory, at >> 3, ~masks)
            np.bitwise_or.at(self.memory, at[on] >> 3, masks[on])
            return
        with np.errstate(all="ignore"):
            if self.dtype == "bf16":
                values = to_bf16(np.broadcast_to(values, self.sizes))
            self._window()[...] = np.asarray(values).astype(STORAGE[self.dtype])
