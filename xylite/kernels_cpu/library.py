"""The C++ kernels as Python functions of addresses and integers. No torch here.

`Kernels` owns a pool of threads. Calls release the interpreter's lock, and calls from several
threads run one after the other. Layouts and meanings stand with the sources in `src/`.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

P, I32, I64, F32, F64 = (
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_float,
    ctypes.c_double,
)

# Types of elements, and how a weight (or a KV tile) of a type is multiplied. BF16 widens in
# registers and computes in float32; BF16_DOT uses the machine's bf16 dot product.
T_F32, T_BF16, T_F16 = 0, 1, 2
K_F32, K_F16, K_BF16, K_BF16_DOT = 0, 1, 2, 3
ACT: Final = {None: 0, "silu": 1, "gelu_tanh": 2}

# After the pool: arguments of each entry point.
_SIGNATURES: Final[dict[str, Sequence[Any]]] = {
    "xl_pack": (I32, P, I64, I64, I32, P),
    "xl_gather": (I32, P, I64, I64, P, I64, P),
    "xl_linear": (I32, P, I64, I64, P, I32, I64, P, I32, P, P, I32, F32, I32, I32),
    "xl_quant_pack": (I32, I64, I32, P, P, P, I64, I64, I32, P),
    "xl_quant_from": (I32, P, I64, I64, I64, I32, P),
    "xl_quant_gather": (I32, I64, I32, I32, P, I64, I64, P, I64, P),
    "xl_quant_linear": (
        I32, I64, I32, I32, P, I64, I64, P, I32, I64, P, I32, P, P, I32, F32, I32, I32,
    ),
    "xl_add_rms_norm": (P, I32, P, P, F32, P, P, I32, I64, I64),
    "xl_rope_append": (
        P, P, P, I64, P, P, P, F32, P, I32, P, P, I32, I64, I64, I64, I64, I64,
    ),
    "xl_move_slots": (P, P, I32, P, P, I64, I64, I64, I64),
    "xl_gated_act": (P, I32, I32, P, I32, I64, I64),
    "xl_argmax": (P, I64, I64, I64, P),
}  # fmt: skip


class AttentionCall(ctypes.Structure):
    """Arguments of `xl_attention`, see attention.cpp."""

    _fields_ = (
        *((name, P) for name in ("q", "k", "v", "out")),
        *((name, P) for name in ("q_start", "kv_len", "num_draft", "bias_start")),
        *((name, P) for name in ("block_table", "tree_mask", "merges")),
        *((name, I64) for name in ("tokens", "kv_heads", "group", "block_size", "head_size")),
        *((name, I64) for name in ("table_width", "task_fields", "merge_fields", "num_merges")),
        *((name, I64) for name in ("window", "out_type", "kind")),
        *((name, F64) for name in ("scale", "cap")),
        *((name, I64) for name in ("classes", "cores")),
        ("tasks", P * 4),
        ("core_start", P * 4),
    )


class Kernels:
    """Entry points of one library, each bound to this object's pool of threads.

    threads  worker 0 is the caller, so one thread starts none
    spin_us  how long an idle worker looks for work before it sleeps
    """

    def __init__(self, path: Path, *, threads: int, spin_us: int = 50):
        self._library = ctypes.CDLL(str(path))
        start = self._library.xl_pool_start
        start.argtypes, start.restype = (I32, I32), P
        stop = self._library.xl_pool_stop
        stop.argtypes, stop.restype = (P,), None
        pool = start(threads, spin_us)
        if not pool:
            raise OSError(f"cannot start {threads} threads")
        self.threads = threads
        self._finalizer = weakref.finalize(self, stop, pool)
        self.pack = self._entry("xl_pack", pool)
        self.gather = self._entry("xl_gather", pool)
        self.linear = self._entry("xl_linear", pool)
        self.quant_pack = self._entry("xl_quant_pack", pool)
        self.quant_from = self._entry("xl_quant_from", pool)
        self.quant_gather = self._entry("xl_quant_gather", pool)
        self.quant_linear = self._entry("xl_quant_linear", pool)
        self.add_rms_norm = self._entry("xl_add_rms_norm", pool)
        self.rope_append = self._entry("xl_rope_append", pool)
        self.move_slots = self._entry("xl_move_slots", pool)
        self.gated_act = self._entry("xl_gated_act", pool)
        self.argmax = self._entry("xl_argmax", pool)
        self._attention = self._library.xl_attention
        self._attention.argtypes, self._attention.restype = (P, ctypes.POINTER(AttentionCall)), I32
        self._pool = pool
        self.packed_bytes = self._library.xl_packed_bytes
        self.packed_bytes.argtypes = (I32, I64, I64, I32)
        self.packed_bytes.restype = I64
        self.quant_bytes = self._library.xl_quant_bytes
        self.quant_bytes.argtypes = (I32, I64, I32, I64, I64, I32)
        self.quant_bytes.restype = I64
        self.huge_pages = self._library.xl_huge_pages
        self.huge_pages.argtypes, self.huge_pages.restype = (P, I64), None

    def _entry(self, name: str, pool: int) -> Callable[..., None]:
        function = getattr(self._library, name)
        function.argtypes, function.restype = (P, *_SIGNATURES[name]), I32

        def call(*args: int | float | None) -> None:
            code = function(pool, *args)
            if code:
                _fail(name, code)

        return call

    def attention(self, call: AttentionCall) -> None:
        code = self._attention(self._pool, call)
        if code:
            _fail("xl_attention", code)


def _fail(name: str, code: int) -> None:
    if code == 1:
        raise MemoryError(f"{name}: out of memory")
    raise AssertionError(f"{name}: this library lacks that kind of weight")
