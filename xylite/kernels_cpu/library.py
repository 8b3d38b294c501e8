"""The C++ kernels as Python functions of addresses and integers. No torch here.

`Kernels` owns a pool of threads. Calls release the interpreter's lock, and calls from several
threads run one after the other. Layouts and meanings stand with the sources in `src/`.
"""

import ctypes
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

P, I32, I64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64

# Types of elements, and how a weight (or a KV tile) of a type is multiplied. BF16 widens in
# registers and computes in float32; BF16_DOT uses the machine's bf16 dot product.
T_F32, T_BF16, T_F16 = 0, 1, 2
K_F32, K_F16, K_BF16, K_BF16_DOT = 0, 1, 2, 3
ACT: Final = {None: 0, "silu": 1, "gelu_tanh": 2}

# Entry points that are called in every step take one struct: to pack it costs a tenth of what
# ctypes needs for as many arguments. q = int64 (addresses too, 0 = null), d = double.
_PRODUCT: Final = "8qd2q"
_STRUCTS: Final = {
    "xl_linear": "4q" + _PRODUCT,
    "xl_quant_linear": "8q" + _PRODUCT,
    "xl_add_rms_norm": "9qd",
    "xl_rope_append": "17qd",
    "xl_attention": "23q2d10q",
    "xl_gather": "7q",
    "xl_quant_gather": "11q",
}
# The others take their arguments one by one, after the pool.
_SIGNATURES: Final[dict[str, Sequence[Any]]] = {
    "xl_pack": (I32, P, I64, I64, I32, P),
    "xl_quant_pack": (I32, I64, I32, P, P, P, I64, I64, I32, P),
    "xl_quant_from": (I32, P, I64, I64, I32, P),
    "xl_move_slots": (P, P, I32, P, P, I64, I64, I64, I64),
    "xl_gated_act": (P, I32, I32, P, I32, I64, I64),
    "xl_argmax": (P, I64, I64, I64, P),
    "xl_finite": (P, I32, I64, I64, I64, P),
}


# Too short to give up the interpreter's lock for: the event loop would take it while the device
# waits.
_SHORT: Final = ("xl_argmax", "xl_finite")


class Kernels:
    """Entry points of one library, each bound to this object's pool of threads.

    threads  worker 0 is the caller, so one thread starts none
    spin_us  how long an idle worker looks for work before it sleeps
    """

    def __init__(self, path: Path, *, threads: int, spin_us: int = 50):
        self._path = str(path)
        self._library = ctypes.CDLL(self._path)
        start = self._library.xl_pool_start
        start.argtypes, start.restype = (I32, I32), P
        stop = self._library.xl_pool_stop
        stop.argtypes, stop.restype = (P,), None
        pool = start(threads, spin_us)
        if not pool:
            raise OSError(f"cannot start {threads} threads")
        self.threads = threads
        self._finalizer = weakref.finalize(self, stop, pool)
        self._pool = pool
        self._recording: Recording | None = None
        self.pack = self._entry("xl_pack")
        self.gather = self._entry("xl_gather")
        self.linear = self._entry("xl_linear")
        self.quant_pack = self._entry("xl_quant_pack")
        self.quant_from = self._entry("xl_quant_from")
        self.quant_gather = self._entry("xl_quant_gather")
        self.quant_linear = self._entry("xl_quant_linear")
        self.add_rms_norm = self._entry("xl_add_rms_norm")
        self.rope_append = self._entry("xl_rope_append")
        self.move_slots = self._entry("xl_move_slots")
        self.gated_act = self._entry("xl_gated_act")
        self.argmax = self._entry("xl_argmax")
        self.finite = self._entry("xl_finite")
        self.attention = self._entry("xl_attention")
        self._replay = self._library.xl_replay
        self._replay.argtypes, self._replay.restype = (P, I64, P), I32
        self.packed_bytes = self._library.xl_packed_bytes
        self.packed_bytes.argtypes = (I32, I64, I64, I32)
        self.packed_bytes.restype = I64
        self.quant_bytes = self._library.xl_quant_bytes
        self.quant_bytes.argtypes = (I32, I64, I32, I64, I64, I32)
        self.quant_bytes.restype = I64
        self.huge_pages = self._library.xl_huge_pages
        self.huge_pages.argtypes, self.huge_pages.restype = (P, I64), None

    def _entry(self, name: str) -> Callable[..., None]:
        library = ctypes.PyDLL(self._path) if name in _SHORT else self._library
        function, pool = getattr(library, name), self._pool
        function.restype = I32
        if name in _STRUCTS:
            function.argtypes = (P, ctypes.c_char_p)
            pack = struct.Struct(_STRUCTS[name]).pack
            entry = ctypes.cast(function, P).value
            assert entry is not None

            def call(*args: int | float) -> None:
                packed = pack(*args)
                if self._recording is not None:
                    self._recording.calls.append((entry, packed))
                    return
                if code := function(pool, packed):
                    _fail(name, code)

            return call
        function.argtypes = (P, *_SIGNATURES[name])

        def call_plain(*args: int | float | None) -> None:
            if self._recording is not None:
                raise Foreign(name)
            if code := function(pool, *args):
                _fail(name, code)

        return call_plain

    @contextmanager
    def recorded(self, recording: "Recording") -> Iterator[None]:
        """Keep the calls that are made meanwhile, instead of making them; Foreign if one cannot be
        recorded."""
        self._recording = recording
        try:
            yield
        finally:
            self._recording = None
        recording.close()

    def replay(self, count: int, calls: Any) -> None:
        """Make `count` recorded calls, in one call that never takes the interpreter's lock."""
        if code := self._replay(self._pool, count, calls):
            _fail("xl_replay", code)


class Foreign(Exception):
    """Something that cannot be recorded: its name."""


class Recording:
    """Calls with all their arguments; who replays it keeps alive what the addresses point to."""

    def __init__(self, kernels: Kernels):
        self.calls: list[tuple[int, bytes]] = []
        self._kernels = kernels
        self._count = 0
        self._arguments: Any = None
        self._table: Any = None

    def close(self) -> None:
        """No more calls come: lay them out as xl_replay reads them."""
        self._arguments = ctypes.create_string_buffer(b"".join(args for _, args in self.calls))
        at = ctypes.addressof(self._arguments)
        table: list[int] = []
        for entry, args in self.calls:
            table += (entry, at)
            at += len(args)
        self._table = (I64 * len(table))(*table)
        self._count = len(self.calls)
        self.calls.clear()

    def replay(self) -> None:
        """Make the calls again."""
        self._kernels.replay(self._count, self._table)


def _fail(name: str, code: int) -> None:
    if code == 1:
        raise MemoryError(f"{name}: out of memory")
    raise AssertionError(f"{name}: this library lacks that kind of weight")
