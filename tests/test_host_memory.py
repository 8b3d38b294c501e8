"""Memory is what the machine and the control groups leave to this process."""

import ctypes
import mmap
import sys
from pathlib import Path

import pytest

from xylite import host_memory

linux = pytest.mark.skipif(sys.platform != "linux", reason="madvise populates on Linux only")


def test_memory_is_bounded_by_the_machine():
    free, total = host_memory.host_memory()
    assert 0 < free <= total


@pytest.mark.parametrize("version", [1, 2])
def test_memory_limits_of_control_groups_are_read(version, tmp_path: Path):
    names = {1: ("limit_in_bytes", "usage_in_bytes", "total_"), 2: ("max", "current", "")}
    limit, used, prefix = names[version]
    (tmp_path / f"memory.{limit}").write_text("1000\n")
    (tmp_path / f"memory.{used}").write_text("700\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\n{prefix}inactive_file 200\nfile 400\n")
    assert host_memory._group_memory(tmp_path) == (500, 1000)
    (tmp_path / f"memory.{limit}").write_text("max\n")
    assert host_memory._group_memory(tmp_path) is None
    assert host_memory._group_memory(tmp_path / "absent") is None


def resident(address: int, size: int) -> int:
    """Bytes of the pages in [address, address + size) that the system has given."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    there = (ctypes.c_ubyte * (-(-(address + size - begin) // mmap.PAGESIZE)))()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(begin, address + size - begin, there) == 0
    return sum(page & 1 for page in there) * mmap.PAGESIZE


@pytest.fixture
def piece():
    """(mapping, address, bytes) of memory that was never written, some huge pages and a bit."""
    size = 3 * host_memory.HUGE_PAGE + 5000
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = ctypes.c_char.from_buffer(pages)
    yield pages, ctypes.addressof(held), size
    del held


@linux
def test_memory_is_given_piece_by_piece_and_keeps_what_is_in_it(piece):
    pages, address, size = piece
    pages[10] = 7
    before = resident(address, size)
    steps = host_memory.taken([(address, size)], size)
    next(steps)
    assert before < resident(address, size) < size
    assert list(steps) == [None] * 3
    assert resident(address, size) >= size
    assert (pages[10], pages[11], pages[size - 1]) == (7, 0, 0)


@linux
def test_no_more_memory_is_taken_than_asked_for_or_than_the_machine_can_spare(piece, monkeypatch):
    _, address, size = piece
    assert len(list(host_memory.taken([(address, size)], 2 * host_memory.HUGE_PAGE))) == 2
    assert not list(host_memory.taken([(address, size)], host_memory.HUGE_PAGE - 1))
    monkeypatch.setattr(host_memory, "host_memory", lambda: (124, 1000))
    assert not list(host_memory.taken([(address, size)], size))
    assert not list(host_memory.taken([], size))


@linux
def test_memory_that_is_not_there_ends_it():
    assert not list(host_memory.taken([(2**46, host_memory.HUGE_PAGE)], host_memory.HUGE_PAGE))


def test_other_systems_are_not_asked(piece, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not list(host_memory.taken([piece[1:]], piece[2]))


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc is asked to give memory back"
)
def test_freed_memory_that_the_c_library_kept_is_given_back():
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    libc.free.argtypes = (ctypes.c_void_p,)
    libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    size, count = 60_000, 800  # each below what the library takes from the system by itself
    pieces = [libc.malloc(size) for _ in range(count)]
    for one in pieces:
        libc.memset(one, 1, size)
    for one in pieces[:-1]:  # the last keeps the others' pages from being given back with it
        libc.free(one)
    before = resident_bytes()
    assert len(list(host_memory.given_back())) == 1
    assert before - resident_bytes() > size * count / 2
    libc.free(pieces[-1])


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE
