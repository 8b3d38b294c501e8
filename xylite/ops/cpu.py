"""The CPU: own kernels over threads, torch where no compiler is.

Weights keep their values and are packed once, in panels that serve every number of tokens; bf16
ones take 12 bits where the processor multiplies bf16 itself.
Activations are float32, so bf16 weights lose nothing that bf16 arithmetic would keep. KV has the
weights' type; a tile of it lies as the kernels read it, so only this table's functions may look
inside a block (`kernels_cpu/src/attention.cpp` has the layout).

A row's result does not depend on its batch, at any dtype: every sum runs over ascending k in one
chain (linear layers), or in segments counted from key 0 (attention), whatever the tiles,
the tasks and the threads are; and how a dtype is multiplied is chosen once, not per shape.
"""

import dataclasses
import logging
import weakref
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from xylite import config, tree
from xylite.errors import ConfigError
from xylite.kernels_cpu import build, tuning
from xylite.kernels_cpu.blocks import GGUF
from xylite.kernels_cpu.library import (
    ACT,
    K_BF16,
    K_BF16_DOT,
    K_F16,
    K_F32,
    Kernels,
    LoadError,
    ThreadsError,
)
from xylite.kernels_cpu.packed import (
    TYPES,
    Packed,
    Packer,
    address,
    plain,
)
from xylite.kernels_cpu.replay import SMALL, Replays
from xylite.kernels_cpu.tuner import BlockTuner
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

BLOCK_SIZE: Final = 64
BLOCK_MULTIPLE: Final = 32
HEAD_MULTIPLE: Final = 32  # columns of a register tile
TILE_CLASSES: Final = (12, 96)
MAX_CLASSES: Final = 4  # of attention.cpp
HAS_DOT: Final = ("avx512bf16",)  # instruction sets with a bf16 dot product


class _Table:
    """The ops of one table: kernels, the choice of arithmetic, memory of weights."""

    def __init__(self, kernels: Kernels, measured: tuning.Tuning):
        self.kernels = kernels
        self.kinds = kinds = kinds_of(measured.dot)
        self.packer = Packer(kernels, kinds, measured)
        self._advised: dict[int, weakref.ref[Tensor]] = {}
        # What the attention kernel multiplies with the keys of a dtype.
        self.q_types = {
            dtype: torch.bfloat16 if kind == K_BF16_DOT else torch.float32
            for dtype, kind in kinds.items()
        }

    # Linear layers

    def act_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """float32, or the weights' own dtype if it is wider."""
        return torch.float32 if dtype in TYPES else dtype

    def embed(self, table: Packed | Tensor, tokens: Tensor) -> Tensor:
        if isinstance(table, Tensor):
            return reference.embed(table, tokens)
        return self.packer.gather(table, tokens)

    def linear(
        self,
        x: Tensor,
        w: Packed | Tensor,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        act: Activation | None = None,
        cap: float = 0.0,
    ) -> Tensor:
        if isinstance(w, Tensor):
            return reference.linear(x, w, bias, residual=residual, act=act, cap=cap)
        return self.packer.multiply(x, w, bias, residual, act, cap)

    def grouped_linear(
        self,
        x: Tensor,
        w: Packed | Tensor,
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
        order = torch.argsort(expert_of, stable=True)
        counts = torch.bincount(expert_of, minlength=w.experts).tolist()
        parts, start = [], 0
        for e, count in enumerate(counts):
            rows = order[start : start + count]
            start += count
            if count:
                parts.append(
                    self.packer.multiply(
                        x[rows],
                        w,
                        None if bias is None else bias[e],
                        None if residual is None else residual[rows],
                        act,
                        cap,
                        e,
                    )
                )
        if not parts:
            return torch.empty(0, w.n // 2 if w.gated else w.n)
        out = torch.cat(parts)
        return torch.empty_like(out).index_copy_(0, order, out)

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
        x = x.contiguous()
        w = w if w.dtype is torch.float32 else w.to(torch.float32)
        rows, shape = self.packer.rows, x.shape
        out = self.packer.empty[rows](shape)
        same = residual is None and x.dtype is torch.float32
        total = x if same else self.packer.empty[torch.float32](shape)
        residual = plain(residual)
        self.kernels.add_rms_norm(
            x.data_ptr(), TYPES[x.dtype], address(residual), w.data_ptr(),
            0 if same else total.data_ptr(), out.data_ptr(), TYPES[rows], shape[0], shape[1], eps,
        )  # fmt: skip
        return out, total

    # Attention

    def _native(self, kv: DenseKV) -> bool:
        """The kernels read this leaf: type, head size and block size suit them."""
        size, dim = kv.k.shape[2:]
        return size % BLOCK_MULTIPLE == 0 and bool(classes_of(dim, None, kv.k.dtype))

    def _want_huge_pages(self, kv: DenseKV) -> None:
        """Ask once for huge pages behind a pool: its blocks are read in no order. A pool that comes
        to lie where another was is another."""
        advised = self._advised.get(kv.k.data_ptr())
        if advised is None or advised() is not kv.k:
            self._advised[kv.k.data_ptr()] = weakref.ref(kv.k)
            for pool in (kv.k, kv.v):
                self.kernels.huge_pages(pool.data_ptr(), pool.nbytes)

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
        self._want_huge_pages(kv)
        qkv = qkv.contiguous()
        num_kv, size, dim = kv.k.shape[1:]
        num_tokens = qkv.shape[0]
        num_heads = qkv.shape[1] // dim - 2 * num_kv
        q_type = self.q_types[kv.k.dtype]
        q = self.packer.empty[q_type]((num_kv, num_tokens * (num_heads // num_kv), dim))
        q_norm, k_norm = plain(q_norm), plain(k_norm)
        self.kernels.rope_append(
            qkv.data_ptr(), positions.data_ptr(), rope.data_ptr(), rope.shape[2],
            slots.data_ptr(), address(q_norm), address(k_norm),
            q.data_ptr(), TYPES[q_type], kv.k.data_ptr(), kv.v.data_ptr(), TYPES[kv.k.dtype],
            num_tokens, num_heads, num_kv, dim, size, eps,
        )  # fmt: skip
        return q, kv

    def attention(self, q: Tensor, kv: DenseKV, batch: Batch, kind: AttentionKind) -> Tensor:
        if not self._native(kv):
            return reference.attention(q, kv, batch, kind)
        q = q.contiguous()
        num_kv, size, dim = kv.k.shape[1:]
        num_tokens = batch.tokens.shape[0]
        group = q.shape[1] // num_tokens if num_tokens else 1
        rows = self.packer.rows
        out = self.packer.empty[rows]((num_tokens, num_kv * group * dim))
        if not num_tokens:
            return out
        lists = batch.tasks[kind.index]
        classes = len(lists.tasks)
        none = (0,) * (MAX_CLASSES - classes)
        self.kernels.attention(
            q.data_ptr(), kv.k.data_ptr(), kv.v.data_ptr(), out.data_ptr(),
            batch.q_start.data_ptr(), batch.kv_len.data_ptr(), batch.num_draft.data_ptr(),
            batch.bias_start.data_ptr(), batch.block_table.data_ptr(),
            batch.tree_mask.data_ptr(), lists.merges.data_ptr(), lists.parts.data_ptr(),
            num_tokens, num_kv, group, size, dim,
            batch.block_table.shape[1], lists.tasks[0].shape[1], lists.merges.shape[1],
            kind.window, TYPES[rows], self.kinds[kv.k.dtype], kind.scale, kind.cap,
            classes, lists.core_start[0].shape[0] - 1,
            *[t.data_ptr() for t in lists.tasks], *none,
            *[t.data_ptr() for t in lists.core_start], *none,
        )  # fmt: skip
        return out

    def last_rows(self, x: Tensor, q_start: Tensor, num: int) -> Tensor:
        if x.dtype not in self.packer.empty:
            return x[q_start[1 : num + 1].long() - 1]
        x = x.contiguous()
        out = self.packer.empty[x.dtype]((num, x.shape[1]))
        row_bytes = x.shape[1] * x.element_size()
        self.kernels.last_rows(x.data_ptr(), row_bytes, q_start.data_ptr(), num, out.data_ptr())
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

    # Whole blocks by numpy: the threads that torch would wake for each of the copies go on spinning
    # for a while, on the cores that the kernels' threads want.

    def copy_blocks(self, kv: KVCache, src: Tensor, dst: Tensor) -> KVCache:
        read, written = src.numpy(), dst.numpy()
        for leaf in tree.leaves(kv):
            blocks = leaf.view(torch.uint8).numpy()
            blocks[written] = blocks[read]
        return kv

    def zero_blocks(self, kv: KVCache, blocks: Tensor) -> KVCache:
        cleared = blocks.numpy()
        for leaf in tree.leaves(kv):
            leaf.view(torch.uint8).numpy()[cleared] = 0
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

    def finite(self, x: Tensor) -> Tensor:
        if x.dtype not in TYPES or x.stride(-1) != 1 or not x.numel():
            return reference.finite(x)
        sane = torch.empty(x.shape[0], dtype=torch.bool)
        stride = max(x.stride(0), 1)
        self.kernels.finite(x.data_ptr(), TYPES[x.dtype], *x.shape, stride, sane.data_ptr())
        return sane


def available() -> str | None:
    """None: the reference path needs nothing but torch."""
    return None


def table(index: int) -> Ops:
    """The CPU's ops; index is 0. Builds the kernels if they are not there yet."""
    if index:
        raise ConfigError(f"device cpu:{index}: there is only index 0", param="device")
    cache = Path(config.cache_dir()) / "kernels"
    threads = max(1, min(torch.get_num_threads(), config.cpu_threads()))
    try:
        with build.best_library(cache) as (isa, path):
            kernels = Kernels(path, threads=threads)
    except (build.BuildError, LoadError) as e:
        log.warning("CPU kernels are not there, torch is used instead (slower): %s", e)
        return dataclasses.replace(reference.TABLE, name="cpu")
    except ThreadsError as e:
        raise ConfigError(f"{e}; set num_threads to fewer", param="num_threads") from None
    tuned_path = cache / f"{path.stem}.json"
    measured = tuning.at_start(kernels, tuned_path, has_dot=isa in HAS_DOT)
    log.info(
        "CPU kernels: %s, %d threads, bf16 products by %s, %s",
        isa,
        threads,
        "dot product" if measured.dot else "widening to float32",
        f"{len(measured.blocks)} measured cache blocks" if measured.blocks else "not tuned",
    )
    return table_of(kernels, isa, measured, tuned_path)


def classes_of(
    head_size: int, kind: AttentionKind | None, kv_dtype: torch.dtype | None = None
) -> tuple[int, ...]:
    """Tile classes of the attention kernel; () where it does not take heads or KV of that kind, and
    the reference's attention runs."""
    has_kernel = head_size % HEAD_MULTIPLE == 0 and (kv_dtype is None or kv_dtype in TYPES)
    return TILE_CLASSES if has_kernel else ()


def kinds_of(dot: bool) -> dict[torch.dtype, int]:
    """How weights of a dtype are multiplied."""
    return {
        torch.float32: K_F32,
        torch.float16: K_F16,
        torch.bfloat16: K_BF16_DOT if dot else K_BF16,
    }


def table_of(
    kernels: Kernels, isa: str, measured: tuning.Tuning, tuned_path: Path | None = None
) -> Ops:
    """The table over given kernels; tuned_path: where a tuner keeps what it measures."""
    own = _Table(kernels, measured)
    device: Any = dataclasses.replace(
        reference.TABLE.device,
        arch=isa,
        num_cores=kernels.threads,
        block_size=BLOCK_SIZE,
        block_multiple=BLOCK_MULTIPLE,
        tile_classes=TILE_CLASSES,
        classes_of=classes_of,
    )
    return dataclasses.replace(
        reference.TABLE,
        name="cpu",
        device=device,
        pack_linear=own.packer.pack,
        act_dtype=own.act_dtype,
        embed=own.embed,
        linear=own.linear,
        grouped_linear=own.grouped_linear,
        gated_act=own.gated_act,
        add_rms_norm=own.add_rms_norm,
        qk_norm_rope_append=own.qk_norm_rope_append,
        attention=own.attention,
        move_slots=own.move_slots,
        copy_blocks=own.copy_blocks,
        zero_blocks=own.zero_blocks,
        sample=own.sample,
        finite=own.finite,
        replayed=Replays(kernels, own.packer),
        last_rows=own.last_rows,
        idle_warm_up=tuple(range(1, SMALL + 1)),
        packers={"int8": own.packer.quantize, "int4": own.packer.quantize_int4},
        kv_formats=(),
        stored_packers={kind: partial(own.packer.pack_gguf, kind) for kind in GGUF},
        tuner=BlockTuner(own.packer, tuned_path, measured.dot) if tuned_path else None,
    )
