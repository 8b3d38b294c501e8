"""What checks are made of: inputs, the reference in float64, and how far from it one may be."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from bench.ops.batches import Limits
from xylite.ops import Ops

# One rounding to the type, and what is lost between its smallest numbers.
ROUNDING: Final[Mapping[torch.dtype, float]] = {
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
SMALLEST: Final = 2.0**-25
# Sums in float32: far above what any order of them gives, far below what a wrong term changes.
SUMMING: Final = 64 * 2.0**-24


@dataclass(frozen=True, slots=True)
class Check:
    """run() -> the worst error, in units of the error that is allowed."""

    name: str
    run: Callable[[], float]

    @property
    def family(self) -> str:
        """Its name without a number of rows: those of one family run the same few kernels."""
        return re.sub(r" \d+ rows$", "", self.name)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is checked.

    rows    of x for products and row by row
    blocks  size of the KV blocks
    groups, head_sizes   query heads per KV head, and their sizes
    limits  of iterations drawn from recorded lengths, at the shape of that name
    """

    rows: Sequence[int]
    blocks: int
    groups: Sequence[int]
    head_sizes: Sequence[int]
    width: int
    cols: int
    vocab: int
    limits: Limits
    shape: str


def error(actual: Tensor, exact: Tensor, magnitude: Tensor | None = None) -> float:
    """Worst error over what is allowed; magnitude: size of the terms that were summed."""
    assert actual.shape == exact.shape, (actual.shape, exact.shape)
    if not actual.numel():
        return 0.0
    size = exact.abs() if magnitude is None else magnitude
    allowed = 1.01 * ROUNDING[actual.dtype] * exact.abs() + SUMMING * size + SMALLEST
    return ((actual.double() - exact).abs() / allowed).nan_to_num(torch.inf).max().item()


def same(actual: Tensor, exact: Tensor) -> float:
    """0 if they are equal, else infinity."""
    return 0.0 if torch.equal(actual, exact) else torch.inf


def _double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def exactly(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """f in float64."""
    return f(*map(_double, args), **{k: _double(v) for k, v in kwargs.items()})


class Maker:
    """Random inputs for the checks of one table in one dtype."""

    def __init__(self, ops: Ops, dtype: torch.dtype, sizes: Sizes):
        self.ops, self.dtype, self.sizes = ops, dtype, sizes
        self.place = ops.device.torch_device
        self._generator = torch.Generator().manual_seed(0)

    def random(self, *size: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(*size, generator=self._generator) * scale
        return made.to(self.dtype).to(self.place)

    def integers(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.place)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Uninitialised memory is NaN, or a large integer: what a kernel fails to write is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
