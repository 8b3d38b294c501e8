"""The most that this processor can do, by its own instructions rather than by products: multiply-
adds on values in registers, and reading memory and caches (peak.cpp)."""

import ctypes
import mmap
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from bench.ops.timing import Roofline
from xylite.ops import Ops

SOURCE: Final = Path(__file__).with_name("peak.cpp")
BUILD_TIMEOUT_S: Final = 60
WAIT_S: Final = 60  # for the other threads
MEMORY_BYTES: Final = 256 << 20  # of all threads together: more than caches hold
CACHE_BYTES: Final = 256 << 10  # of a thread: too much for first caches, little for second ones
# The time that goes to memory, compared with an instruction: others' traffic makes it unsteady.
MEMORY_SHARES: Final = 4
GUESS: Final = 2e11  # a thread's operations and cached bytes in a second; a measurement takes the
# longer the wronger it is
# Entry point -> what is multiplied so. Weights of 4 bits are multiplied as bytes, float16 widened.
INSTRUCTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "peak_fma": ("float32", "float16", "bfloat16"),
    "peak_bf16": ("bfloat16",),
    "peak_int8": ("int8", "int4"),
}


class Instructions:
    """Measures on `threads` threads at once, each on a core of its own where the system lets it.

    raises  OSError: there is no compiler, or it fails
    """

    def __init__(self, threads: int):
        self._threads = threads
        self._library = _built()
        self._together = threading.Barrier(threads)
        self._memory = _pages(MEMORY_BYTES)

    def measure(self, dtype: str, seconds: float) -> Roofline:
        """The limits of all threads together, now; FLOP/s also of every dtype by its name.

        dtype    what the format "" is
        seconds  about how long it may take
        """
        each = seconds / (len(INSTRUCTIONS) + 1 + MEMORY_SHARES)
        size = MEMORY_BYTES // self._threads // 1024 * 1024
        flops: dict[str, float] = {}
        with ThreadPoolExecutor(self._threads) as pool:
            for name, kinds in INSTRUCTIONS.items():
                function: Callable[[int], float] = getattr(self._library, name)
                if not (once := function(1)):
                    continue
                rate = self._rate(pool, lambda i, f=function, n=each * GUESS / once: f(int(n) + 1))
                flops |= {kind: max(rate, flops.get(kind, 0.0)) for kind in kinds}
            memory, end = 0.0, time.perf_counter() + MEMORY_SHARES * each
            while not memory or time.perf_counter() < end:
                memory = max(memory, self._rate(pool, lambda i: self._read(i * size, size, 1)))
            again = int(each * GUESS / CACHE_BYTES) + 1
            cache = self._rate(pool, lambda i: self._read(i * CACHE_BYTES, CACHE_BYTES, again))
        return Roofline({"": flops[dtype], **flops}, memory, cache)

    def _read(self, start: int, size: int, repeats: int) -> float:
        self._library.peak_read(self._memory.ctypes.data + start, size, repeats)
        return float(size * repeats)

    def _rate(self, pool: ThreadPoolExecutor, work: Callable[[int], float]) -> float:
        """Of all threads, from the first one's begin to the last one's end; work(i) is called on
        the i-th and says how much it did."""

        def one(i: int) -> tuple[float, float, float]:
            _stay_on_core(i)
            self._together.wait(WAIT_S)
            begin = time.perf_counter()
            done = work(i)
            return done, begin, time.perf_counter()

        done, begin, end = zip(*pool.map(one, range(self._threads)), strict=True)
        return sum(done) / (max(end) - min(begin))


def instructions_of(ops: Ops) -> Instructions | None:
    """Of the processor that computes for a table; None if that is no CPU, or nothing can be built
    (which is said)."""
    if ops.device.kind != "cpu":
        return None
    try:
        return Instructions(ops.device.num_cores)
    except OSError as e:
        print(f"limits are those of products, not of instructions: {e}", file=sys.stderr)
        return None


def _stay_on_core(i: int) -> None:
    """Else two threads of short work begin on one core."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(os.getpid()))
        os.sched_setaffinity(0, {cores[i % len(cores)]})  # 0: the calling thread, no other


def _pages(size: int) -> np.ndarray:
    """[size] uint8 at the start of a page, written, in huge pages where there are any."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1
    return array


def _built() -> ctypes.CDLL:
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise OSError("no C++ compiler found (c++, g++ or clang++)")
    on_x86 = platform.machine().lower() in ("x86_64", "amd64")
    native = "-march=native" if on_x86 else "-mcpu=native"
    with tempfile.TemporaryDirectory(prefix="xylite-peak-") as folder:
        path = Path(folder) / "peak.so"
        command = [compiler, "-std=c++17", "-O2", native, "-ffp-contract=fast", "-shared", "-fPIC"]
        try:
            subprocess.run(
                [*command, str(SOURCE), "-o", str(path)],
                check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S,
            )  # fmt: skip
        except subprocess.SubprocessError as e:
            told = getattr(e, "stderr", None) or str(e)
            raise OSError(f"{compiler} failed: {str(told)[-500:]}") from None
        library = ctypes.CDLL(str(path))
    for name in INSTRUCTIONS:
        function = getattr(library, name)
        function.argtypes, function.restype = (ctypes.c_int64,), ctypes.c_double
    library.peak_read.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    library.peak_read.restype = None
    return library
