"""The kernels as an object: its threads, the interpreter's lock, forked processes."""

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.kernels_cpu import tables
from xylite import config
from xylite.kernels_cpu import build, library
from xylite.kernels_cpu.library import Kernels


def path_of_library() -> Path:
    return build.library(build.instruction_sets()[0], Path(config.cache_dir()) / "kernels")


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_threads_end_with_the_last_reference_to_their_table(no_collections: None) -> None:
    before = num_threads()
    table = tables.make(tables.names()[0], threads=3)
    assert num_threads() == before + 2
    x = table.pack_linear(torch.randn(40, 40, generator=torch.Generator().manual_seed(0)))
    del table, x
    assert num_threads() == before


@pytest.mark.parametrize(("rows", "given_up"), [(4, False), (600, True)])
@pytest.mark.parametrize("name", ["argmax", "finite"])
def test_the_interpreters_lock_is_given_up_for_what_takes_long(
    name: str, rows: int, given_up: bool
) -> None:
    """Another thread, which would have to wait for a minute for the lock, runs meanwhile or not."""
    kernels = Kernels(path_of_library(), threads=1)
    columns = 20_000
    assert (rows * columns > library.SHORT) == given_up
    x = torch.zeros(rows, columns)
    out = torch.zeros(rows, dtype=torch.int64)
    args = x.data_ptr(), rows, columns, columns, out.data_ptr()
    call = kernels.argmax
    if name == "finite":
        args, call = (x.data_ptr(), 0, *args[1:]), kernels.finite

    def runs_meanwhile() -> bool:
        ready, go = threading.Event(), threading.Lock()
        ran: list[int] = []

        def other() -> None:
            ready.set()
            with go:
                ran.append(1)

        go.acquire()
        thread = threading.Thread(target=other)
        thread.start()
        ready.wait()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(60)
        go.release()
        call(*args)
        meanwhile = bool(ran)
        sys.setswitchinterval(interval)
        thread.join()
        return meanwhile

    assert any(runs_meanwhile() for _ in range(40)) == given_up


FORKED = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from xylite.kernels_cpu.library import Kernels

signal.alarm(60)
kernels = Kernels(Path(sys.argv[1]), threads=2)
x = (ctypes.c_float * (1000 * 1000))()
ids = (ctypes.c_int64 * 1000)()
over = False

def work():
    while not over:
        kernels.gated_act(ctypes.addressof(x), 0, 1, ctypes.addressof(x), 0, 500, 1000)

thread = threading.Thread(target=work)
thread.start()
for i in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            kernels.argmax(ctypes.addressof(x), 4, 1000, 1000, ctypes.addressof(ids))
            os._exit(1)
        except RuntimeError as e:
            if "forked" not in str(e):
                os._exit(2)
        again = Kernels(Path(sys.argv[1]), threads=2)
        again.argmax(ctypes.addressof(x), 4, 1000, 1000, ctypes.addressof(ids))
        del again, kernels
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        print("child", i, "ended with", status)
        break
over = True
thread.join()
"""


def test_a_forked_process_gets_an_error_and_may_load_the_kernels_anew() -> None:
    """Whatever the threads of its parent did at that moment."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(path_of_library())],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_structs_are_as_long_as_the_library_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_STRUCTS", {**library._STRUCTS, "xl_gather": "8q"})
    with pytest.raises(AssertionError, match="xl_gather: 64 bytes here, 56 in the library"):
        Kernels(path_of_library(), threads=1)
