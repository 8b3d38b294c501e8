"""Statements of a compiled program as functions: decoded once, run often."""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import library, scalar
from .cores import Core
from .memory import BITS, Fault, View, row_major
from .program_text import Module, Statement, memref_type, names, split_top

Env = dict[str, Any]
# Runs one statement; a list (operands of yield or return) ends the block.
Run = Callable[[Core, Env], list[Any] | None]


def _operands(text: str) -> list[str]:
    return re.findall(r"%[\w#-]+", text)


def _int(env: Env, name: str) -> int:
    return env[name] if name.startswith("%") else int(name)


def _ints(env: Env, items: Sequence[str]) -> list[int]:
    return [_int(env, x) for x in items]


def _setter(result: str | None) -> Callable[[Env, Any], None]:
    if result is None:
        return lambda env, value: None
    if ":" in result:
        base = result.split(":")[0]

        def store_all(env: Env, values: Any) -> None:
            for k, v in enumerate(values):
                env[f"{base}#{k}"] = v

        return store_all
    return lambda env, value: env.__setitem__(result, value)


def _pure(result: str | None, f: Callable[[Core, Env], Any]) -> Run:
    """A statement that computes one value."""
    store = _setter(result)
    return lambda core, env: store(env, f(core, env))


class Decoder:
    """Turns statements into functions, once; running them parses nothing."""

    def __init__(self, module: Module):
        self.module = module

    def block(self, statements: list[Statement]) -> Callable[[Core, Env], list[Any] | None]:
        steps = [(self.statement(s), s.text) for s in statements]

        def run(core: Core, env: Env) -> list[Any] | None:
            for step, text in steps:
                try:
                    out = step(core, env)
                except Fault:
                    raise
                except Exception as e:
                    raise Fault(f"{type(e).__name__}: {e} in: {text[:300]}") from e
                if out is not None:
                    return out
            return None

        return run

    def statement(self, s: Statement) -> Run:
        match = re.match(r"((?:%[\w#-]+(?::\d+)?(?:, )?)+) = (.*)", s.text)
        result, text = (match[1], match[2]) if match else (None, s.text)
        found = re.match(r"[\w.]+", text)
        name = found[0] if found else text
        if name in ("return", "func.return"):
            return lambda core, env: []
        if name == "scf.yield":
            values = _operands(text.split(" : ")[0])
            return lambda core, env: [env[x] for x in values]
        if name == "scf.for":
            return self._for(result, text, s)
        if name == "scf.if":
            return self._if(result, text, s)
        if name == "scf.while":
            return self._while(result, text, s)
        if name in ("call", "func.call"):
            return self._call(text)
        if name == "arith.constant":
            value = scalar.constant(text)
            return _pure(result, lambda core, env: value)
        if name.startswith(("arith.", "math.")):
            f, values = scalar.operation(name, text), _operands(text.split(" : ")[0])
            return _pure(result, lambda core, env: f(*(env[x] for x in values)))
        if name.startswith("affine."):
            return self._affine(result, text)
        if name.startswith("memref."):
            return getattr(self, "_memref_" + name[7:], self._unknown)(result, text)
        if name.startswith("hivm.hir."):
            return getattr(self, "_hivm_" + name[9:], self._unknown)(result, text)
        if name.startswith("annotation."):
            return lambda core, env: None
        return self._unknown(result, text)

    def _unknown(self, result: str | None, text: str) -> Run:
        def run(core: Core, env: Env) -> None:
            raise Fault(f"not emulated: {text[:160]}")

        return run

    # control flow

    def _for(self, result: str | None, text: str, s: Statement) -> Run:
        match = re.match(
            r"scf\.for (%\w+) = (\S+) to (\S+) step (\S+)"
            r"(?:\s+iter_args\((.*?)\) -> \(.*\))?\s*(?:: \w+)?$",
            text,
        )
        assert match, text
        index, first, last, step = match.groups()[:4]
        carried = [tuple(p.split(" = ")) for p in split_top(match[5])] if match[5] else []
        body, store = self.block(s.body or []), _setter(result)
        single = result is not None and ":" not in result

        def run(core: Core, env: Env) -> None:
            values: list[Any] = [env[start.strip()] for _, start in carried]
            for k in range(env[first], env[last], env[step]):
                env[index] = k
                for (name, _), v in zip(carried, values, strict=True):
                    env[name.strip()] = v
                out = body(core, env)
                if carried:
                    assert out is not None
                    values = out
            if carried:
                store(env, values[0] if single else values)

        return run

    def _if(self, result: str | None, text: str, s: Statement) -> Run:
        condition = _operands(text)[0]
        then, other, store = self.block(s.body or []), self.block(s.other or []), _setter(result)
        single = result is not None and ":" not in result

        def run(core: Core, env: Env) -> None:
            out = (then if env[condition] else other)(core, env)
            if result is not None:
                assert out is not None
                store(env, out[0] if single else out)

        return run

    def _while(self, result: str | None, text: str, s: Statement) -> Run:
        match = re.match(r"scf\.while(?: \((.*?)\))? :", text)
        assert match and s.body and s.other, text
        start = [tuple(p.split(" = ")) for p in split_top(match[1])] if match[1] else []
        *before, last = s.body
        condition, *passed = _operands(last.text.split(" : ")[0])
        after = s.other
        inner: list[str] = []
        if after[0].text.startswith("^"):
            inner, after = re.findall(r"(%\w+):", after[0].text), after[1:]
        test, body, store = self.block(before), self.block(after), _setter(result)
        single = result is not None and ":" not in result

        def run(core: Core, env: Env) -> None:
            values = [env[x.strip()] for _, x in start]
            while True:
                for (name, _), v in zip(start, values, strict=True):
                    env[name.strip()] = v
                test(core, env)
                out = [env[x] for x in passed]
                if not env[condition]:
                    break
                for name, v in zip(inner, out, strict=True):
                    env[name] = v
                values = body(core, env) or []
            if result is not None:
                store(env, out[0] if single else out)

        return run

    def _call(self, text: str) -> Run:
        match = re.match(r"(?:func\.)?call @(\w+)\((.*?)\) :", text)
        assert match, text
        name, args = match[1], _operands(match[2])

        def run(core: Core, env: Env) -> None:
            core.calls[name] += 1
            library.call(name, [env[x] for x in args])

        return run

    def _affine(self, result: str | None, text: str) -> Run:
        match = re.match(r"affine\.(\w+) #(map\d*)\(([^)]*)\)(?:\[([^\]]*)\])?", text)
        assert match, text
        pick: Callable[[tuple[int, ...]], int] = {"apply": lambda r: r[0], "min": min, "max": max}[
            match[1]
        ]
        f, args = self.module.maps[match[2]], names(match[3]) + names(match[4])
        return _pure(result, lambda core, env: pick(f(*(env[x] for x in args))))

    # views

    def _memref_reinterpret_cast(self, result: str | None, text: str) -> Run:
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
            bit = b.base + _int(env, offset) * BITS[b.dtype]
            return b.like(bit, _ints(env, sizes), _ints(env, steps))

        return _pure(result, view)

    def _memref_extract_strided_metadata(self, result: str | None, text: str) -> Run:
        """The allocation, offset, sizes and strides of a view of one dimension."""
        source, stores = _operands(text)[0], [_setter(name) for name in (result or "").split(", ")]

        def run(core: Core, env: Env) -> None:
            b: View = env[source]
            offset = (b.bit - b.base) // BITS[b.dtype]
            values = [b.like(b.base, [], []), offset, *b.sizes, *b.strides]
            for store, value in zip(stores, values, strict=True):
                store(env, value)

        return run

    def _memref_subview(self, result: str | None, text: str) -> Run:
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
            at = sum(x * y for x, y in zip(_ints(env, offsets), b.strides, strict=True))
            n, t = _ints(env, sizes), _ints(env, steps)
            strides = [x * y for x, y in zip(t, b.strides, strict=True)]
            bit = b.bit + at * BITS[b.dtype]
            return b.like(bit, [n[d] for d in keep], [strides[d] for d in keep])

        return _pure(result, view)

    def _memref_cast(self, result: str | None, text: str) -> Run:
        source = _operands(text)[0]
        return _pure(result, lambda core, env: env[source])

    _memref_memory_space_cast = _memref_cast

    @staticmethod
    def _groups(text: str) -> tuple[str, list[list[int]], list[str]]:
        match = re.match(
            r"memref\.\w+ (\S+) \[(.*?)\](?: output_shape \[(.*?)\])? : .* into memref", text
        )
        assert match, text
        inner = match[2] if match[2].startswith("[") else "[" + match[2]
        found = re.findall(r"\[([\d, ]*)\]", inner + "]")
        groups = [[int(x) for x in g.split(",")] for g in found]
        return match[1], groups, names(match[3])

    def _memref_collapse_shape(self, result: str | None, text: str) -> Run:
        base, groups, _ = self._groups(text)

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

        return _pure(result, view)

    def _memref_expand_shape(self, result: str | None, text: str) -> Run:
        base, groups, shape = self._groups(text)

        def view(core: Core, env: Env) -> View:
            b: View = env[base]
            sizes = _ints(env, shape)
            strides = [0] * len(sizes)
            for k, axes in enumerate(groups):
                step = b.strides[k]
                for d in reversed(axes):
                    strides[d] = step
                    step *= sizes[d]
            return b.like(b.bit, sizes, strides)

        return _pure(result, view)

    def _memref_view(self, result: str | None, text: str) -> Run:
        match = re.match(r"memref\.view (\S+?)\[(.*?)\]\[(.*?)\] : .* to (memref<.*>)", text)
        assert match, text
        base, offset, dynamic = match[1], names(match[2])[0], names(match[3])
        kind = memref_type(match[4])

        def view(core: Core, env: Env) -> View:
            b: View = env[base]
            rest = _ints(env, dynamic)
            sizes = [rest.pop(0) if n is None else n for n in kind.sizes]
            return b.like(b.bit + _int(env, offset) * 8, sizes, row_major(sizes), kind.dtype)

        return _pure(result, view)

    @staticmethod
    def _element(env: Env, base: str, index: list[str]) -> View:
        b: View = env[base]
        at = sum(x * y for x, y in zip(_ints(env, index), b.strides, strict=True))
        return b.like(b.bit + at * BITS[b.dtype], [1], [1])

    def _memref_load(self, result: str | None, text: str) -> Run:
        match = re.match(r"memref\.load (%[\w#-]+)\[(.*?)\]", text)
        assert match, text
        base, index = match[1], names(match[2])

        def load(core: Core, env: Env) -> Any:
            element = self._element(env, base, index)
            value = element.get()[0]
            if element.dtype == "i1":
                return bool(value)
            return int(value) if element.dtype.startswith("i") else value

        return _pure(result, load)

    def _memref_store(self, result: str | None, text: str) -> Run:
        match = re.match(r"memref\.store (%[\w#-]+), (%[\w#-]+)\[(.*?)\]", text)
        assert match, text
        value, base, index = match[1], match[2], names(match[3])

        def run(core: Core, env: Env) -> None:
            self._element(env, base, index).put(np.array([env[value]]))

        return run

    # the chip

    def _hivm_pointer_cast(self, result: str | None, text: str) -> Run:
        match = re.match(r"hivm\.hir\.pointer_cast\((\S+?)\) .*?(memref<.*>)$", text)
        assert match, text
        address, kind = match[1], memref_type(match[2])
        sizes = [n if n is not None else -1 for n in kind.sizes]
        assert -1 not in sizes, text
        strides = row_major(sizes)
        return _pure(
            result,
            lambda core, env: View(
                core.spaces[kind.space], kind.dtype, env[address] * 8, sizes, strides, kind.space
            ),
        )

    def _hivm_bitcast(self, result: str | None, text: str) -> Run:
        match = re.match(r"hivm\.hir\.bitcast (\S+) : .* -> (memref<.*>)", text)
        assert match, text
        base, dtype = match[1], memref_type(match[2]).dtype

        def view(core: Core, env: Env) -> View:
            b: View = env[base]
            return b.like(b.bit, b.sizes, b.strides, dtype)

        return _pure(result, view)

    def _hivm_get_block_idx(self, result: str | None, text: str) -> Run:
        return _pure(result, lambda core, env: core.block)

    def _hivm_get_sub_block_idx(self, result: str | None, text: str) -> Run:
        return _pure(result, lambda core, env: core.sub_block)

    @staticmethod
    def _event(text: str) -> Callable[[Env], tuple[str, str, str]]:
        match = re.search(r"\[(.*?)\]", text)
        assert match, text
        source, target, event = names(match[1])
        if event.startswith("%"):
            return lambda env: (source, target, f"<EVENT_ID{env[event]}>")
        return lambda env: (source, target, event)

    def _hivm_set_flag(self, result: str | None, text: str) -> Run:
        key = self._event(text)

        def run(core: Core, env: Env) -> None:
            core.events[key(env)] += 1

        return run

    def _hivm_wait_flag(self, result: str | None, text: str) -> Run:
        key = self._event(text)

        def run(core: Core, env: Env) -> None:
            k = key(env)
            core.events[k] -= 1
            # The cube's library calls set and await flags of their own, which are not seen here.
            if core.kind == "aiv" and core.events[k] < 0:
                raise Fault(f"wait_flag without set_flag {k}: the core hangs")

        return run

    @staticmethod
    def _flag(text: str) -> str:
        match = re.search(r"flag = (\S+)", text)
        assert match, text
        return match[1]

    def _hivm_sync_block_set(self, result: str | None, text: str) -> Run:
        flag = self._flag(text)

        def run(core: Core, env: Env) -> None:
            f = _int(env, flag)
            if core.kind == "aic":
                core.flags.set(("cube to vector", 0, f))
                core.flags.set(("cube to vector", 1, f))
            else:
                core.flags.set(("vector to cube", core.sub_block, f))

        return run

    def _hivm_sync_block_wait(self, result: str | None, text: str) -> Run:
        flag = self._flag(text)

        def run(core: Core, env: Env) -> None:
            f = _int(env, flag)
            if core.kind == "aic":
                core.flags.wait([("vector to cube", 0, f), ("vector to cube", 1, f)])
            else:
                core.flags.wait([("cube to vector", core.sub_block, f)])

        return run

    def _nothing(self, result: str | None, text: str) -> Run:
        return lambda core, env: None

    _hivm_pipe_barrier = _hivm_set_ffts_base_addr = _hivm_set_mask_norm = _nothing
    _hivm_dcci = _hivm_sync_block = _nothing
