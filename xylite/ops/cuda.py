"""NVIDIA GPUs from compute capability 8.0: the Triton kernels."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import metadata
from typing import Any, Final

import torch

from xylite.errors import ConfigError
from xylite.kernels_triton import attention_tiles, tiles
from xylite.ops import Device, Ops, reference

TRITON: Final = (3, 6)
OLDEST: Final = (8, 0)
FIT: Final = (
    "xylite[cuda] installs a set that fits: torch 2.10 or newer for CUDA, triton 3.6 or newer"
)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(x) for x in version.split("+")[0].split(".")[:2] if x.isdecimal())


def missing() -> str | None:
    """What is wrong with the installed packages; None = nothing."""
    triton = _version("triton")
    if triton is not None and _version("triton-ascend") is not None:
        return (
            "triton and triton-ascend are both installed, and they overwrite each other's files: "
            "uninstall both, then install triton again"
        )
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) was built without CUDA; {FIT}"
    if triton is None:
        return f"the package triton is not installed; {FIT}"
    if _numbers(triton) < TRITON:
        return f"triton {triton} is older than {'.'.join(map(str, TRITON))}; {FIT}"
    return None


def available() -> str | None:
    """None, or why this backend cannot be used here."""
    reason = missing()
    if reason is not None:
        return reason
    if not torch.cuda.is_available():
        return "no NVIDIA GPU is visible to torch: check nvidia-smi and CUDA_VISIBLE_DEVICES"
    if torch.cuda.get_device_capability() < OLDEST:
        found = ".".join(map(str, torch.cuda.get_device_capability()))
        return f"the GPU has compute capability {found}, the kernels need 8.0 or newer"
    return None


def chip_of(capability: tuple[int, int]) -> str:
    """The tile table for a compute capability: 9.0 has its own, that of 8.0 fits all others."""
    return "sm_90" if capability == (9, 0) else "sm_80"


def table(index: int) -> Ops:
    """The ops of GPU `index`."""
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device cuda:{index}: there are {torch.cuda.device_count()} GPUs", param="device"
        )
    device = torch.device("cuda", index)
    # Triton launches on the current device, whatever device its tensors are on.
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    chip = chip_of((properties.major, properties.minor))
    return assemble(
        device,
        chip,
        f"{properties.name} (sm_{properties.major}{properties.minor})",
        cores=properties.multi_processor_count,
        memory=lambda: torch.cuda.mem_get_info(device),
        synchronize=lambda: torch.cuda.synchronize(device),
        capture=partial(_capture, device, torch.cuda.graph_pool_handle()),
        tuned=tiles.tuned(chip, properties.name, f"triton {_version('triton')}"),
    )


def _capture(device: torch.device, pool: Any, run: Callable[[], None]) -> Callable[[], None]:
    """Record what `run` submits as a CUDA graph; it runs once before, to compile its kernels.

    pool  memory that all graphs share: none needs another's results
    """
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph.replay


def assemble(
    device: torch.device,
    chip: str,
    arch: str,
    *,
    cores: int,
    memory: Callable[[], tuple[int, int]],
    synchronize: Callable[[], None],
    capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    buckets: Sequence[int] = (),
    tuned: Iterable[tiles.Tiles] = (),
    invariant: bool = False,
) -> Ops:
    """The table for kernels on `device`, with tiles of `chip`; services as in `ops.Device`.

    capture  records a forward pass, see `graphs.Graphs`; None: every pass is launched
    buckets  largest numbers of tokens of the recordings; () = those of graphs.py
    tuned    measured tiles, which win over the built-in ones
    invariant  see `ops.Ops.invariant`
    """
    from xylite.kernels_triton import graphs, launch
    from xylite.kernels_triton import table as kernel_table

    count = launch.Counts(device)
    target = launch.Target(cores, cores, tiles.for_chip(chip, tuned, invariant), count)
    size = attention_tiles.block_size(chip)
    again = partial(
        assemble,
        device,
        chip,
        arch,
        cores=cores,
        memory=memory,
        synchronize=synchronize,
        capture=capture,
        buckets=buckets,
        tuned=tuned,
        invariant=True,
    )
    return dataclasses.replace(
        reference.TABLE,
        name="cuda",
        device=Device(
            kind="cuda",
            torch_device=device,
            arch=arch,
            num_cores=cores,
            block_size=size or 16,
            block_multiple=size or 16,
            tile_classes=attention_tiles.attention_tiles(chip, 128).tile_q,
            memory=memory,
            synchronize=synchronize,
            classes_of=lambda head_size, kind: (
                attention_tiles.attention_tiles(
                    chip, head_size, window=kind.window, cap=kind.cap
                ).tile_q
            ),
        ),
        invariant=None if invariant else again,
        **kernel_table.functions(target, capture, buckets or graphs.BUCKETS),
    )
