"""The functions of a device table: the launches bound to a target, and what layers share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from xylite.kernels_triton import attention, graphs, launch, weights
from xylite.kernels_triton.attention import Parts
from xylite.kernels_triton.attention_tiles import AttentionTiles, attention_tiles
from xylite.kernels_triton.graphs import Run
from xylite.kernels_triton.launch import Target

# Of runtime/task_table.max_part_rows: a task is cut at a quarter of the mean core load, and a cut
# rounds up, so an iteration has at most this many part rows per core and row of the tile classes;
# and where a prefix is shared, each of its rows has two more.
PARTS_PER_CORE: Final = 12
PARTS_OF_SHARED: Final = 2


@dataclass(slots=True, eq=False)
class _Iteration:
    """What the layers of one iteration share, made by the first that needs it."""

    batch: Any
    position: dict[int, Tensor]
    tree: dict[int, Tensor | None]


class _Attention:
    """`ops.Attention` by Meta-Attention."""

    def __init__(self, target: Target):
        self._target = target
        self._parts: dict[int, Parts] = {}
        self._outgrown: list[Parts] = []  # recordings may still write there
        self._iteration = _Iteration(None, {}, {})

    def __call__(self, q: Tensor, kv: Any, batch: Any, kind: Any) -> Tensor:
        heads, rows, dim = q.shape
        tokens = batch.tokens.shape[0]
        if not tokens:
            return q.new_empty(0, heads * dim)
        group = rows // tokens
        tiles = attention_tiles(
            self._target.tiles.chip,
            dim,
            window=kind.window,
            cap=kind.cap,
            int8=kv.k.dtype == torch.int8,
            size=kv.k.shape[2],
        )
        if self._iteration.batch is not batch:
            self._iteration = _Iteration(batch, {}, {})
        shared = self._iteration
        if group not in shared.position:
            shared.position[group] = attention.row_positions(batch.positions, group)
            shared.tree[group] = self._tree(batch, rows, group, tiles.tile_kv)
        out = attention.meta_attention(
            q,
            kv,
            batch.tasks[kind.index],
            block_table=batch.block_table,
            position=shared.position[group],
            group=group,
            scale=kind.scale,
            window=kind.window,
            cap=kind.cap,
            tree=shared.tree[group],
            scales=None if kv.k_scale is None else (kv.k_scale, kv.v_scale),
            parts=self._room(batch.tasks[kind.index], heads * rows, dim, tiles),
            tiles=tiles,
            vector_cores=self._target.vector_cores,
        )
        return out.view(heads, tokens, group * dim).transpose(0, 1).reshape(tokens, -1)

    def _room(self, tasks: Any, rows: int, dim: int, tiles: AttentionTiles) -> Parts:
        """Room for the parts of cut tasks; it grows to what was ever needed."""
        most = sum(t.shape[0] * q for t, q in zip(tasks.tasks, tasks.tile_q, strict=True))
        # With one class on both sides, keys may be cut at fixed multiples: no bound by load then.
        if 1 < len(tiles.tile_q) == len(tasks.tile_q):
            limit = PARTS_PER_CORE * self._target.cores * sum(tasks.tile_q)
            most = min(most, limit + PARTS_OF_SHARED * rows)
        needed = most if tasks.merges.shape[0] else 1
        if dim not in self._parts or self._parts[dim].acc.shape[0] < needed:
            if dim in self._parts:
                self._outgrown.append(self._parts[dim])
            self._parts[dim] = attention.make_parts(needed, dim, tasks.merges.device)
        return self._parts[dim]

    def _tree(self, batch: Any, rows: int, group: int, tile_kv: int) -> Tensor | None:
        """Bias rows of the iteration's draft trees; None if every draft is a chain.

        A verify chunk is one known token and its drafts, and a tree of n drafts takes n * n
        elements of the mask.
        """
        if not batch.tree_mask.numel():
            return None
        largest = 1 + math.isqrt(batch.tree_mask.numel())
        width = attention.tree_width(largest, tile_kv)
        tree = attention.make_tree(rows, width, batch.tree_mask.device)
        attention.tree_bias(
            tree,
            batch.tasks[0],
            tree_mask=batch.tree_mask,
            kv_len=batch.kv_len,
            num_draft=batch.num_draft,
            bias_start=batch.bias_start,
            group=group,
            tile_kv=tile_kv,
        )
        return tree


def functions(
    target: Target,
    capture: Callable[[Run], Run] | None = None,
    buckets: Sequence[int] = graphs.BUCKETS,
) -> dict[str, Any]:
    """The fields of an Ops table that have kernels; capture and buckets as `graphs.Graphs` wants
    them. Without `capture` every pass is launched."""
    recorded = graphs.Graphs(target.count, capture, buckets) if capture else None
    return {
        "replayed": recorded,
        # One size more, for the passes that are too large to be recorded.
        "warm_up": (*buckets, 2 * buckets[-1]) if recorded else (),
        "pack_linear": weights.pack,
        "packers": weights.packers(),
        "embed": partial(launch.embed, target),
        "linear": partial(launch.linear, target),
        "add_rms_norm": partial(launch.add_rms_norm, target),
        "qk_norm_rope_append": partial(launch.qk_norm_rope_append, target),
        "attention": _Attention(target),
        "gated_act": partial(launch.gated_act, target),
        "grouped_linear": partial(launch.grouped_linear, target),
        "sample": partial(launch.sample, target),
        "verify": partial(launch.verify, target),
        "move_slots": partial(launch.move_slots, target),
        "copy_blocks": partial(launch.copy_blocks, target),
        "zero_blocks": partial(launch.zero_blocks, target),
        "kv_formats": ("int8",),
    }
