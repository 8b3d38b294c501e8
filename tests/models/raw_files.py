"""GGUF and safetensors files by hand, byte by byte, so that each part of them can be wrong."""

import json
import struct
from typing import Any


def text(s: str | bytes) -> bytes:
    raw = s if isinstance(s, bytes) else s.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(
    name: str | bytes = "a", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0
) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def raw_gguf(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    num_keys: int | None = None,
    num_tensors: int | None = None,
    data: int = 128,
    align: int = 32,
) -> bytes:
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % align) + bytes(data)


def raw_safetensors(header: Any, data: int = 16) -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + bytes(data)


def info(dtype: Any = "F32", shape: Any = (4,), span: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}
