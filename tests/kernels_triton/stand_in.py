"""A stand-in device: the cuda and npu tables on CPU tensors, kernels in Triton's interpreter.

Import this module before any of xylite.kernels_triton: it chooses the interpreter.
"""

import os
import sys
from collections.abc import Callable, Iterable
from typing import Literal

if "xylite.kernels_triton.smooth_gemm" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from xylite.kernels_triton import smooth_gemm, tiles
from xylite.kernels_triton.device import Services
from xylite.ops import Ops
from xylite.ops.shared.triton_table import assemble

assert type(smooth_gemm.smooth_gemm).__name__ == "InterpretedFunction", (
    "kernels were imported before the interpreter was chosen"
)

GIB = 1 << 30


def stand_in(
    kind: Literal["cuda", "npu"],
    num_cores: int = 3,
    tuned: Iterable[tiles.Tiles] = (),
    capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    chip: str = tiles.INTERPRETER,
) -> Ops:
    """The table of a device of this kind, small enough for tests: 16 tokens per block.

    chip     whose tiles the kernels have
    capture  None = no graphs; `lambda run: run` is a graph whose replay runs the pass again;
             there are recordings for up to 4 and up to 24 tokens
    """
    services = Services(
        device=torch.device("cpu"),
        chip=chip,
        arch="stand-in",
        cores=num_cores,
        vector_cores=num_cores if kind == "cuda" else 2 * num_cores,
        memory=lambda: (GIB, 2 * GIB),
        synchronize=lambda: None,
        capture=capture,
        buckets=(4, 24),
        tuned=tuned,
    )
    return assemble(kind, services)
