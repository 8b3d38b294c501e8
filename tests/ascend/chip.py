"""Statements of the chip: where its memories are, and how its cores wait for each other."""

import re
from collections.abc import Callable, Mapping
from typing import Final

from .cores import Core
from .memory import Fault, View, row_major
from .program_text import memref_type, names
from .statements import Env, Run, integer, pure


def _pointer_cast(result: str | None, text: str) -> Run:
    match = re.match(r"hivm\.hir\.pointer_cast\((\S+?)\) .*?(memref<.*>)$", text)
    assert match, text
    address, kind = match[1], memref_type(match[2])
    sizes = [n if n is not None else -1 for n in kind.sizes]
    assert -1 not in sizes, text
    strides = row_major(sizes)
    return pure(
        result,
        lambda core, env: View(
            core.spaces[kind.space], kind.dtype, env[address] * 8, sizes, strides, kind.space
        ),
    )


def _bitcast(result: str | None, text: str) -> Run:
    match = re.match(r"hivm\.hir\.bitcast (\S+) : .* -> (memref<.*>)", text)
    assert match, text
    base, dtype = match[1], memref_type(match[2]).dtype

    def view(core: Core, env: Env) -> View:
        b: View = env[base]
        return b.like(b.bit, b.sizes, b.strides, dtype)

    return pure(result, view)


def _get_block_idx(result: str | None, text: str) -> Run:
    return pure(result, lambda core, env: core.block)


def _get_sub_block_idx(result: str | None, text: str) -> Run:
    return pure(result, lambda core, env: core.sub_block)


def _event(text: str) -> Callable[[Env], tuple[str, str, str]]:
    match = re.search(r"\[(.*?)\]", text)
    assert match, text
    source, target, event = names(match[1])
    if event.startswith("%"):
        return lambda env: (source, target, f"<EVENT_ID{env[event]}>")
    return lambda env: (source, target, event)


def _set_flag(result: str | None, text: str) -> Run:
    key = _event(text)

    def run(core: Core, env: Env) -> None:
        core.events[key(env)] += 1

    return run


def _wait_flag(result: str | None, text: str) -> Run:
    key = _event(text)

    def run(core: Core, env: Env) -> None:
        k = key(env)
        core.events[k] -= 1
        # The cube's library calls set and await flags of their own, which are not seen here.
        if core.kind == "aiv" and core.events[k] < 0:
            raise Fault(f"wait_flag without set_flag {k}: the core hangs")

    return run


def _flag(text: str) -> str:
    match = re.search(r"flag = (\S+)", text)
    assert match, text
    return match[1]


def _sync_block_set(result: str | None, text: str) -> Run:
    flag = _flag(text)

    def run(core: Core, env: Env) -> None:
        f = integer(env, flag)
        if core.kind == "aic":
            core.flags.set(("cube to vector", 0, f))
            core.flags.set(("cube to vector", 1, f))
        else:
            core.flags.set(("vector to cube", core.sub_block, f))

    return run


def _sync_block_wait(result: str | None, text: str) -> Run:
    flag = _flag(text)

    def run(core: Core, env: Env) -> None:
        f = integer(env, flag)
        if core.kind == "aic":
            core.flags.wait([("vector to cube", 0, f), ("vector to cube", 1, f)])
        else:
            core.flags.wait([("cube to vector", core.sub_block, f)])

    return run


def _nothing(result: str | None, text: str) -> Run:
    return lambda core, env: None


CHIP: Final[Mapping[str, Callable[[str | None, str], Run]]] = {
    "hivm.hir.pointer_cast": _pointer_cast,
    "hivm.hir.bitcast": _bitcast,
    "hivm.hir.get_block_idx": _get_block_idx,
    "hivm.hir.get_sub_block_idx": _get_sub_block_idx,
    "hivm.hir.set_flag": _set_flag,
    "hivm.hir.wait_flag": _wait_flag,
    "hivm.hir.sync_block_set": _sync_block_set,
    "hivm.hir.sync_block_wait": _sync_block_wait,
    "hivm.hir.pipe_barrier": _nothing,
    "hivm.hir.set_ffts_base_addr": _nothing,
    "hivm.hir.set_mask_norm": _nothing,
    "hivm.hir.dcci": _nothing,
    "hivm.hir.sync_block": _nothing,
}
