"""The C++ kernels as Python functions of addresses and integers. No torch here.

`Kernels` owns a pool of threads. Calls release the interpreter's lock, and calls from several
threads run one after the other. Layouts and meanings stand with the sources in `src/`.
"""

import ctypes
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

P, I32, I64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64

# Types of elements, and how a weight (or a KV tile) of a type is multiplied. BF16 widens in
# registers and computes in float32; BF16_DOT uses the machine's bf16 dot product, BF16_COMPACT too,
# on compact panels.
T_F32, T_BF16, T_F16 = 0, 1, 2
K_F32, K_F16, K_BF16, K_BF16_DOT, K_BF16_COMPACT = 0, 1, 2, 3, 4
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
    "xl_last_rows": "5q",
    "xl_gather": "7q",
    "xl_quant_gather": "11q",
    "xl_compact_gather": "6q",
}
# The others take their arguments one by one, after the pool.
_SIGNATURES: Final[dict[str, Sequence[Any]]] = {
    "xl_pack": (I32, P, I64, I64, I32, P),
    "xl_compact_plan": (P, I64, I64, I32, P),
    "xl_compact_pack": (P, I64, I64, I32, P, P),
    "xl_quant_pack": (I32, I64, I32, P, P, P, I64, I64, I32, P),
    "xl_quant_from": (I32, P, I64, I64, I64, I32, P),
    "xl_move_slots": (P, P, I32, P, P, I64, I64, I64, I64),
    "xl_gated_act": (P, I32, I32, P, I32, I64, I64),
    "xl_argmax": (P, I64, I64, I64, P),
    "xl_finite": (P, I32, I64, I64, I64, P),
}


# Entry points of this name keep the interpreter's lock where they read few elements: the event loop
# would take it while the device waits. Where rows and columns stand among their arguments.
_SIZES: Final = {"xl_argmax": (1, 2), "xl_finite": (2, 3)}
SHORT: Final = 1 << 20  # elements: a quarter of a millisecond on one core


class Kernels:
    """Entry points of one library, each bound to this object's pool of threads.

    threads  worker 0 is the caller, so one thread starts none
    spin_us  how long an idle worker looks for work before it sleeps
    raises   LoadError; ThreadsError if the system does not give that many threads
    """

    def __init__(self, path: Path, *, threads: int, spin_us: int = 50):
        self._path = str(path)
        try:
            self._library = ctypes.CDLL(self._path)
        except OSError as e:  # a folder whose files may not be executed, say
            raise LoadError(str(e)) from None
        start = self._library.xl_pool_start
        start.argtypes, start.restype = (I32, I32), P
        stop = self._library.xl_pool_stop
        stop.argtypes, stop.restype = (P,), None
        pool = start(threads, spin_us)
        if not pool:
            raise ThreadsError(f"the system does not give {threads} threads to the CPU kernels")
        self.threads = threads
        self._finalizer = weakref.finalize(self, stop, pool)
        self._pool = pool
        self._recorder = _Recorder()
        self.pack = self._entry("xl_pack")
        self.gather = self._entry("xl_gather")
        self.linear = self._entry("xl_linear")
        self.compact_plan = self._entry("xl_compact_plan")
        self.compact_pack = self._entry("xl_compact_pack")
        self.compact_gather = self._entry("xl_compact_gather")
        self.quant_pack = self._entry("xl_quant_pack")
        self.quant_from = self._entry("xl_quant_from")
        self.quant_gather = self._entry("xl_quant_gather")
        self.quant_linear = self._entry("xl_quant_linear")
        self.add_rms_norm = self._entry("xl_add_rms_norm")
        self.rope_append = self._entry("xl_rope_append")
        self.last_rows = self._entry("xl_last_rows")
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

    # What an entry point holds on to is not this object: the pool's threads end with the last
    # reference to it, not at some later collection of cycles.

    def _entry(self, name: str) -> Callable[..., None]:
        function, pool, recorder = getattr(self._library, name), self._pool, self._recorder
        function.restype = I32
        if name in _STRUCTS:
            layout = struct.Struct(_STRUCTS[name])
            size = getattr(self._library, f"{name}_bytes")()
            assert layout.size == size, f"{name}: {layout.size} bytes here, {size} in the library"
            function.argtypes = (P, ctypes.c_char_p)
            entry = ctypes.cast(function, P).value
            assert entry is not None
            return _packing(name, function, pool, layout.pack, recorder, entry)
        function.argtypes = (P, *_SIGNATURES[name])
        if name not in _SIZES:
            return _plain(name, pool, lambda args: function, recorder)
        keeping = getattr(ctypes.PyDLL(self._path), name)
        keeping.argtypes, keeping.restype = function.argtypes, I32
        rows, columns = _SIZES[name]
        return _plain(
            name,
            pool,
            lambda args: keeping if args[rows] * args[columns] <= SHORT else function,
            recorder,
        )

    @contextmanager
    def recorded(self, recording: "Recording") -> Iterator[None]:
        """Keep the calls that this thread makes meanwhile, instead of making them; Foreign if one
        cannot be recorded."""
        recorder = self._recorder
        assert recorder.recording is None, "a pass is being recorded already"
        recorder.thread, recorder.recording = threading.get_ident(), recording
        try:
            yield
        finally:
            recorder.recording = None
        recording.close()

    def replay(self, count: int, calls: Any) -> None:
        """Make `count` recorded calls, in one call that never takes the interpreter's lock."""
        if code := self._replay(self._pool, count, calls):
            _fail("xl_replay", code)


class _Recorder:
    """What calls go to instead of the kernels, while `thread` records a pass."""

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self.thread = 0

    def of_this_thread(self) -> "Recording | None":
        return self.recording if threading.get_ident() == self.thread else None


def _packing(
    name: str,
    function: Callable[..., int],
    pool: int,
    pack: Callable[..., bytes],
    recorder: _Recorder,
    entry: int,
) -> Callable[..., None]:
    def call(*args: int | float) -> None:
        packed = pack(*args)
        if recorder.recording is not None and (recording := recorder.of_this_thread()):
            recording.calls.append((entry, packed))
            return
        if code := function(pool, packed):
            _fail(name, code)

    return call


def _plain(
    name: str,
    pool: int,
    function_for: Callable[[Any], Callable[..., int]],
    recorder: _Recorder,
) -> Callable[..., None]:
    def call(*args: int | float | None) -> None:
        if recorder.recording is not None and recorder.of_this_thread():
            raise Foreign(name)
        if code := function_for(args)(pool, *args):
            _fail(name, code)

    return call


class LoadError(Exception):
    """The library is there, but the system does not load it; the message says why."""


class ThreadsError(Exception):
    """The system gives no more threads."""


class Foreign(Exception):
    """Something that cannot be recorded: its name."""


class Recording:
    """Calls with all their arguments; who replays it keeps alive what the addresses point to.

    nbytes  memory that it takes, once closed
    """

    def __init__(self, kernels: Kernels):
        self.calls: list[tuple[int, bytes]] = []
        self.nbytes = 0
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
        self.nbytes = len(self._arguments) + ctypes.sizeof(self._table)
        self.calls.clear()

    def replay(self) -> None:
        """Make the calls again."""
        self._kernels.replay(self._count, self._table)


def _fail(name: str, code: int) -> None:
    if code == 1:
        raise MemoryError(f"{name}: out of memory")
    if code == 3:
        raise RuntimeError(
            f"{name}: this process was forked from the one that loaded the CPU kernels, and their "
            "threads are not in it; load them anew, or start processes by spawn"
        )
    raise AssertionError(f"{name}: this library lacks that kind of weight")
