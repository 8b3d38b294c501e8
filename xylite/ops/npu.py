"""Ascend 910B and A3 NPUs: the Triton kernels. The only module that imports torch_npu."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from xylite.errors import ConfigError
from xylite.kernels_triton import tuned
from xylite.kernels_triton.device import Services, clash, version
from xylite.ops import Ops
from xylite.ops.shared.triton_table import assemble, seconds_by_events

log = logging.getLogger(__name__)


class Fitting(NamedTuple):
    """Versions that belong together; generation is that of the compiler in CANN."""

    cann: str
    torch: str
    torch_npu: str
    triton_ascend: str
    generation: str


# torch-npu names its torch exactly; the rest is what vllm-ascend releases use together.
FITTING: Final = (
    Fitting("8.5", "2.9.0", "2.9.0", "3.2.0", "1.0.0"),
    Fitting("9.0", "2.10.0", "2.10.0", "3.2.1", "1.1.0"),
    Fitting("9.1", "2.10.0", "2.10.0", "3.2.2", "1.2.0"),
)
CHIPS: Final = ("Ascend910B", "Ascend910_93")


def sets_that_fit() -> str:
    """The rows of FITTING in words, for messages."""
    return "versions that fit together: " + "; ".join(
        f"CANN {f.cann}, torch {f.torch}, torch-npu {f.torch_npu}, triton-ascend {f.triton_ascend}"
        for f in FITTING
    )


def _base(version: str) -> str:
    """2.9.0 of 2.9.0+cpu and of 2.9.0.post9."""
    return ".".join(version.split("+")[0].split(".")[:3])


def missing() -> str | None:
    """What is wrong with the installed packages; None = nothing."""
    torch_npu, triton_ascend = version("torch-npu"), version("triton-ascend")
    for name, found in (("torch-npu", torch_npu), ("triton-ascend", triton_ascend)):
        if found is None:
            return f"the package {name} is not installed; {sets_that_fit()}"
    reason = clash("triton-ascend")
    if reason is not None:
        return reason
    if _base(str(torch_npu)) != _base(torch.__version__):
        return (
            f"torch-npu {torch_npu} needs torch {_base(str(torch_npu))}, here is "
            f"{torch.__version__}; {sets_that_fit()}"
        )
    return None


def _import() -> Any:
    """torch_npu; ConfigError saying what is missing."""
    try:
        import torch_npu  # pyright: ignore[reportMissingImports] (only where an NPU is)
    except (ImportError, OSError, RuntimeError) as e:
        raise ConfigError(
            f"torch_npu cannot be loaded ({e}): is CANN installed, and its set_env.sh sourced? "
            f"{sets_that_fit()}",
            param="device",
        ) from e
    return torch_npu


def available() -> str | None:
    """None, or why this backend cannot be used here."""
    reason = missing()
    if reason is not None:
        return reason
    try:
        torch_npu = _import()
    except ConfigError as e:
        return e.message
    if not torch_npu.npu.is_available():
        return "no Ascend NPU is visible: check npu-smi info and ASCEND_RT_VISIBLE_DEVICES"
    name = torch_npu.npu.get_device_name(0)
    if not name.startswith(CHIPS):
        return f"the NPU is a {name}, the kernels need one of {', '.join(CHIPS)}"
    try:
        fitting(torch_npu.npu.utils.get_cann_version("CANN"))
    except ConfigError as e:
        return e.message
    return None


def fitting(cann: str) -> Fitting:
    """The row for a version of CANN, such as 8.5.0 or 9.1.RC1."""
    for row in FITTING:
        if cann == row.cann or cann.startswith(row.cann + "."):
            return row
    raise ConfigError(f"CANN {cann} is not supported; {sets_that_fit()}", param="device")


def table(index: int) -> Ops:
    """The ops of NPU `index`."""
    torch_npu = _import()
    if index >= torch_npu.npu.device_count():
        raise ConfigError(
            f"device npu:{index}: there are {torch_npu.npu.device_count()} NPUs", param="device"
        )
    torch_npu.npu.set_device(index)
    properties = torch_npu.npu.get_device_properties(index)
    row = fitting(torch_npu.npu.utils.get_cann_version("CANN"))
    for name, wanted in (("torch-npu", row.torch_npu), ("triton-ascend", row.triton_ascend)):
        found = version(name)
        if found is None or _base(found) != wanted:
            log.warning("%s is %s, CANN %s goes with %s", name, found, row.cann, wanted)
    chip, name = f"910b-{row.generation}", torch_npu.npu.get_device_name(index)
    tuned_file = tuned.file_of(chip, name, f"CANN {row.cann}")
    return assemble(
        "npu",
        Services(
            device=torch.device("npu", index),
            chip=chip,
            arch=f"{name} (CANN {row.cann})",
            cores=properties.cube_core_num,
            vector_cores=properties.vector_core_num,
            memory=lambda: torch_npu.npu.mem_get_info(index),
            synchronize=lambda: torch_npu.npu.synchronize(index),
            capture=partial(_capture, torch_npu, torch_npu.npu.graph_pool_handle()),
            tuned=tuned_file.rows(),
            tuned_file=tuned_file,
            seconds=partial(seconds_by_events, torch_npu.npu.Event),
        ),
    )


def _capture(torch_npu: Any, pool: Any, run: Callable[[], None]) -> Callable[[], None]:
    """Record what `run` submits as an NPU graph; it runs once before, to compile its kernels.

    pool  memory that all graphs share: none needs another's results
    """
    side, main = torch_npu.npu.Stream(), torch_npu.npu.current_stream()
    side.wait_stream(main)
    with torch_npu.npu.stream(side):
        run()
    main.wait_stream(side)
    graph = torch_npu.npu.NPUGraph()
    with torch_npu.npu.graph(graph, pool=pool):
        run()
    return graph.replay
