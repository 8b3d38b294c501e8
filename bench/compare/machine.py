"""What the machine is, and whether anybody else uses it while something is measured (Linux)."""

import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HZ: Final = os.sysconf("SC_CLK_TCK")
# Instruction sets that decide how fast matrix products are.
FLAGS: Final = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni"),
    *("amx_tile", "amx_bf16", "amx_int8", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2"),
)


def describe() -> dict[str, Any]:
    """CPU, instruction sets of interest, cores of this process, memory, system."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    pairs = [line.partition(":") for line in reversed(lines)]
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    memory = Path("/proc/meminfo").read_text().split()[1]
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()),
        "flags": [f for f in FLAGS if f in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory) / 2**20, 1),
        "system": platform.platform(),
        "transparent_hugepages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
    }


def commit(root: Path) -> str:
    """The commit of a checkout, with "+" if files differ from it; "" outside of git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
        return done.stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table; ticks of its own and of its ended children."""

    parent: int
    ticks: int
    name: str


def processes() -> dict[int, Process]:
    """All processes by id; those that end meanwhile are left out."""
    found: dict[int, Process] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        stat = _read(f"/proc/{entry}/stat")
        if not stat:
            continue
        head, _, tail = stat.rpartition(")")
        words = tail.split()
        ticks = sum(map(int, words[11:15]))
        found[int(entry)] = Process(int(words[1]), ticks, head.partition("(")[2])
    return found


def tree(root: int, table: Mapping[int, Process]) -> set[int]:
    """`root` and all below it."""
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        pid = todo.pop()
        if pid in table and pid not in found:
            found.add(pid)
            todo += children.get(pid, ())
    return found


def rss_mib(root: int) -> float:
    """Resident memory of a process tree, shared pages counted once per process."""
    total = 0
    for pid in tree(root, processes()):
        for line in _read(f"/proc/{pid}/status").splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1])
    return round(total / 1024, 1)


def _busy_ticks() -> int:
    """Ticks that all CPUs together were not idle; stolen ones are not ours to see."""
    values = list(map(int, _read("/proc/stat").splitlines()[0].split()[1:9]))
    return sum(values) - values[3] - values[4] - values[7]


class Watch:
    """How many cores others kept busy since it was made: all work but this process' tree's."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._busy = _busy_ticks()
        self._own = _own_ticks()

    def others(self) -> float:
        """Cores, on average."""
        seconds = max(time.monotonic() - self._since, 1e-3)
        busy, own = _busy_ticks() - self._busy, _own_ticks() - self._own
        return round(max(busy - own, 0) / HZ / seconds, 3)


def _own_ticks() -> int:
    table = processes()
    return sum(table[pid].ticks for pid in tree(os.getpid(), table))


def wait_quiet(limit: float, patience_s: float, window_s: float = 1.0) -> float:
    """Cores that others use, once these are below `limit` or `patience_s` have passed."""
    deadline = time.monotonic() + patience_s
    while True:
        watch = Watch()
        time.sleep(window_s)
        others = watch.others()
        if others < limit or time.monotonic() >= deadline:
            return others


def busiest(window_s: float = 1.0, most: int = 3) -> list[str]:
    """Names and shares of the processes outside this tree that use the CPU most."""
    before = processes()
    time.sleep(window_s)
    after = processes()
    ours = tree(os.getpid(), after)
    used: Iterable[tuple[float, str]] = (
        ((p.ticks - before[pid].ticks) / HZ / window_s, f"{p.name} ({pid})")
        for pid, p in after.items()
        if pid in before and pid not in ours
    )
    return [f"{name}: {cores:.2f}" for cores, name in sorted(used, reverse=True)[:most] if cores]
