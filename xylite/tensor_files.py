"""Headers of safetensors and GGUF files, checked before anything in them is believed.

Both formats are a header that says where each tensor lies, and the tensors. The functions here
read headers only, in time and memory proportional to what the header really holds: every count and
length is compared with the bytes that are left in the file before it is used. Whatever is wrong
becomes one ConfigError that names the file and the tensor or key.
"""

import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeGuard

import numpy as np

from xylite.errors import ConfigError, file_size


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    dtype   "F32", "BF16", "Q4_1", ...: the names of both formats
    shape   as numpy has it: the last axis is contiguous (GGUF writes it the other way round)
    offset  first byte, from the start of the file
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


# Elements and bytes of one block of each type, by GGUF's number. Plain types have blocks of one.
# Source: the GGUF specification, and ggml's block structures.
_GGUF_TYPES: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
BLOCKS: Final[Mapping[str, tuple[int, int]]] = {n: (b, s) for n, b, s in _GGUF_TYPES.values()}

_SAFETENSORS_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip

MAX_SAFETENSORS_HEADER: Final = 2**25  # 32 MiB describe about 250,000 tensors
MAX_ELEMENTS: Final = 2**48
MAX_GGUF_ITEMS: Final = 2**22  # strings in all arrays together; the largest vocabularies hold 2**20
MAX_GGUF_STRING: Final = 2**26
MAX_GGUF_KEYS: Final = 2**16
MAX_GGUF_TENSORS: Final = 2**20
MAX_ALIGNMENT: Final = 2**20


def _no_overlap(tensors: Iterable[TensorInfo]) -> None:
    """ConfigError if two tensors share bytes."""
    last: TensorInfo | None = None
    for t in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if last is not None and t.offset < last.offset + last.nbytes:
            raise ConfigError(f"{t.file}: tensors {last.name!r} and {t.name!r} overlap")
        if t.nbytes:
            last = t


# safetensors


def read_safetensors(path: str) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file by name; ConfigError if its header cannot be true."""
    try:
        size = file_size(path)
        with open(path, "rb") as f:
            start = f.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(MAX_SAFETENSORS_HEADER, size - 8):
                raise ConfigError(
                    f"{path}: the header claims {length} bytes, the file has {size} "
                    f"(limit {MAX_SAFETENSORS_HEADER}): truncated, or not safetensors"
                )
            raw = f.read(length)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from None
    try:
        header = json.loads(raw, object_pairs_hook=lambda pairs: _unique(path, pairs))
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: the header is not JSON") from None
    if not isinstance(header, dict):
        raise ConfigError(f"{path}: the header is not a JSON object")
    header.pop("__metadata__", None)
    data = 8 + length
    tensors = {n: _safetensors_entry(path, n, e, data, size) for n, e in header.items()}
    _no_overlap(tensors.values())
    end = max((t.offset + t.nbytes for t in tensors.values()), default=data)
    if end != size:
        raise ConfigError(f"{path}: tensors end at byte {end}, the file at byte {size}")
    return tensors


def _unique(path: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ConfigError(f"{path}: {name[:200]!r} stands twice in the header")
        found[name] = value
    return found


def _safetensors_entry(path: str, name: str, entry: Any, data: int, size: int) -> TensorInfo:
    def fail(what: str) -> NoReturn:
        raise ConfigError(f"{path}: tensor {name!r}: {what}")

    if not isinstance(entry, dict):
        fail("its header entry is not an object")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _SAFETENSORS_BYTES:
        fail(f"unknown dtype {str(dtype)[:40]!r}")
    if not _naturals(shape) or len(shape) > 8:
        fail(f"impossible shape {str(shape)[:80]}")
    if not _naturals(span) or len(span) != 2 or span[0] > span[1]:
        fail(f"impossible data_offsets {str(span)[:80]}")
    if math.prod(shape) > MAX_ELEMENTS or math.prod(shape) * _SAFETENSORS_BYTES[dtype] != (
        span[1] - span[0]
    ):
        fail(f"shape {shape} of {dtype} does not take the {span[1] - span[0]} bytes it is given")
    if data + span[1] > size:
        fail(f"ends at byte {data + span[1]}, but the file has {size}: truncated")
    return TensorInfo(name, dtype, tuple(shape), path, data + span[0], span[1] - span[0])


def _naturals(x: Any) -> TypeGuard[list[int]]:
    return isinstance(x, list) and all(type(i) is int and 0 <= i < 2**63 for i in x)


# GGUF

_SCALARS: Final[Mapping[int, tuple[str, str]]] = {
    0: ("<B", "u1"),
    1: ("<b", "i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    7: ("<?", "?"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}
_STRING: Final = 8
_ARRAY: Final = 9


class _Cursor:
    """A place in a GGUF header. `where` names the key or tensor that is being read."""

    def __init__(self, path: str, data: mmap.mmap):
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0
        self.where = "header"
        self.items = 0

    def fail(self, what: str) -> NoReturn:
        raise ConfigError(f"{self.path}: {self.where}: {what}")

    def need(self, nbytes: int) -> None:
        if nbytes > self.size - self.at:
            self.fail(
                f"{nbytes} bytes are needed at byte {self.at}, but the file has {self.size}: "
                "truncated"
            )

    def number(self, fmt: str) -> Any:
        n = struct.calcsize(fmt)
        self.need(n)
        (value,) = struct.unpack_from(fmt, self.data, self.at)
        self.at += n
        return value

    def count(self, what: str, limit: int, least_bytes: int) -> int:
        """A 64-bit count of things that take at least `least_bytes` each."""
        n = self.number("<Q")
        if n > limit:
            self.fail(f"{n} {what}, the limit is {limit}")
        self.need(n * least_bytes)
        return n

    def string(self) -> str:
        n = self.count("bytes in a string", MAX_GGUF_STRING, 1)
        raw = self.data[self.at : self.at + n]
        self.at += n
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"the string at byte {self.at - n} is not UTF-8")

    def value(self, kind: int) -> Any:
        """A metadata value: a number, a bool, a string, a list of strings, or a numpy array."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind][0])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            self.fail(f"unknown value type {kind}")
        item = self.number("<I")
        if item == _STRING:
            n = self.count("strings", MAX_GGUF_ITEMS - self.items, 8)
            self.items += n
            return [self.string() for _ in range(n)]
        if item not in _SCALARS:
            self.fail(f"an array of value type {item} is not read")
        dtype = np.dtype(_SCALARS[item][1])
        n = self.count("numbers", self.size, dtype.itemsize)
        raw = self.data[self.at : self.at + n * dtype.itemsize]
        self.at += len(raw)
        return np.frombuffer(raw, dtype)


def read_gguf(path: str) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Metadata and tensors of a GGUF file (version 2 or 3, little endian).

    Arrays of numbers are numpy arrays, arrays of strings are lists.

    raises   ConfigError naming the file and the key or tensor that cannot be true
    """
    try:
        file_size(path)  # a pipe is refused, not waited for
        with open(path, "rb") as f:
            if os.fstat(f.fileno()).st_size < 24:
                raise ConfigError(f"{path}: too short to be a GGUF file")
            with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _gguf(_Cursor(path, data))
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from None


def _gguf(c: _Cursor) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    if c.data[:4] != b"GGUF":
        c.fail(f"the file begins with {c.data[:4]!r}, not with b'GGUF'")
    c.at = 4
    version = c.number("<I")
    if version not in (2, 3):
        big_endian = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
        c.fail(f"GGUF version {version}{big_endian} is not read; versions 2 and 3 are")
    num_tensors = c.count("tensors", MAX_GGUF_TENSORS, 24)
    num_keys = c.count("metadata keys", MAX_GGUF_KEYS, 13)
    metadata: dict[str, Any] = {}
    for i in range(num_keys):
        c.where = f"metadata key {i}"
        key = c.string()
        c.where = f"metadata key {key[:200]!r}"
        if key in metadata:
            c.fail("stands twice in the file")
        metadata[key] = c.value(c.number("<I"))
    align = metadata.get("general.alignment", 32)
    if type(align) is not int or not 1 <= align <= MAX_ALIGNMENT or align & (align - 1):
        c.where = "metadata key 'general.alignment'"
        c.fail(f"{str(align)[:40]} is not a power of two up to {MAX_ALIGNMENT}")
    found: dict[str, TensorInfo] = {}
    for i in range(num_tensors):
        c.where = f"tensor {i}"
        t = _gguf_tensor(c)
        if t.name in found:
            c.fail("stands twice in the file")
        if t.offset % align:
            c.fail(f"its offset {t.offset} is not a multiple of the alignment, {align}")
        found[t.name] = t
    data = -(-c.at // align) * align
    tensors = {}
    for t in found.values():
        end = data + t.offset + t.nbytes
        if end > c.size:
            c.where = f"tensor {t.name!r}"
            c.fail(f"ends at byte {end}, but the file has {c.size}: truncated")
        tensors[t.name] = TensorInfo(t.name, t.dtype, t.shape, t.file, data + t.offset, t.nbytes)
    _no_overlap(tensors.values())
    return metadata, tensors


def _gguf_tensor(c: _Cursor) -> TensorInfo:
    """One entry; its offset is still relative to the start of the data."""
    name = c.string()
    c.where = f"tensor {name[:200]!r}"
    num_dims = c.number("<I")
    if not 1 <= num_dims <= 4:
        c.fail(f"{num_dims} dimensions; 1 to 4 are possible")
    dims = [c.number("<Q") for _ in range(num_dims)]
    if math.prod(dims) > MAX_ELEMENTS or 0 in dims:
        c.fail(f"impossible dimensions {dims}")
    kind = c.number("<I")
    if kind not in _GGUF_TYPES:
        names = ", ".join(BLOCKS)
        c.fail(f"tensor type {kind} is not supported (supported: {names})")
    dtype, block, block_bytes = _GGUF_TYPES[kind]
    if dims[0] % block:
        c.fail(f"rows of {dims[0]} elements do not divide into {dtype} blocks of {block}")
    nbytes = math.prod(dims) // block * block_bytes
    return TensorInfo(name, dtype, tuple(reversed(dims)), c.path, c.number("<Q"), nbytes)
