"""Kernels run in Triton's interpreter here, and every buffer they are given starts as NaN.

The interpreter cannot multiply bfloat16 and truncates where it should round to it, so these tests
use float32 and float16; bfloat16 runs through the Ascend compiler and its emulator.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels_triton import tiny_run
from tests.models import tiny
from xylite.kernels_triton import launch, smooth_gemm, tiles
from xylite.ops import reference

assert type(smooth_gemm.smooth_gemm).__name__ == "InterpretedFunction", (
    "kernels were imported before the interpreter was chosen"
)


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else 77)

    return poisoned


@pytest.fixture(autouse=True)
def nan_filled_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN, and 77 in integers: what a kernel fails to write is seen."""
    monkeypatch.setattr(torch, "empty", _poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoned(torch.empty_like))


@pytest.fixture
def target() -> launch.Target:
    """Three cores: fewer than most tests have tasks, more than some have."""
    table = tiles.for_chip(tiles.INTERPRETER)
    return launch.Target(3, 5, table, launch.Counts(torch.device("cpu")))


@pytest.fixture
def limited(
    target: launch.Target, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], launch.Target]:
    """n -> the target of a launch made for more rows than the n that the device is told of."""

    def make(n: int) -> launch.Target:
        told = torch.tensor([n], dtype=torch.int32)
        monkeypatch.setattr(launch.Counts, "__call__", lambda self, rows: told)
        return target

    return make


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of `tiny_run`."""
    path = tmp_path_factory.mktemp("tiny")
    return tiny.save_directory(path, tiny_run.CONFIG, tiny.tensors(tiny_run.CONFIG))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """What the reference table says to its requests."""
    with pytest.MonkeyPatch.context() as patch:
        made = tiny_run.driver(reference.TABLE, checkpoint, patch)
        made.run()
    return tiny_run.all_tokens(made)
