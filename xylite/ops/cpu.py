"""The CPU: own kernels over threads, torch where no compiler is.

Weights keep their type and are packed once, in panels that serve every number of tokens.
Activations are float32, so bf16 weights lose nothing that bf16 arithmetic would keep. KV has the
weights' type; a tile of it lies as the kernels read it, so only this table's functions may look
inside a block (`kernels_cpu/src/attention.cpp` has the layout).

A row's result does not depend on its batch, at any dtype: every sum runs over ascending k in one
chain (linear layers), or in steps and segments counted from key 0 (attention), whatever the tiles,
the tasks and the threads are; and how a dtype is multiplied is chosen once, not per shape.
"""

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from xylite import config, tree
from xylite.errors import ConfigError
from xylite.kernels_cpu import build
from xylite.kernels_cpu.library import (
    ACT,
    K_BF16,
    K_BF16_DOT,
    K_F16,
    K_F32,
    T_BF16,
    T_F16,
    T_F32,
    AttentionCall,
    Kernels,
)
from xylite.ops import (
    Activation,
    AttentionKind,
    Batch,
    DenseKV,
    KVCache,
    Ops,
    SampleBatch,
    SamplerState,
    reference,
)

log = logging.getLogger(__name__)

TYPES: Final[Mapping[torch.dtype, int]] = {
    torch.float32: T_F32,
    torch.bfloat16: T_BF16,
    torch.float16: T_F16,
}
BLOCK_SIZE: Final = 64
BLOCK_MULTIPLE: Final = 32
TILE_CLASSES: Final = (12, 96)
ARENA_BYTES: Final = 32 << 20
HUGE_PAGE: Final = 2 << 20


@tree.node
class PackedLinear:
    """A weight [N, K] in panels (see linear.cpp), or E of them one after the other.

    data   1-D, of the weight's dtype
    gated  gate and up rows share a panel, for a linear with an activation
    """

    data: Tensor
    n: int = tree.static()
    k: int = tree.static()
    gated: bool = tree.static()
    experts: int = tree.static(default=0)


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


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _plain(x: Tensor | None) -> Tensor | None:
    """As the kernels read it: float32, contiguous."""
    return None if x is None else x.to(torch.float32).contiguous()


class _Table:
    """The ops of one table: kernels, the choice of arithmetic, memory of weights."""

    def __init__(self, kernels: Kernels, kinds: Mapping[torch.dtype, int]):
        self.kernels = kernels
        self.kinds = kinds
        self.arena = _Arena(kernels)
        # Type of rows that a linear layer reads next. Where every weight of the model rounds its
        # activations to bf16, they are handed over as such: the same numbers, half the traffic.
        self.rows = torch.float32
        self._packed: set[int | None] = set()
        # What the attention kernel multiplies with the keys of a dtype.
        self.q_types = {
            dtype: torch.bfloat16 if kind == K_BF16_DOT else torch.float32
            for dtype, kind in kinds.items()
        }
        cache = _cache_sizes()
        self.block_kib, self.panel_kib = cache[1] * 3 // 8 // 1024, cache[0] * 3 // 4 // 1024

    # Linear layers

    def pack_linear(self, w: Tensor, gated: bool = False) -> PackedLinear | Tensor:
        """A weight [N, K] or [E, N, K] in panels; of other dtypes than 16 and 32 bits, itself."""
        self._packed.add(self.kinds.get(w.dtype))
        self.rows = torch.bfloat16 if self._packed == {K_BF16_DOT} else torch.float32
        if w.dtype not in TYPES:
            return w
        n, k = w.shape[-2:]
        each = self.kernels.packed_bytes(TYPES[w.dtype], n, k, gated)
        parts = w.reshape(-1, n, k)
        data = self.arena.take(each * parts.shape[0])
        for i, part in enumerate(parts):
            part = part.contiguous()
            to = data.data_ptr() + i * each
            self.kernels.pack(TYPES[w.dtype], part.data_ptr(), n, k, gated, to)
        return PackedLinear(data.view(w.dtype), n, k, gated, w.shape[0] if w.ndim == 3 else 0)

    def act_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """float32, or the weights' own dtype if it is wider."""
        return torch.float32 if dtype in TYPES else dtype

    def embed(self, table: PackedLinear | Tensor, tokens: Tensor) -> Tensor:
        if isinstance(table, Tensor):
            return reference.embed(table, tokens)
        ids = tokens.to(torch.int32).contiguous()
        out = torch.empty(ids.shape[0], table.k)
        self.kernels.gather(
            TYPES[table.data.dtype], table.data.data_ptr(), table.n, table.k,
            ids.data_ptr(), ids.shape[0], out.data_ptr(),
        )  # fmt: skip
        return out

    def linear(
        self,
        x: Tensor,
        w: PackedLinear | Tensor,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        act: Activation | None = None,
        cap: float = 0.0,
    ) -> Tensor:
        if isinstance(w, Tensor):
            return reference.linear(x, w, bias, residual=residual, act=act, cap=cap)
        return self._linear(x, w, 0, bias, residual, act, cap)

    def _linear(
        self,
        x: Tensor,
        w: PackedLinear,
        offset: int,
        bias: Tensor | None,
        residual: Tensor | None,
        act: Activation | None,
        cap: float,
    ) -> Tensor:
        """`offset` elements into the weight's data: where its expert begins."""
        assert w.gated == (act is not None), "a gated weight goes with an activation"
        assert x.shape[-1] == w.k, (x.shape, w.k)
        if x.dtype not in (torch.float32, torch.bfloat16):
            x = x.float()
        if not x.is_contiguous():
            x = x.contiguous()
        dtype = w.data.dtype
        bias, residual = _plain(bias), _plain(residual)
        out_dtype = self.rows if w.gated else torch.float32
        out = torch.empty(x.shape[0], w.n // 2 if w.gated else w.n, dtype=out_dtype)
        self.kernels.linear(
            self.kinds[dtype], w.data.data_ptr() + offset * dtype.itemsize, w.n, w.k,
            x.data_ptr(), TYPES[x.dtype], x.shape[0], out.data_ptr(), TYPES[out_dtype],
            _address(bias), _address(residual), ACT[act], cap,
            12, self.block_kib, self.panel_kib,
        )  # fmt: skip
        return out

    def grouped_linear(
        self,
        x: Tensor,
        w: PackedLinear | Tensor,
        expert_of: Tensor,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        act: Activation | None = None,
        cap: float = 0.0,
    ) -> Tensor:
        if isinstance(w, Tensor):
            return reference.grouped_linear(
                x, w, expert_of, bias, residual=residual, act=act, cap=cap
            )
        out = torch.empty(
            x.shape[0],
            w.n // 2 if w.gated else w.n,
            dtype=self.rows if w.gated else torch.float32,
        )
        each = w.data.numel() // w.experts
        order = torch.argsort(expert_of, stable=True)
        counts = torch.bincount(expert_of, minlength=w.experts).tolist()
        start = 0
        for e, count in enumerate(counts):
            if not count:
                continue
            rows = order[start : start + count]
            out[rows] = self._linear(
                x[rows], w, e * each,
                None if bias is None else bias[e],
                None if residual is None else residual[rows],
                act, cap,
            )  # fmt: skip
            start += count
        return out

    def gated_act(self, x: Tensor, kind: Activation) -> Tensor:
        if x.dtype not in TYPES:
            return reference.gated_act(x, kind)
        x = x.contiguous()
        out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype)
        self.kernels.gated_act(
            x.data_ptr(), TYPES[x.dtype], ACT[kind], out.data_ptr(), TYPES[x.dtype], *out.shape
        )
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, w: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if x.dtype not in TYPES or w.dtype == torch.float64:
            return reference.add_rms_norm(x, residual, w, eps)
        x, w = x.contiguous(), w.to(torch.float32)
        out = torch.empty(x.shape, dtype=self.rows)
        residual = _plain(residual)
        same = residual is None and x.dtype == torch.float32
        total = x if same else torch.empty(x.shape)
        self.kernels.add_rms_norm(
            x.data_ptr(), TYPES[x.dtype], _address(residual), w.data_ptr(), eps,
            None if same else total.data_ptr(), out.data_ptr(), TYPES[self.rows], *x.shape,
        )  # fmt: skip
        return out, total

    # Attention

    def _native(self, kv: DenseKV) -> bool:
        """The kernels read this leaf: type, head size and block size suit them."""
        size, dim = kv.k.shape[2:]
        return kv.k.dtype in TYPES and size % BLOCK_MULTIPLE == 0 and dim % 32 == 0

    def qk_norm_rope_append(
        self,
        qkv: Tensor,
        positions: Tensor,
        rope: Tensor,
        kv: DenseKV,
        slots: Tensor,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> tuple[Tensor, DenseKV]:
        if not self._native(kv):
            return reference.qk_norm_rope_append(
                qkv, positions, rope, kv, slots, q_norm=q_norm, k_norm=k_norm, eps=eps
            )
        assert positions.dtype == slots.dtype == torch.int32
        qkv = qkv.contiguous()
        num_kv, size, dim = kv.k.shape[1:]
        num_tokens = qkv.shape[0]
        num_heads = qkv.shape[1] // dim - 2 * num_kv
        q = torch.empty(
            num_kv, num_tokens * (num_heads // num_kv), dim, dtype=self.q_types[kv.k.dtype]
        )
        q_norm, k_norm = _plain(q_norm), _plain(k_norm)
        self.kernels.rope_append(
            qkv.data_ptr(), positions.data_ptr(), rope.data_ptr(), rope.shape[2],
            slots.data_ptr(), _address(q_norm), _address(k_norm), eps,
            q.data_ptr(), TYPES[q.dtype], kv.k.data_ptr(), kv.v.data_ptr(), TYPES[kv.k.dtype],
            num_tokens, num_heads, num_kv, dim, size,
        )  # fmt: skip
        return q, kv

    def attention(self, q: Tensor, kv: DenseKV, batch: Batch, kind: AttentionKind) -> Tensor:
        if not self._native(kv):
            return reference.attention(q, kv, batch, kind)
        q = q.contiguous()
        num_kv, size, dim = kv.k.shape[1:]
        num_tokens = batch.tokens.shape[0]
        group = q.shape[1] // num_tokens if num_tokens else 1
        out = torch.empty(num_tokens, num_kv * group * dim, dtype=self.rows)
        if not num_tokens:
            return out
        lists = batch.tasks[kind.index]
        call = AttentionCall(
            q.data_ptr(), kv.k.data_ptr(), kv.v.data_ptr(), out.data_ptr(),
            batch.q_start.data_ptr(), batch.kv_len.data_ptr(), batch.num_draft.data_ptr(),
            batch.bias_start.data_ptr(), batch.block_table.data_ptr(),
            batch.tree_mask.data_ptr(), lists.merges.data_ptr(),
            num_tokens, num_kv, group, size, dim,
            batch.block_table.shape[1], lists.tasks[0].shape[1], lists.merges.shape[1],
            int(lists.parts[0]), kind.window, TYPES[self.rows], self.kinds[kv.k.dtype],
            kind.scale, kind.cap, len(lists.tasks), lists.core_start[0].shape[0] - 1,
        )  # fmt: skip
        for i, (tasks, start) in enumerate(zip(lists.tasks, lists.core_start, strict=True)):
            call.tasks[i] = tasks.data_ptr()
            call.core_start[i] = start.data_ptr()
        self.kernels.attention(call)
        return out

    def move_slots(self, kv: KVCache, src: Tensor, dst: Tensor) -> KVCache:
        if not all(self._native(leaf) for leaf in kv):
            return reference.move_slots(kv, src, dst)
        src, dst = (x.to(torch.int32).contiguous() for x in (src, dst))
        for leaf in kv:
            num_kv, size, dim = leaf.k.shape[1:]
            self.kernels.move_slots(
                leaf.k.data_ptr(), leaf.v.data_ptr(), TYPES[leaf.k.dtype],
                src.data_ptr(), dst.data_ptr(), src.shape[0], num_kv, dim, size,
            )  # fmt: skip
        return kv

    # Sampling

    def sample(
        self,
        logits: Tensor,
        batch: SampleBatch,
        state: SamplerState | None,
        mask: Tensor | None,
    ) -> Tensor:
        """As the reference; greedy rows that nothing changes are one pass over the logits."""
        plain = mask is None and not batch.penalised and not batch.bias_row.numel()
        if not (batch.greedy and plain and logits.dtype == torch.float32):
            return reference.sample(logits, batch, state, mask)
        if logits.stride(-1) != 1:
            logits = logits.contiguous()
        ids = torch.empty(logits.shape[0], dtype=torch.int64)
        self.kernels.argmax(
            logits.data_ptr(), *logits.shape, max(logits.stride(0), 1), ids.data_ptr()
        )
        return ids


def _cache_sizes() -> tuple[int, int]:
    """Bytes of the first and second level data cache of one core; usual sizes if not known."""
    sizes = []
    for level, usual in ((1, 32 << 10), (2, 512 << 10)):
        name = f"SC_LEVEL{level}_DCACHE_SIZE" if level == 1 else "SC_LEVEL2_CACHE_SIZE"
        known = os.sysconf(name) if name in os.sysconf_names else 0
        sizes.append(known if known > 0 else usual)
    return sizes[0], sizes[1]


def available() -> str | None:
    """None: the reference path needs nothing but torch."""
    return None


def table(index: int) -> Ops:
    """The CPU's ops; index is 0. Builds the kernels if they are not there yet."""
    if index:
        raise ConfigError(f"device cpu:{index}: there is only index 0", param="device")
    isa = build.instruction_sets()[0]
    try:
        path = build.library(isa, Path(config.cache_dir()) / "kernels")
    except build.BuildError as e:
        log.warning("CPU kernels are not built, torch is used instead (slower): %s", e)
        return dataclasses.replace(reference.TABLE, name="cpu")
    threads = max(1, min(torch.get_num_threads(), config.cpu_threads()))
    return table_of(Kernels(path, threads=threads), isa)


def table_of(kernels: Kernels, isa: str, *, dot: bool | None = None) -> Ops:
    """The table over given kernels. dot: multiply bf16 by its dot product, None = if it is there."""
    has_dot = isa == "avx512bf16"
    bf16 = K_BF16_DOT if has_dot and dot is not False else K_BF16
    kinds = {torch.float32: K_F32, torch.float16: K_F16, torch.bfloat16: bf16}
    own = _Table(kernels, kinds)
    device: Any = dataclasses.replace(
        reference.TABLE.device,
        arch=isa,
        num_cores=kernels.threads,
        block_size=BLOCK_SIZE,
        block_multiple=BLOCK_MULTIPLE,
        tile_classes=TILE_CLASSES,
    )
    return dataclasses.replace(
        reference.TABLE,
        name="cpu",
        device=device,
        pack_linear=own.pack_linear,
        act_dtype=own.act_dtype,
        embed=own.embed,
        linear=own.linear,
        grouped_linear=own.grouped_linear,
        gated_act=own.gated_act,
        add_rms_norm=own.add_rms_norm,
        qk_norm_rope_append=own.qk_norm_rope_append,
        attention=own.attention,
        move_slots=own.move_slots,
        sample=own.sample,
    )
