"""Statements about memory: views of it, and single elements."""

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from .cores import Core
from .memory import BITS, Fault, View, row_major
from .program_text import memref_type, names
from .statements import Env, Run, integer, integers, operands, pure, setter


def _reinterpret_cast(result: str | None, text: str) -> Run:
    match = re.match(
        r"memref\.reinterpret_cast (\S+) to offset: \[(.*?)\], sizes: \[(.*?)\], "
        r"strides: \[(.*?)\] :",
        text,
    )
    assert match, text
    base, offset, sizes, strides = match[1], names(match[2])[0], names(match[3]), match[4]
    steps = names(strides)

    def view(core: Core, env: Env) -> View:
        b: View = env[base]
        bit = b.base + integer(env, offset) * BITS[b.dtype]
        return b.like(bit, integers(env, sizes), integers(env, steps))

    return pure(result, view)


def _extract_strided_metadata(result: str | None, text: str) -> Run:
    """The allocation, offset, sizes and strides of a view of one dimension."""
    source, stores = operands(text)[0], [setter(name) for name in (result or "").split(", ")]

    def run(core: Core, env: Env) -> None:
        b: View = env[source]
        offset = (b.bit - b.base) // BITS[b.dtype]
        values = [b.like(b.base, [], []), offset, *b.sizes, *b.strides]
        for store, value in zip(stores, values, strict=True):
            store(env, value)

    return run


def _subview(result: str | None, text: str) -> Run:
    match = re.match(
        r"memref\.subview (\S+?)\[(.*?)\] \[(.*?)\] \[(.*?)\] : .* to (memref<.*>)", text
    )
    assert match, text
    base, offsets, sizes, steps = match[1], *(names(match[k]) for k in (2, 3, 4))
    want = memref_type(match[5]).sizes
    keep = list(range(len(sizes)))
    drop = len(sizes) - len(want)
    if drop:  # rank-reducing: static sizes of 1 that the result type lacks
        keep, k = [], 0
        for d, size in enumerate(sizes):
            if drop and size == "1" and (k >= len(want) or want[k] != 1):
                drop -= 1
            else:
                keep.append(d)
                k += 1

    def view(core: Core, env: Env) -> View:
        b: View = env[base]
        at = sum(x * y for x, y in zip(integers(env, offsets), b.strides, strict=True))
        n, t = integers(env, sizes), integers(env, steps)
        strides = [x * y for x, y in zip(t, b.strides, strict=True)]
        bit = b.bit + at * BITS[b.dtype]
        return b.like(bit, [n[d] for d in keep], [strides[d] for d in keep])

    return pure(result, view)


def _cast(result: str | None, text: str) -> Run:
    source = operands(text)[0]
    return pure(result, lambda core, env: env[source])


def _groups(text: str) -> tuple[str, list[list[int]], list[str]]:
    match = re.match(
        r"memref\.\w+ (\S+) \[(.*?)\](?: output_shape \[(.*?)\])? : .* into memref", text
    )
    assert match, text
    inner = match[2] if match[2].startswith("[") else "[" + match[2]
    found = re.findall(r"\[([\d, ]*)\]", inner + "]")
    groups = [[int(x) for x in g.split(",")] for g in found]
    return match[1], groups, names(match[3])


def _collapse_shape(result: str | None, text: str) -> Run:
    base, groups, _ = _groups(text)

    def view(core: Core, env: Env) -> View:
        b: View = env[base]
        strides = []
        for axes in groups:
            real = [d for d in axes if b.sizes[d] != 1]
            strides.append(b.strides[real[-1]] if real else b.strides[axes[-1]])
            for x, y in itertools.pairwise(real):
                if b.strides[x] != b.strides[y] * b.sizes[y]:
                    raise Fault(f"collapse of memory that is not contiguous: {text[:100]}")
        sizes = [int(np.prod([b.sizes[d] for d in axes])) for axes in groups]
        return b.like(b.bit, sizes, strides)

    return pure(result, view)


def _expand_shape(result: str | None, text: str) -> Run:
    base, groups, shape = _groups(text)

    def view(core: Core, env: Env) -> View:
        b: View = env[base]
        sizes = integers(env, shape)
        strides = [0] * len(sizes)
        for k, axes in enumerate(groups):
            step = b.strides[k]
            for d in reversed(axes):
                strides[d] = step
                step *= sizes[d]
        return b.like(b.bit, sizes, strides)

    return pure(result, view)


def _view(result: str | None, text: str) -> Run:
    match = re.match(r"memref\.view (\S+?)\[(.*?)\]\[(.*?)\] : .* to (memref<.*>)", text)
    assert match, text
    base, offset, dynamic = match[1], names(match[2])[0], names(match[3])
    kind = memref_type(match[4])

    def view(core: Core, env: Env) -> View:
        b: View = env[base]
        rest = integers(env, dynamic)
        sizes = [rest.pop(0) if n is None else n for n in kind.sizes]
        return b.like(b.bit + integer(env, offset) * 8, sizes, row_major(sizes), kind.dtype)

    return pure(result, view)


def _element(env: Env, base: str, index: list[str]) -> View:
    b: View = env[base]
    at = sum(x * y for x, y in zip(integers(env, index), b.strides, strict=True))
    return b.like(b.bit + at * BITS[b.dtype], [1], [1])


def _load(result: str | None, text: str) -> Run:
    match = re.match(r"memref\.load (%[\w#-]+)\[(.*?)\]", text)
    assert match, text
    base, index = match[1], names(match[2])

    def load(core: Core, env: Env) -> Any:
        element = _element(env, base, index)
        value = element.get()[0]
        if element.dtype == "i1":
            return bool(value)
        return int(value) if element.dtype.startswith("i") else value

    return pure(result, load)


def _store(result: str | None, text: str) -> Run:
    match = re.match(r"memref\.store (%[\w#-]+), (%[\w#-]+)\[(.*?)\]", text)
    assert match, text
    value, base, index = match[1], match[2], names(match[3])

    def run(core: Core, env: Env) -> None:
        _element(env, base, index).put(np.array([env[value]]))

    return run


VIEWS: Final[Mapping[str, Callable[[str | None, str], Run]]] = {
    "memref.reinterpret_cast": _reinterpret_cast,
    "memref.extract_strided_metadata": _extract_strided_metadata,
    "memref.subview": _subview,
    "memref.cast": _cast,
    "memref.collapse_shape": _collapse_shape,
    "memref.expand_shape": _expand_shape,
    "memref.view": _view,
    "memref.load": _load,
    "memref.store": _store,
    "memref.memory_space_cast": _cast,
}
