"""What the compiler's library functions do, in numpy.

Each handler takes the call's arguments: views, or numbers. Matrices in L1 and L0C are fractal (NZ):
[column tiles, row tiles, rows of a tile, columns of a tile].
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .memory import BITS, Fault, View

Args = list[Any]
Handler = Callable[[Args, re.Match[str]], None]


def _value(x: Any) -> Any:
    return x.get() if isinstance(x, View) else x


def _fit(values: Any, sizes: list[int]) -> NDArray[Any]:
    return np.broadcast_to(values, sizes)


def _plain(fractal: NDArray[Any]) -> NDArray[Any]:
    """The [rows, columns] matrix of a fractal one."""
    c, r, rows, columns = fractal.shape
    return fractal.transpose(1, 2, 0, 3).reshape(r * rows, c * columns)


def _fractal(matrix: NDArray[Any], sizes: list[int]) -> NDArray[Any]:
    c, r, rows, columns = sizes
    return matrix.reshape(r, rows, c, columns).transpose(2, 0, 1, 3)


def _fill(args: Args, _: re.Match[str]) -> None:
    args[1].put(np.full(args[1].sizes, args[0]))


def _arange(args: Args, _: re.Match[str]) -> None:
    args[0].put(args[1] + np.arange(args[0].sizes[0]) * args[2])


def _copy(args: Args, name: re.Match[str]) -> None:
    source, target = args[0], args[1]
    view = target.like(target.bit, target.sizes, target.strides)
    if view.sizes != source.sizes:
        left = args[4] if name[1].startswith("load") and len(args) > 4 else 0
        view.bit += left * view.strides[-1] * BITS[view.dtype]
        view.sizes = list(source.sizes)
    accumulate = name[1].startswith("store") and len(args) > 2 and args[2] == 1
    view.put(view.get() + source.get() if accumulate else source.get())


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.fmax,
    "min": np.fmin,
}
_LOGIC: dict[tuple[str, bool], Callable[..., Any]] = {
    ("and", True): np.logical_and,
    ("or", True): np.logical_or,
    ("xor", True): np.not_equal,
    ("and", False): np.bitwise_and,
    ("or", False): np.bitwise_or,
    ("xor", False): np.bitwise_xor,
}


def _binary(args: Args, name: re.Match[str]) -> None:
    target = args[2]
    f = _ARITHMETIC.get(name[1]) or _LOGIC[name[1], target.dtype == "i1"]
    target.put(_fit(f(_value(args[0]), _value(args[1])), target.sizes))


def _unary(args: Args, name: re.Match[str]) -> None:
    f: Callable[..., Any] = {
        "exp": np.exp,
        "ln": np.log,
        "sqrt": np.sqrt,
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "abs": np.abs,
        "rec": lambda x: 1 / x,
        "relu": lambda x: np.maximum(x, 0),
        "not": np.invert,
    }[name[1]]
    args[1].put(f(_value(args[0])))


def _compare(args: Args, name: re.Match[str]) -> None:
    f: Callable[..., Any] = {
        "eq": np.equal,
        "ne": np.not_equal,
        "le": np.less_equal,
        "lt": np.less,
        "ge": np.greater_equal,
        "gt": np.greater,
    }[name[1]]
    args[2].put(f(_value(args[0]), _value(args[1])))


def _select(args: Args, _: re.Match[str]) -> None:
    args[3].put(np.where(_fit(_value(args[0]), args[3].sizes), _value(args[1]), _value(args[2])))


# The compiler's numbers: rint, round (half away from zero), floor, ceil, trunc.
_ROUNDING: dict[int, Callable[..., Any]] = {
    0: np.rint,
    1: lambda x: np.trunc(x + np.copysign(0.5, x)),
    2: np.floor,
    3: np.ceil,
    4: np.trunc,
}


def _cast(args: Args, name: re.Match[str]) -> None:
    x, target = _value(args[0]), args[1]
    # From float32 to float32 the rounding is the purpose: math.floor and its kind.
    if x.dtype.kind == "f" and (target.dtype.startswith("i") or name[1] == name[2]):
        x = _ROUNDING.get(args[-1], np.rint)(x)
    target.put(x.astype(np.float32) if x.dtype == bool else x)


def _reduce(args: Args, name: re.Match[str]) -> None:
    f: Callable[..., Any] = {"max": np.max, "min": np.min, "sum": np.sum}[name[1]]
    args[1].put(np.reshape(f(_value(args[0]), axis=-1), args[1].sizes))


def _reduce_with_index(args: Args, name: re.Match[str]) -> None:
    x = _value(args[0])
    i = (np.argmax if name[1] == "max" else np.argmin)(x)
    args[1].put(np.full(args[1].sizes, x[i]))
    args[2].put(np.full(args[2].sizes, i))


def _broadcast(args: Args, _: re.Match[str]) -> None:
    args[1].put(_fit(_value(args[0]), args[1].sizes))


def _to_fractal(args: Args, _: re.Match[str]) -> None:
    source, target = _value(args[0]), args[1]
    rows, columns = source.shape
    c, r, tile_rows, tile_columns = target.sizes
    if c * tile_columns < columns or r * tile_rows < rows:
        raise Fault(f"nd2nz: {source.shape} does not fit into {target.sizes}")
    whole = _plain(target.get()).copy()
    whole[:rows, :columns] = source
    target.put(_fractal(whole, target.sizes))


def _matmul(args: Args, name: re.Match[str]) -> None:
    init, m, k, n, target = args[2:7]
    # Sums of int8 products exceed what float32 holds exactly.
    kind = np.float64 if target.dtype == "i32" else np.float32
    a, b = (_plain(_value(x)).astype(kind) for x in args[:2])
    if "_ta" in name[1]:
        a = a.T
    if "_tb" in name[1]:
        b = b.T
    product = a[:m, :k] @ b[:k, :n]
    whole = _plain(target.get()).copy()
    rows, columns = product.shape
    whole[:rows, :columns] = product + (0 if init else whole[:rows, :columns])
    target.put(_fractal(whole, target.sizes))


def _from_fractal(args: Args, _: re.Match[str]) -> None:
    rows, columns = args[1].sizes
    args[1].put(_plain(_value(args[0]))[:rows, :columns])


_HANDLERS: tuple[tuple[str, Handler], ...] = (
    (r"broadcast_scalar_\w+_to_\dd", _fill),
    (r"arange_1d", _arange),
    (r"(load_gm_to_ubuf|store_ubuf_to_gm|copy_ubuf_to_ubuf)_\dd", _copy),
    (r"v(add|sub|mul|div|max|min|and|or|xor)_\dd_(\w+)", _binary),
    (r"v(add|sub|mul|div|max|min)s?_(vs|sv)_\dd", _binary),
    (r"v(exp|ln|sqrt|rsqrt|abs|rec|relu|not)_\dd", _unary),
    (r"vcmps?_(eq|ne|le|lt|ge|gt)_\dd", _compare),
    (r"vsel_(vv|vs|sv|ss)_\dd", _select),
    (r"vcast_(\w+?)_to_(\w+?)_\dd_with_(\w+)", _cast),
    (r"(?:enablevc_)?reduce_(max|min|sum)_(ar|r)_", _reduce),
    (r"reduce_(max|min)_with_index_left_r_", _reduce_with_index),
    (r"broadcast_(last|first)_axis", _broadcast),
    (r"nd2nz_", _to_fractal),
    (r"mma_tile_\w+?_to_\w+?((?:_ta)?(?:_tb)?)$", _matmul),
    (r"fixpipe_nz2nd_", _from_fractal),
    (r"set_l1_", _fill),
)


@functools.cache
def _find(name: str) -> tuple[Handler, re.Match[str]] | None:
    for pattern, handler in _HANDLERS:
        match = re.match(pattern, name)
        if match:
            return handler, match
    return None


def call(name: str, args: Args) -> None:
    """Run one library function; Fault if it is not known here."""
    found = _find(name)
    if found is None:
        shapes = [x.sizes if isinstance(x, View) else x for x in args]
        raise Fault(f"library function {name} with {shapes} is not emulated")
    with np.errstate(all="ignore"):
        found[0](args, found[1])
