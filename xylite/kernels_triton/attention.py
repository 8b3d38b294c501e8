"""Meta-Attention as functions of tensors: which tiles serve a model, and the launches."""

from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from xylite.errors import ConfigError
from xylite.kernels_triton.attention_tiles import AttentionTiles
from xylite.kernels_triton.meta_attention import (
    merge_parts,
    meta_attention_tasks,
    tree_bias_rows,
)
from xylite.runtime.step import MERGE_FIELDS, TASK_FIELDS

MERGE_ROWS: Final = 16
MAX_TREE_WIDTH: Final = 1024


class Tasks(Protocol):
    """A TaskTable on the device: `ops.TaskLists`."""

    @property
    def tasks(self) -> tuple[Tensor, ...]: ...
    @property
    def core_start(self) -> tuple[Tensor, ...]: ...
    @property
    def merges(self) -> Tensor: ...
    @property
    def parts(self) -> Tensor: ...
    @property
    def tile_q(self) -> tuple[int, ...]: ...


class KV(Protocol):
    """KV of one layer, k and v [N, G, P, D]: `ops.DenseKV`."""

    @property
    def k(self) -> Tensor: ...
    @property
    def v(self) -> Tensor: ...


class Parts(NamedTuple):
    """Room for unfinished results; rows as `task_table.max_part_rows` says, shared by all layers.

    acc  [rows, D] float32, then per row the running maximum and sum [rows] float32
    """

    acc: Tensor
    max: Tensor
    sum: Tensor


def make_parts(rows: int, head_size: int, device: torch.device) -> Parts:
    """Room for `rows` part rows."""
    acc = torch.empty(rows, head_size, dtype=torch.float32, device=device)
    return Parts(acc, acc.new_empty(rows), acc.new_empty(rows))


def _width(tree: Tensor | None) -> int:
    return 0 if tree is None else tree.shape[1]


def meta_attention(
    q: Tensor,
    kv: KV,
    tasks: Tasks,
    *,
    block_table: Tensor,
    position: Tensor,
    group: int,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    tree: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    parts: Parts,
    tiles: AttentionTiles,
    vector_cores: int,
) -> Tensor:
    """Attention of one iteration's packed queries over blocked KV, any mix of stages.

    q            [G, T * group, D], row = token * group + head of the group
    kv           one layer's leaf; rows [0, kv_len) of each sequence are already written
    tasks        TaskTable of this attention kind on the device; may be empty
    block_table  [S, B] int32; entries past a sequence's blocks are never read
    position     [T * group] float32, see `row_positions`
    scale        1 / sqrt(D) unless the model says otherwise
    window       keys a query sees, its own included; 0 = all
    cap          scores s become cap * tanh(s / cap); 0 = off
    tree         [1 + T * group, width] float16 as `tree_bias` made it; None: no drafts are trees
    scales       of int8 keys and values, [N, G, P] each: one per token and KV head
    parts        overwritten; may be used again by the next launch
    vector_cores programs of the kernel that merges parts
    returns      like q; rows that no task names are not written
    source       Song et al. 2026, section 5; online softmax, Milakov and Gimelshein 2018
    """
    heads, rows, dim = q.shape
    if kv.k.shape[2] != tiles.tile_kv:
        raise ConfigError(
            f"attention tiles read blocks of {tiles.tile_kv} tokens, block_size is {kv.k.shape[2]}"
        )
    assert q.is_contiguous() and position.shape[0] >= rows, (q.shape, position.shape)
    assert (kv.k.dtype == torch.int8) == (scales is not None), kv.k.dtype
    k_scale, v_scale = scales or (kv.k, kv.v)
    out = torch.empty_like(q)
    first, second = tiles.columns
    assert first + second == dim, (tiles.columns, dim)
    for tile_q, rows_of, core_start in zip(
        tasks.tile_q, tasks.tasks, tasks.core_start, strict=True
    ):
        constants: dict[str, Any] = {
            "SCALE": scale, "CAP": cap, "WINDOW": window, "G": heads, "GROUP": group,
            "TILE_Q": tile_q, "TILE_KV": tiles.tile_kv, "D": dim, "D0": first, "D1": second,
            "FIELDS": len(TASK_FIELDS), "HAS_TREE": tree is not None,
            "HAS_SCALES": scales is not None,
        }  # fmt: skip
        meta_attention_tasks[(core_start.shape[0] - 1,)](
            q, kv.k, kv.v, k_scale, v_scale, out, *parts, rows_of, core_start, block_table,
            position, position if tree is None else tree, rows, block_table.shape[1],
            _width(tree), **constants, **tiles.options[tiles.tile_q.index(tile_q)],
        )  # fmt: skip
    merge_parts[(vector_cores,)](
        out, *parts, tasks.merges, tasks.parts, rows,
        D=dim, TILE_D=1 << (dim - 1).bit_length(), TILE_R=MERGE_ROWS, FIELDS=len(MERGE_FIELDS),
    )  # fmt: skip
    return out


def row_positions(positions: Tensor, group: int) -> Tensor:
    """[T * group] float32 of positions [T]: each token's position, once per head of the group.

    The same for all layers of an iteration, so it is made once.
    """
    return positions.to(torch.float32).repeat_interleave(group)


def tree_width(max_tokens: int, tile_kv: int) -> int:
    """Columns of `tree_bias` that hold any chunk of `max_tokens` tokens, drafts included."""
    width = -(-(tile_kv - 1 + max_tokens) // tile_kv) * tile_kv
    if width > MAX_TREE_WIDTH:
        raise ConfigError(
            f"a tree of {max_tokens - 1} draft tokens needs a mask {width} keys wide, the limit "
            f"is {MAX_TREE_WIDTH}",
            param="speculative_config",
        )
    return width


def make_tree(rows: int, width: int, device: torch.device) -> Tensor:
    """Room for `tree_bias`: [1 + rows, width] float16, zero, as its first row must stay."""
    return torch.zeros(1 + rows, width, dtype=torch.float16, device=device)


def tree_bias(
    tree: Tensor,
    tasks: Tasks,
    *,
    tree_mask: Tensor,
    kv_len: Tensor,
    num_draft: Tensor,
    bias_start: Tensor,
    group: int,
    tile_kv: int,
) -> None:
    """Fill `tree` (see `make_tree`) for the chunks of this iteration that have a tree.

    tasks      of any attention kind: each names every row. The same for all layers
    tree_mask  bool, num_draft x num_draft per tree, as in runtime/step.py; so are the next three
    A tree's chunk must have no more tokens than `tree_width` was asked for.
    """
    for rows_of, core_start in zip(tasks.tasks, tasks.core_start, strict=True):
        tree_bias_rows[(core_start.shape[0] - 1,)](
            tree, tree_mask.view(torch.int8), rows_of, core_start, kv_len, num_draft, bias_start,
            tree.shape[1], GROUP=group, TILE_KV=tile_kv, TILE_G=1 << (group - 1).bit_length(),
            TILE_W=1 << (tree.shape[1] - 1).bit_length(), FIELDS=len(TASK_FIELDS),
        )  # fmt: skip
