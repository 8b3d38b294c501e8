"""Weights as the GEMM kernels read them, and how they are made."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from xylite import tree
from xylite.errors import ConfigError

FORMATS = ("", "int8", "w8a8", "int4")


@tree.node
class PackedWeight:
    """[N, K] (or [E, N, K]) in a format of `smooth_gemm`.

    data    [N, K]; int8 for "int8" and "w8a8", bytes [N, K / 2] for "int4"
    scale   [N] float32; "int4": [K / group, N]
    zero    like scale, "int4" only
    group   columns that share a scale, "int4" only
    """

    data: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None
    format: str = tree.static(default="")
    group: int = tree.static(default=0)

    @property
    def num_rows(self) -> int:
        """N, gate and up rows counted apart."""
        return self.data.shape[-2]

    @property
    def num_cols(self) -> int:
        """K."""
        return self.data.shape[-1] * (2 if self.format == "int4" else 1)


def pack(w: Tensor | PackedWeight, gated: bool = False) -> PackedWeight:
    """The leaf of a plain weight; a packed one is taken as it is.

    Gate rows before up rows are what the kernels want, so `gated` changes nothing.
    """
    if isinstance(w, PackedWeight):
        return w
    if not isinstance(w, Tensor):
        raise ConfigError(f"weights of type {type(w).__name__} have no GEMM here")
    return PackedWeight(w.contiguous())


def quantise_int8(w: Tensor, *, activations: bool = False) -> PackedWeight:
    """Symmetric int8 with a scale per row; with `activations`, x is quantised per token too."""
    scale = w.float().abs().amax(-1).clamp(min=1e-12) / 127
    data = torch.round(w.float() / scale[..., None]).clamp(-127, 127).to(torch.int8)
    return PackedWeight(data, scale, format="w8a8" if activations else "int8")


def packers() -> dict[str, Callable[..., PackedWeight]]:
    """Formats that a weight can be quantised to at load, as `Ops.packers` wants them."""

    def packer(quantise: Callable[[Tensor], PackedWeight]) -> Callable[..., PackedWeight]:
        # Gate rows before up rows are what the kernels want, so `gated` changes nothing.
        return lambda w, gated=False: quantise(w)

    return {
        "int8": packer(quantise_int8),
        "w8a8": packer(partial(quantise_int8, activations=True)),
        "int4": packer(quantise_int4),
    }


def quantise_int4(w: Tensor, group: int | None = None) -> PackedWeight:
    """Asymmetric 4 bits, w = (q - zero) * scale with q in [0, 15], per `group` columns; None = the
    largest of 128, 64 and 32 that divides K."""
    k = w.shape[-1]
    if group is None:
        group = next((g for g in (128, 64) if k % g == 0), 32)
    if group < 32 or group & (group - 1) or k % group:
        raise ConfigError(f"int4 needs groups of a power of two >= 32 that divide K={k}: {group}")
    g = w.float().unflatten(-1, (k // group, group))
    low, high = g.amin(-1, keepdim=True).clamp(max=0), g.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-12)
    zero = torch.round(-low / scale)
    q = torch.round(g / scale + zero).clamp(0, 15)
    return pack_int4(q.flatten(-2), scale[..., 0], zero[..., 0])


def pack_int4(q: Tensor, scale: Tensor, zero: Tensor) -> PackedWeight:
    """Values q [.., N, K] in [0, 15] with scale and zero [.., N, K / group] as the kernels want.

    Within a group, byte j holds column j in its low half and column j + group / 2 in its high
    half less 8, so that the byte is signed and unpacks by arithmetic alone.
    """
    group = q.shape[-1] // scale.shape[-1]
    halves = q.to(torch.int16).unflatten(-1, (scale.shape[-1], 2, group // 2))
    data = (halves[..., 0, :] + 16 * (halves[..., 1, :] - 8)).to(torch.int8).flatten(-2)
    scale, zero = (s.float().transpose(-1, -2).contiguous() for s in (scale, zero))
    return PackedWeight(data, scale, zero, format="int4", group=group)


def unpack(w: PackedWeight) -> Tensor:
    """The weight's values, float32 unless it is plain; for tests and for tables without kernels."""
    if w.format == "":
        return w.data
    assert w.scale is not None
    if w.format != "int4":
        return w.data.float() * w.scale[..., None]
    assert w.zero is not None
    data = w.data.to(torch.int16).unflatten(-1, (w.scale.shape[-2], w.group // 2))
    high = torch.div(data, 16, rounding_mode="floor")
    q = torch.cat((data - 16 * high, high + 8), -1).float()
    scale, zero = (s.transpose(-1, -2)[..., None] for s in (w.scale, w.zero))
    return ((q - zero) * scale).flatten(-2)
