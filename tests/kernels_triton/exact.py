"""What kernels are compared with: the reference in float64, and how far from it they may be."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# One rounding to the output's type.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11}
# Half the distance between the type's smallest numbers.
SMALLEST = {torch.float32: 2.0**-149, torch.float16: 2.0**-25}
# Sums in float32: rounding errors of many terms partly cancel; 64 units is far above what any
# order of the sums here gives, and far below what a wrong term would change.
SUMMING = 64 * 2.0**-24


def double(x: Any) -> Any:
    """Tensors and what holds them, in float64."""
    if isinstance(x, Tensor):
        return x.double() if x.is_floating_point() else x
    return x


def in_double(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """f in float64."""
    return f(*(double(a) for a in args), **{k: double(v) for k, v in kwargs.items()})


def assert_near(actual: Tensor, exact: Tensor, magnitude: Tensor | None = None) -> None:
    """Equal up to one rounding to the output's type and float32 sums of terms of `magnitude`."""
    assert actual.shape == exact.shape, (actual.shape, exact.shape)
    size = exact.abs() if magnitude is None else magnitude
    allowed = 1.01 * ROUNDING[actual.dtype] * exact.abs() + SUMMING * size
    allowed += SMALLEST[actual.dtype]
    error = (actual.double() - exact).abs()
    worst = (error / allowed).nan_to_num(torch.inf).max().item() if error.numel() else 0.0
    assert worst <= 1, f"{worst:.3g} times the allowed error"
