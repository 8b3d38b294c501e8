"""Scalar arithmetic of a compiled program: integers wrap to their width, floats are float32."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .memory import Fault

_ALL_ONES = 2**64 - 1
_WIDTH = {"i8": 8, "i16": 16, "i32": 32, "i64": 64}


def constant(text: str) -> Any:
    """The value of an arith.constant."""
    match = re.match(r"arith\.constant (\S+)(?: : (\S+))?", text)
    assert match, text
    value, kind = match[1], match[2] or ""
    if value in ("true", "false"):
        return value == "true"
    if kind.startswith(("f", "bf")):
        if value.startswith("0x"):
            bits = int(value, 16)
            if kind == "f16":
                return np.array(bits, np.uint16).view(np.float16)[()]
            return np.array(bits << (16 if kind == "bf16" else 0), np.uint32).view(np.float32)[()]
        return np.float16(value) if kind == "f16" else np.float32(value)
    return int(value)


def _truncated_division(x: int, y: int) -> int:
    q = abs(x) // abs(y)
    return q if (x < 0) == (y < 0) else -q


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}

_INTEGER: dict[str, Callable[..., Any]] = {
    "addi": lambda x, y: x + y,
    "subi": lambda x, y: x - y,
    "muli": lambda x, y: x * y,
    "divsi": _truncated_division,
    "remsi": lambda x, y: x - y * _truncated_division(x, y),
    "floordivsi": lambda x, y: x // y,
    "ceildivsi": lambda x, y: -(-x // y),
    "minsi": min,
    "maxsi": max,
    "andi": lambda x, y: x & y,
    "ori": lambda x, y: x | y,
    "shli": lambda x, y: x << y,
    "shrsi": lambda x, y: x >> y,
    "index_cast": int,
    "trunci": int,
    "extsi": lambda x: -int(x) if isinstance(x, bool) else x,
    "fptosi": int,
}

_FLOAT: dict[str, Callable[..., Any]] = {
    "addf": lambda x, y: np.float32(x) + np.float32(y),
    "subf": lambda x, y: np.float32(x) - np.float32(y),
    "mulf": lambda x, y: np.float32(x) * np.float32(y),
    "divf": lambda x, y: np.float32(x) / np.float32(y),
    "maximumf": np.maximum,
    "maxnumf": np.fmax,
    "minimumf": np.minimum,
    "minnumf": np.fmin,
    "extf": np.float32,
    "sitofp": np.float32,
    "uitofp": np.float32,
    "negf": lambda x: -x,
}

_MATH: dict[str, Callable[..., Any]] = {
    "absf": abs,
    "absi": abs,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
    "exp": np.exp,
    "log": np.log,
}


def _wrapped(value: Any, kind: str) -> Any:
    """The integer as its type holds it; i1 as bool."""
    if kind == "i1":
        return bool(value & 1)
    width = _WIDTH.get(kind)
    if width is None or isinstance(value, bool | np.bool_):
        return value
    value = int(value) & ((1 << width) - 1)
    return value - (1 << width) if value >> (width - 1) else value


def _unknown(text: str) -> Callable[..., Any]:
    def f(*_: Any) -> Any:
        raise Fault(f"not emulated: {text[:160]}")

    return f


def operation(name: str, text: str) -> Callable[..., Any]:
    """The function of an arith or math operation; it raises Fault if the operation is not known."""
    dialect, _, op = name.partition(".")
    kind = text.rsplit(" ", 1)[-1]
    if dialect == "math":
        return _MATH.get(op) or _unknown(text)
    if op in ("cmpi", "cmpf"):
        match = re.match(r"arith\.cmp[if] (\w+)", text)
        assert match, text
        predicate = match[1]
        # cmpi: eq, ne, slt, ult, ...; cmpf: oeq, une, olt, ...
        f = _COMPARE[predicate if predicate in _COMPARE else predicate[1:]]
        if op == "cmpi" and predicate.startswith("u"):
            return lambda x, y: bool(f(x & _ALL_ONES, y & _ALL_ONES))
        return lambda x, y: bool(f(x, y))
    if op in ("index_castui", "extui"):
        source = re.search(r" : (\w+) to ", text)
        ones = (1 << _WIDTH.get(source[1], 64)) - 1 if source else _ALL_ONES
        return lambda x: int(x) & ones
    if op == "select":
        return lambda c, x, y: x if c else y
    if op == "xori":
        return (
            (lambda x, y: bool(x) != bool(y))
            if kind == "i1"
            else (lambda x, y: _wrapped(x ^ y, kind))
        )
    if op == "bitcast" and text.endswith(": i32 to f32"):
        return lambda x: np.array(x, np.int32).view(np.float32)[()]
    if op == "bitcast" and text.endswith(": f32 to i32"):
        return lambda x: int(np.array(x, np.float32).view(np.int32))
    if op == "truncf":
        return np.float16 if kind == "f16" else lambda x: x
    if op in _FLOAT:
        return _FLOAT[op]
    if op not in _INTEGER:
        return _unknown(text)
    g = _INTEGER[op]
    return lambda *args: _wrapped(g(*args), kind)
