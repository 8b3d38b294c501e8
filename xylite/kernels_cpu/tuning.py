"""What is measured about a machine, once, and kept in the cache directory.

At the first start, in less than 0.2 s: how bf16 weights are multiplied (some processors have a bf16
dot product at twice the speed of float32 arithmetic, others at half), and the cache blocks of
linear layers, if others than those computed from the sizes of the caches are clearly faster. The
arithmetic holds for every shape and number of rows, so that results do not depend on the batch.
Blocks change no result: `xylite tune` measures them for each shape, format and number of rows, see
tuner.py.
"""

import contextlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from xylite.kernels_cpu.library import K_BF16, K_BF16_DOT, K_F32, T_F32, Kernels

VERSION: Final = 2
FIRST_ROWS: Final = 16  # fewer rows are a few tiles at most, and take the default blocks
LAST_ROWS: Final = 4096
MOST_KIB: Final = 1 << 20
CLEAR_GAIN: Final = 1.05  # of blocks that shall serve all shapes

Blocks = tuple[int, int]  # KiB of activations, and of a panel, that stay in cache
# (threads, format, gated, N, K, bucket of M)
Key = tuple[int, str, bool, int, int, int]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tuning:
    """dot: multiply bf16 by its dot product; default: blocks where `blocks` has none, None = as
    the caches' sizes say; blocks: by shape, where others are faster."""

    dot: bool
    default: Blocks | None = None
    blocks: Mapping[Key, Blocks] = field(default_factory=dict)


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


def computed_blocks() -> Blocks:
    """Blocks that fit the second cache of a core together, with room for what passes through: a
    panel that is cut up for the first cache gains less than its sums lose on their way to memory
    and back."""
    _, second = cache_sizes()
    return max(1, second * 3 // 8 // 1024), max(1, second // 4 // 1024)


def load(path: Path) -> Tuning | None:
    """What was measured with this library on this processor, or None.

    A file that is there and cannot be used is named in one warning.
    """
    try:
        held = json.loads(path.read_text())
        for name, here in (("version", VERSION), ("processor", processor())):
            if held[name] != here:
                raise ValueError(f"its {name} is {held[name]!r}, here it is {here!r}")
        default = held["default"]
        blocks = {_key(row[:-2]): _blocks(row[-2:]) for row in held["blocks"]}
        return Tuning(
            _typed(held["dot"], bool), None if default is None else _blocks(default), blocks
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as e:
        why = f"{e} is missing" if isinstance(e, KeyError) else e
        log.warning("%s is not used, and measured anew: %s", path, why)
        return None


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, got {value!r}")
    return value


def _key(row: Sequence[Any]) -> Key:
    kinds = (int, str, bool, int, int, int)
    if len(row) != len(kinds):
        raise ValueError(f"a row has {len(row)} of {len(kinds)} parts before its blocks")
    threads, form, gated, n, k, m = map(_typed, row, kinds)
    return threads, form, gated, n, k, m


def _blocks(pair: Any) -> Blocks:
    block, panel = (_typed(x, int) for x in _typed(pair, list))
    if not (0 < block <= MOST_KIB and 0 < panel <= MOST_KIB):
        raise ValueError(f"blocks must be from 1 to {MOST_KIB} KiB, got {pair}")
    return block, panel


def save(path: Path, tuning: Tuning) -> None:
    """Replace the file at once; OSError if it cannot be written."""
    held = {
        "version": VERSION,
        "processor": processor(),
        "dot": tuning.dot,
        "default": tuning.default,
        "blocks": [[*key, *blocks] for key, blocks in sorted(tuning.blocks.items())],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as f:
        try:
            json.dump(held, f)
            f.close()
            os.replace(f.name, path)
        except BaseException:
            os.unlink(f.name)
            raise


def at_start(kernels: Kernels, path: Path, *, has_dot: bool) -> Tuning:
    """The machine's tuning: as held in `path`, else measured and written there.

    A directory that cannot be written is no error: every start measures then.
    """
    known = load(path)
    if known is None:
        dot = has_dot and dot_is_faster(kernels)
        known = Tuning(dot, better_blocks(kernels, K_BF16_DOT if dot else K_F32))
        with contextlib.suppress(OSError):
            save(path, known)
    return known


def dot_is_faster(kernels: Kernels) -> bool:
    """Whether the bf16 dot product beats widening to float32 where arithmetic is the limit."""
    n, k, m = 512, 512, 96  # arithmetic for 50 us or more: to wake threads may take 10
    w = torch.zeros(n * k, dtype=torch.bfloat16)
    x, out = torch.zeros(m, k), torch.empty(m, n)

    def run(kind: int) -> Callable[[], None]:
        args = (w.data_ptr(), n, k, x.data_ptr(), T_F32, m, out.data_ptr(), T_F32, 0, 0, 0, 0.0)
        return lambda: kernels.linear(kind, *args, 256, 24)

    both = run(K_BF16), run(K_BF16_DOT)
    # By turns: what disturbs the machine for a moment disturbs both.
    least = [min(times) for times in zip(*([_time(f) for f in both] for _ in range(40)))]
    return least[1] < least[0]


def better_blocks(kernels: Kernels, kind: int) -> Blocks | None:
    """Blocks that are clearly faster than the computed ones over a wide and a deep product; None
    if none are, or if this machine is too slow for a quick answer."""
    m, end = 256, time.perf_counter() + 0.15
    block, panel = computed_blocks()
    half, near = max(1, block // 2), max(1, cache_sizes()[0] * 3 // 4 // 1024)
    tried = [(block, panel), (half, panel), (block, near), (half, near)]
    dtype = torch.bfloat16 if kind == K_BF16_DOT else torch.float32
    total = dict.fromkeys(tried, 0.0)
    for n, k in ((1024, 576), (576, 1536)):
        w, x, out = torch.zeros(n * k, dtype=dtype), torch.zeros(m, k), torch.empty(m, n)
        args = (w.data_ptr(), n, k, x.data_ptr(), T_F32, m, out.data_ptr(), T_F32, 0, 0, 0, 0.0)
        least = dict.fromkeys(tried, float("inf"))
        for _ in range(6):
            for t in tried:
                least[t] = min(least[t], _time(partial(kernels.linear, kind, *args, *t)))
            if time.perf_counter() > end:
                return None
        total = {t: total[t] + least[t] for t in tried}
    best = min(tried, key=total.__getitem__)
    return best if total[best] * CLEAR_GAIN < total[tried[0]] else None


def _time(f: Callable[[], Any]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start
