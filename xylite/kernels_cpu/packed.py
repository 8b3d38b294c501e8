"""Weights as the kernels read them: packed once at load, in memory with huge pages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from xylite import tree
from xylite.kernels_cpu import tuning
from xylite.kernels_cpu.blocks import INT8, QuantFormat, Quantized, from_gguf, quantize_int4
from xylite.kernels_cpu.library import (
    ACT,
    K_BF16_COMPACT,
    K_BF16_DOT,
    T_BF16,
    T_F16,
    T_F32,
    Kernels,
)

TYPES: Final[Mapping[torch.dtype, int]] = {
    torch.float32: T_F32,
    torch.bfloat16: T_BF16,
    torch.float16: T_F16,
}
_NAMES: Final[Mapping[torch.dtype, str]] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
_ROW_TYPES: Final = {t: TYPES[t] for t in (torch.float32, torch.bfloat16)}
ARENA_BYTES: Final = 32 << 20
HUGE_PAGE: Final = 2 << 20
PANEL: Final = 32  # columns of a panel
MOST_COMPACT: Final = 0.9  # of a plain weight's bytes, that compact panels may take


@tree.node
class PackedLinear:
    """A weight [N, K] in panels (src/linear.cpp), or E of them one after the other.

    data     1-D, of the weight's dtype
    gated    gate and up rows share a panel, for a linear with an activation
    experts  E; 0 = one weight
    """

    data: Tensor
    n: int = tree.static()
    k: int = tree.static()
    gated: bool = tree.static()
    experts: int = tree.static(default=0)


@tree.node
class PackedCompact:
    """A bf16 weight [N, K] in compact panels (src/compact.h), or E of them; data is 1-D uint8."""

    data: Tensor
    n: int = tree.static()
    k: int = tree.static()
    gated: bool = tree.static()
    experts: int = tree.static(default=0)


@tree.node
class PackedQuant:
    """A weight [N, K] in 8 or 4 bits, or E of them; data is 1-D uint8."""

    data: Tensor
    n: int = tree.static()
    k: int = tree.static()
    gated: bool = tree.static()
    format: QuantFormat = tree.static()
    experts: int = tree.static(default=0)


Packed = PackedLinear | PackedCompact | PackedQuant


class _Arena:
    """Memory for weights in huge pages: a piece is a view of a larger tensor, which it keeps."""

    def __init__(self, kernels: Kernels):
        self._kernels = kernels
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, aligned to 64."""
        need = -(-num_bytes // 64) * 64
        if need > self._free.numel():
            size = -(-max(need, ARENA_BYTES) // HUGE_PAGE) * HUGE_PAGE
            whole = torch.empty(size + HUGE_PAGE, dtype=torch.uint8)
            start = -whole.data_ptr() % HUGE_PAGE
            self._free = whole[start : start + size]
            self._kernels.huge_pages(self._free.data_ptr(), size)
        piece, self._free = self._free[:num_bytes], self._free[need:]
        return piece


class Packer:
    """Packs weights and multiplies with them.

    kinds  how a weight of a dtype is multiplied
    tuned  cache blocks, as measured
    """

    def __init__(
        self,
        kernels: Kernels,
        kinds: Mapping[torch.dtype, int],
        tuned: tuning.Tuning | None = None,
    ):
        self.kernels = kernels
        self.kinds = kinds
        measured = {} if tuned is None else tuned.blocks
        self._blocks = {
            (rows, n, k, gated, form): blocks
            for (threads, form, gated, n, k, rows), blocks in measured.items()
            if threads == kernels.threads
        }
        self._arena = _Arena(kernels)
        # A third cheaper than torch.empty, which counts a few hundred times per step.
        self.empty: Mapping[torch.dtype, Callable[..., Tensor]] = {
            t: torch.empty(0, dtype=t).new_empty for t in _ROW_TYPES
        }
        # Type of rows that a linear layer reads next. Where every weight of the model rounds its
        # activations to bf16, they are handed over as such: the same numbers, half the traffic.
        self.rows = torch.float32
        self._seen: set[int | None] = set()
        self.default_blocks = (tuned and tuned.default) or tuning.computed_blocks()

    def _packs(self, kind: int | None) -> None:
        self._seen.add(kind)
        self.rows = torch.bfloat16 if self._seen == {K_BF16_DOT} else torch.float32

    def pack(self, w: Tensor, gated: bool = False) -> PackedLinear | PackedCompact | Tensor:
        """A weight [N, K] or [E, N, K] in its own dtype; itself if no kernel has that dtype."""
        self._packs(self.kinds.get(w.dtype))
        if w.dtype not in TYPES:
            return w
        if self.kinds[w.dtype] == K_BF16_DOT and (compact := self._compact(w, gated)) is not None:
            return compact
        n, k = w.shape[-2:]
        each = self.kernels.packed_bytes(TYPES[w.dtype], n, k, gated)
        parts = w.reshape(-1, n, k)
        data = self._arena.take(each * parts.shape[0])
        for i, part in enumerate(parts):
            part = part.contiguous()
            to = data.data_ptr() + i * each
            self.kernels.pack(TYPES[w.dtype], part.data_ptr(), n, k, gated, to)
        return PackedLinear(data.view(w.dtype), n, k, gated, w.shape[0] if w.ndim == 3 else 0)

    def _compact(self, w: Tensor, gated: bool) -> PackedCompact | None:
        """The weight in compact panels; None if they would take nearly as much as plain ones."""
        n, k = w.shape[-2:]
        parts = [part.contiguous() for part in w.reshape(-1, n, k)]
        plain_bytes = self.kernels.packed_bytes(T_BF16, n, k, gated)
        starts = torch.empty(len(parts), -(-n // PANEL) + 1, dtype=torch.int64)
        for part, at in zip(parts, starts, strict=True):
            self.kernels.compact_plan(part.data_ptr(), n, k, gated, at.data_ptr())
        each = int(starts[:, -1].max())
        if each > MOST_COMPACT * plain_bytes:
            return None
        data = self._arena.take(each * len(parts))
        for i, (part, at) in enumerate(zip(parts, starts, strict=True)):
            to = data.data_ptr() + i * each
            self.kernels.compact_pack(part.data_ptr(), n, k, gated, at.data_ptr(), to)
        return PackedCompact(data, n, k, gated, w.shape[0] if w.ndim == 3 else 0)

    def quantize(self, w: Tensor, gated: bool = False) -> PackedQuant:
        """A weight [N, K] or [E, N, K] in 8 bits, turned, each group's largest magnitude at 127."""
        self._packs(None)
        w = w if w.dtype in TYPES else w.float()
        n, k = w.shape[-2:]
        each = self.kernels.quant_bytes(INT8.bits, INT8.group, False, n, k, gated)
        parts = w.reshape(-1, n, k)
        data = self._arena.take(each * parts.shape[0])
        for i, part in enumerate(parts):
            part = part.contiguous()
            to = data.data_ptr() + i * each
            self.kernels.quant_from(TYPES[w.dtype], part.data_ptr(), INT8.group, n, k, gated, to)
        return PackedQuant(data, n, k, gated, INT8, w.shape[0] if w.ndim == 3 else 0)

    def quantize_int4(self, w: Tensor, gated: bool = False) -> PackedQuant:
        """A weight [N, K] or [E, N, K] in 4 bits."""
        parts = w.reshape(-1, *w.shape[-2:])
        return self.pack_quantized(
            [quantize_int4(p) for p in parts], gated, experts=w.shape[0] if w.ndim == 3 else 0
        )

    def pack_gguf(self, kind: str, raw: Tensor, gated: bool = False) -> PackedQuant:
        """The rows of a GGUF tensor as they are in the file, [N, bytes of a row] uint8."""
        return self.pack_quantized([from_gguf(kind, raw)], gated)

    def pack_quantized(
        self, parts: Sequence[Quantized], gated: bool = False, *, experts: int = 0
    ) -> PackedQuant:
        """Weights of one shape and format that are quantised already, bit for bit."""
        self._packs(None)
        form, (n, k) = parts[0].form, parts[0].q.shape
        each = self.kernels.quant_bytes(form.bits, form.group, form.has_min, n, k, gated)
        data = self._arena.take(each * len(parts))
        for i, part in enumerate(parts):
            assert part.form == form
            assert (part.mins is not None) == form.has_min
            q, scales = part.q.contiguous(), part.scales.contiguous()
            mins = None if part.mins is None else part.mins.contiguous()
            self.kernels.quant_pack(
                form.bits, form.group, form.zero, q.data_ptr(), scales.data_ptr(), address(mins),
                n, k, gated, data.data_ptr() + i * each,
            )  # fmt: skip
        return PackedQuant(data, n, k, gated, form, experts)

    def gather(self, w: Packed, ids: Tensor) -> Tensor:
        """Rows ids [T] int32 of a weight that is not gated; [T, K] float32."""
        out = self.empty[torch.float32]((ids.shape[0], w.k))
        ids = ids.to(torch.int32).contiguous()
        where = w.n, w.k, ids.data_ptr(), ids.shape[0], out.data_ptr()
        if isinstance(w, PackedQuant):
            f = w.format
            form = f.bits, f.group, f.has_min, f.zero, f.turned
            self.kernels.quant_gather(*form, w.data.data_ptr(), *where)
        elif isinstance(w, PackedCompact):
            self.kernels.compact_gather(w.data.data_ptr(), *where)
        else:
            self.kernels.gather(TYPES[w.data.dtype], w.data.data_ptr(), *where)
        return out

    def multiply(
        self,
        x: Tensor,
        w: Packed,
        bias: Tensor | None,
        residual: Tensor | None,
        act: str | None,
        cap: float,
        expert: int = 0,
        blocks: tuple[int, int] | None = None,
    ) -> Tensor:
        """`ops.Linear` with weight number `expert`."""
        assert w.gated == (act is not None), "a gated weight goes with an activation"
        assert x.shape[-1] == w.k, (x.shape, w.k)
        if x.dtype not in _ROW_TYPES:
            x = x.float()
        x = x.contiguous()
        bias, residual = plain(bias), plain(residual)
        data = w.data.data_ptr()
        if expert:
            data += expert * (w.data.nbytes // w.experts)
        num_rows, dtype = x.shape[0], self.rows if w.gated else torch.float32
        out = self.empty[dtype]((num_rows, w.n // 2 if w.gated else w.n))
        if blocks is None:
            blocks = self.default_blocks
            if self._blocks and num_rows >= tuning.FIRST_ROWS:
                key = num_rows.bit_length(), w.n, w.k, w.gated, format_of(w)
                blocks = self._blocks.get(key, blocks)
        rest = (
            data, w.n, w.k, x.data_ptr(), _ROW_TYPES[x.dtype], num_rows, out.data_ptr(),
            _ROW_TYPES[dtype],            address(bias), address(residual), ACT[act], cap, *blocks,
        )  # fmt: skip
        if isinstance(w, PackedQuant):
            f = w.format
            self.kernels.quant_linear(f.bits, f.group, f.has_min, f.zero, f.turned, *rest)
        else:
            compact = isinstance(w, PackedCompact)
            self.kernels.linear(K_BF16_COMPACT if compact else self.kinds[w.data.dtype], *rest)
        return out


def format_of(w: Packed) -> str:
    """How a weight is multiplied: bf16, or int8-64 for 8 bits in groups of 64."""
    if isinstance(w, PackedCompact):
        return _NAMES[torch.bfloat16]
    if isinstance(w, PackedLinear):
        return _NAMES[w.data.dtype]
    return f"int{w.format.bits}-{w.format.group}{'-min' if w.format.has_min else ''}"


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def plain(x: Tensor | None) -> Tensor | None:
    """As the kernels read it: float32, contiguous."""
    if x is None or (x.dtype is torch.float32 and x.is_contiguous()):
        return x
    return x.to(torch.float32).contiguous()
