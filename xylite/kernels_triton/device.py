"""What the tables of devices with Triton kernels have in common: their fields from a device's
services, and what they say about packages.

Imports no Triton, so that a missing one can be explained.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch

from xylite.kernels_triton import attention_tiles, tiles
from xylite.kernels_triton.tuned import TunedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """A device as its libraries know it.

    chip      whose tiles the kernels have, see tiles.py
    arch      for logs
    cores     programs of a kernel with products: AI cores, SMs; vector_cores of the others
    memory    () -> (free, total) bytes
    synchronize  waits until everything submitted has run
    capture   records a forward pass, see `graphs.Graphs`; None: every pass is launched
    buckets   largest numbers of tokens of the recordings; () = those of graphs.py
    tuned     measured tiles, which win over the built-in ones
    tuned_file  where they are kept; None: nothing can be tuned
    seconds   device time of one run of what it is given; None: by the clock
    """

    device: torch.device
    chip: str
    arch: str
    cores: int
    vector_cores: int
    memory: Callable[[], tuple[int, int]]
    synchronize: Callable[[], None]
    capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None
    buckets: Sequence[int] = ()
    tuned: Iterable[tiles.Tiles] = ()
    tuned_file: TunedFile | None = None
    seconds: Callable[[Callable[[], None]], float] | None = None


def device_fields(s: Services) -> dict[str, Any]:
    """The fields of `ops.Device` but its kind."""

    def classes_of(
        head_size: int, kind: Any, kv_dtype: torch.dtype | None = None
    ) -> tuple[int, ...]:
        return attention_tiles.attention_tiles(
            s.chip, head_size, window=kind.window, cap=kind.cap, int8=kv_dtype == torch.int8
        ).tile_q

    sizes = attention_tiles.block_sizes(s.chip)
    return {
        "torch_device": s.device,
        "arch": s.arch,
        "num_cores": s.cores,
        "block_size": sizes[0],
        "block_multiple": sizes[0],
        "block_sizes": sizes,
        "tile_classes": attention_tiles.attention_tiles(s.chip, 128).tile_q,
        "memory": s.memory,
        "synchronize": s.synchronize,
        "classes_of": classes_of,
    }


def functions(s: Services, invariant: bool = False) -> dict[str, Any]:
    """The fields of `ops.Ops` that have kernels.

    invariant  sums are in an order that the batch does not change
    """
    from xylite.kernels_triton import graphs, launch, table, tuner

    target = launch.Target(
        s.cores,
        s.vector_cores,
        tiles.for_chip(s.chip, s.tuned, invariant),
        launch.Counts(s.device),
    )
    made = table.functions(target, s.capture, s.buckets or graphs.BUCKETS)
    if s.tuned_file is not None:
        seconds = s.seconds or partial(_clocked, s.synchronize)
        made["tuner"] = tuner.TileTuner(target, s.tuned_file, seconds, s.capture)
    return made


def _clocked(synchronize: Callable[[], None], run: Callable[[], None]) -> float:
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def version(package: str) -> str | None:
    """Of an installed package; None if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def clash(wanted: str) -> str | None:
    """What is wrong if both Tritons are installed; None if they are not.

    wanted  the one that the device needs
    """
    if version("triton") is None or version("triton-ascend") is None:
        return None
    return (
        "triton and triton-ascend are both installed, and they overwrite each other's files: "
        f"uninstall both, then install {wanted} again"
    )
