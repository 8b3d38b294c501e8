"""How much memory of the machine this process may use, having it before it is needed, and giving
back what is not."""

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

HUGE_PAGE: Final = 2**21
SPARE: Final = 1 / 8  # of the machine's memory, which `taken` leaves free
_MADV_POPULATE_WRITE: Final = 23  # since Linux 5.14; the mmap module does not name it


def _memory_groups() -> list[Path]:
    """Folders of the memory control groups this process is in, innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root = Path("/sys/fs/cgroup")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
        else:
            continue
        # In a container the path is often one of the host, and the root is our own group.
        place = root / group.lstrip("/")
        found += [p for p in (place, *place.parents) if p == root or root in p.parents]
    return found


def _group_memory(group: Path) -> tuple[int, int] | None:
    """(free, limit) bytes of one control group, version 2 or 1; None if it has no limit."""
    for limit_file, used_file, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = int((group / limit_file).read_text())
            used = int((group / used_file).read_text())
            stat = (group / "memory.stat").read_text()
        except (OSError, ValueError):  # absent, or "max"
            continue
        # Pages of files that were read are given back before anything fails.
        reclaimable = sum(int(v) for k, v in map(str.split, stat.splitlines()) if k == cache)
        return max(0, limit - used + reclaimable), limit
    return None


def host_memory() -> tuple[int, int]:
    """(free, total) bytes that this process may use: the machine's, within its control groups."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        known = {k: int(v.split()[0]) * 1024 for k, v in (line.split(":") for line in lines)}
        free = known.get("MemAvailable", total)
    except (OSError, ValueError):  # not Linux
        pass
    for group in _memory_groups():
        limits = _group_memory(group)
        if limits is not None:
            free, total = min(free, limits[0]), min(total, limits[1])
    return free, total


def taken(pieces: Sequence[tuple[int, int]], num_bytes: int) -> Iterator[None]:
    """Make the system give memory now that it would give at the first write to it.

    A new page costs its zeros, and in a virtual machine milliseconds: an iteration would wait.
    Goes through all pieces side by side, a huge page of one at a time, and yields after each.
    Contents stay as they are, so others may use the memory meanwhile. Ends after num_bytes, when
    the machine's memory gets short, or at once where the system cannot do this.

    pieces  (address, bytes) of memory that outlives the iterator
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    page = os.sysconf("SC_PAGE_SIZE")
    for at in range(0, max((size for _, size in pieces), default=0), HUGE_PAGE):
        for address, size in pieces:
            length = min(HUGE_PAGE, size - at)
            if length <= 0:
                continue
            num_bytes -= length
            free, total = host_memory()
            if num_bytes < 0 or free < SPARE * total:
                return
            begin = (address + at) // page * page
            if madvise(begin, address + at + length - begin, _MADV_POPULATE_WRITE):
                return
            yield


def given_back() -> Iterator[None]:
    """Give the system what was freed since the start but is kept by the C library; yields once if
    there is a way (glibc's)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
        yield
