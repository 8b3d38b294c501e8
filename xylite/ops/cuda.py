"""NVIDIA GPUs from compute capability 8.0: the Triton kernels."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from xylite.errors import ConfigError
from xylite.kernels_triton import tuned
from xylite.kernels_triton.device import Services, clash, version
from xylite.ops import Ops
from xylite.ops.shared.triton_table import assemble, seconds_by_events

TRITON: Final = (3, 6)
OLDEST: Final = (8, 0)
FIT: Final = (
    "xylite[cuda] installs a set that fits: torch 2.10 or newer for CUDA, triton 3.6 or newer"
)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(x) for x in version.split("+")[0].split(".")[:2] if x.isdecimal())


def missing() -> str | None:
    """What is wrong with the installed packages; None = nothing."""
    reason = clash("triton")
    if reason is not None:
        return reason
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) was built without CUDA; {FIT}"
    triton = version("triton")
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
    tuned_file = tuned.file_of(chip, properties.name, f"triton {version('triton')}")
    return assemble(
        "cuda",
        Services(
            device=device,
            chip=chip,
            arch=f"{properties.name} (sm_{properties.major}{properties.minor})",
            cores=properties.multi_processor_count,
            vector_cores=properties.multi_processor_count,
            memory=lambda: torch.cuda.mem_get_info(device),
            synchronize=lambda: torch.cuda.synchronize(device),
            capture=partial(_capture, device, torch.cuda.graph_pool_handle()),
            tuned=tuned_file.rows(),
            tuned_file=tuned_file,
            seconds=partial(seconds_by_events, torch.cuda.Event),
        ),
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
