"""What is measured about a machine, once, and kept in the cache directory.

Two things. How bf16 weights are multiplied: some processors have a bf16 dot product at twice the
speed of float32 arithmetic, others at half. It is measured at first start (a few milliseconds) and
holds for every shape and number of rows, so that results do not depend on the batch. And the cache
blocks of a linear layer by (N, K) and bucket of M: the built-in sizes follow from the caches and
serve everything; `tune` tries others. Blocks change no result.
"""

import contextlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from xylite.kernels_cpu.library import K_BF16, K_BF16_DOT, T_F32, Kernels

VERSION: Final = 1
BUCKETS: Final = (16, 64, 256, 1024, 4096)  # rows at which `tune` measures
LEAST_GAIN: Final = 1.03  # less is noise

# (N, K, bucket of M) -> KiB of activations and of a panel that stay in cache
Blocks = dict[tuple[int, int, int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Tuning:
    """dot: multiply bf16 by its dot product; blocks: sizes that beat the built-in ones."""

    dot: bool
    blocks: Blocks = field(default_factory=dict)


def bucket(rows: int) -> int:
    """The bucket of a number of rows: they double."""
    return rows.bit_length()


def processor() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cache_sizes() -> tuple[int, int]:
    """Bytes of one core's first and second level data cache; usual sizes where not known."""
    sizes = {1: 32 << 10, 2: 512 << 10}
    for entry in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        with contextlib.suppress(OSError, ValueError):
            level, kind, size = (
                (entry / name).read_text().strip() for name in ("level", "type", "size")
            )
            if kind in ("Data", "Unified") and int(level) in sizes and size.endswith("K"):
                sizes[int(level)] = int(size[:-1]) << 10
    return sizes[1], sizes[2]


def load(path: Path) -> Tuning | None:
    """What was measured with this library on this processor, or None."""
    try:
        held = json.loads(path.read_text())
        if held["version"] != VERSION or held["processor"] != processor():
            return None
        rows = [tuple(map(int, row)) for row in held["blocks"]]
        blocks = {(n, k, m): (block, panel) for n, k, m, block, panel in rows}
        return Tuning(bool(held["dot"]), blocks)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(path: Path, tuning: Tuning) -> None:
    """Replace the file at once; a directory that cannot be written is no error."""
    held = {
        "version": VERSION,
        "processor": processor(),
        "dot": tuning.dot,
        "blocks": [[*key, *sizes] for key, sizes in sorted(tuning.blocks.items())],
    }
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as f:
            json.dump(held, f)
        os.replace(f.name, path)


def at_start(kernels: Kernels, path: Path, *, has_dot: bool) -> Tuning:
    """The machine's tuning: as held in `path`, else measured and written there."""
    known = load(path)
    if known is None:
        known = Tuning(has_dot and dot_is_faster(kernels))
        save(path, known)
    return known


def dot_is_faster(kernels: Kernels) -> bool:
    """Whether the bf16 dot product beats widening to float32 where arithmetic is the limit."""
    n, k, m = 128, 256, 96
    w = torch.zeros(n * k, dtype=torch.bfloat16)
    x, out = torch.zeros(m, k), torch.empty(m, n)

    def run(kind: int) -> Callable[[], None]:
        args = (w.data_ptr(), n, k, x.data_ptr(), T_F32, m, out.data_ptr(), T_F32, 0, 0, 0, 0.0)
        return lambda: kernels.linear(kind, *args, 256, 24)

    both = run(K_BF16), run(K_BF16_DOT)
    least = [min(_time(f) for _ in range(30)) for f in both]
    return least[1] < least[0]


def tune(
    multiply: Callable[..., Any],
    weight: Any,
    sizes: Mapping[str, Iterable[int]],
    builtin: tuple[int, int],
    budget_s: float = 0.05,
) -> Blocks:
    """Block sizes that beat the built-in ones for one packed weight.

    multiply  (x [M, K], weight, block KiB, panel KiB) -> result
    sizes     "block" and "panel": KiB to try
    builtin   (block, panel) to beat
    """
    found: Blocks = {}
    tried = [(b, p) for b in sizes["block"] for p in sizes["panel"]]
    tried = [builtin, *(t for t in tried if t != builtin)]
    for rows in BUCKETS:
        x = torch.zeros(rows, weight.k)
        least = dict.fromkeys(tried, float("inf"))
        end = time.perf_counter() + budget_s * len(tried)
        # By turns, so that a disturbance hits all alike.
        while time.perf_counter() < end or least[tried[-1]] == float("inf"):
            for t in tried:
                least[t] = min(least[t], _time(lambda: multiply(x, weight, *t)))  # noqa: B023
        best = min(tried, key=least.__getitem__)
        if least[best] * LEAST_GAIN < least[builtin]:
            found[weight.n, weight.k, bucket(rows)] = best
    return found


def _time(f: Callable[[], Any]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start
