"""What the tables of devices with Triton kernels share."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from xylite.kernels_triton.device import Services, device_fields, functions
from xylite.ops import Device, Ops, reference


def assemble(kind: str, services: Services, invariant: bool = False) -> Ops:
    """The table for kernels on a device of a kind; invariant as `ops.Ops` has it."""
    return dataclasses.replace(
        reference.TABLE,
        name=kind,
        device=Device(kind=kind, **device_fields(services)),
        invariant=None if invariant else partial(assemble, kind, services, invariant=True),
        **functions(services, invariant),
    )


def seconds_by_events(event: Callable[..., Any], run: Callable[[], None]) -> float:
    """Time of a run on a device, by two of its events; event is their class."""
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000
