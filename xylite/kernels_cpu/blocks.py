"""Weights that are quantised already, or become so: values, scales and minima by group."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """How groups of a weight are stored: value = scale * (q - zero) + min, see src/quant.cpp.

    turned  the values are those of the weight's groups times a Hadamard matrix, see
            src/activations.h
    """

    bits: int
    group: int
    zero: int
    has_min: bool = False
    turned: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A weight [N, K] in groups along K.

    q       [N, K] uint8, below 2^bits
    scales  [N, ceil(K / group)] float16
    mins    the same, where the format has them
    """

    q: Tensor
    scales: Tensor
    mins: Tensor | None
    form: QuantFormat


GROUP: Final = 64  # where the choice is ours: half the scales of 32 at the same perplexity
INT8: Final = QuantFormat(bits=8, group=GROUP, zero=128, turned=True)
INT4: Final = QuantFormat(bits=4, group=32, zero=0, has_min=True)

# GGUF's block types of 32 values that these kernels take as they are.
GGUF: Final[Mapping[str, QuantFormat]] = {
    "Q8_0": QuantFormat(bits=8, group=32, zero=128),
    "Q4_0": QuantFormat(bits=4, group=32, zero=8),
    "Q4_1": QuantFormat(bits=4, group=32, zero=0, has_min=True),
}


def from_gguf(kind: str, raw: Tensor) -> Quantized:
    """The values of GGUF blocks, bit for bit.

    raw     [N, bytes of a row] uint8: per block a float16 scale, for Q4_1 a float16 minimum, then
            32 int8, or 16 bytes whose low halves are the first 16 values
    source  ggml, ggml-common.h
    """
    form = GGUF[kind]
    head = 4 if form.has_min else 2
    size = head + 32 * form.bits // 8
    blocks = raw.reshape(raw.shape[0], -1, size)
    floats = blocks[..., :head].contiguous().view(torch.float16)
    body = blocks[..., head:]
    if form.bits == 8:
        q = body ^ 128  # int8 to the same plus 128, unsigned
    else:
        q = torch.cat((body & 15, body >> 4), -1)
    mins = floats[..., 1] if form.has_min else None
    return Quantized(q.flatten(1), floats[..., 0], mins, form)


def quantize_int4(w: Tensor) -> Quantized:
    """A weight [N, K] in 4 bits: each group's least value at 0, its largest at 15.

    A group with a value that is not finite gives NaN.
    """
    k = w.shape[1]
    # What is beyond K is cut off again: it shall not be among a group's values.
    wide = pad(w.float(), (0, -k % INT4.group), mode="replicate").unflatten(1, (-1, INT4.group))
    low, high = wide.amin(-1), wide.amax(-1)
    bad = (high - low) * 0
    mins = (low.clamp(-65504, 65504) + bad).half()
    scales = ((high - mins.float()) / 15).clamp(0, 65504).half()
    step = scales.float().clamp(min=1e-12)[..., None]
    q = ((wide - mins.float()[..., None]) / step).round().clamp(0, 15).nan_to_num()
    return Quantized(q.to(torch.uint8).flatten(1)[:, :k], scales, mins, INT4)
