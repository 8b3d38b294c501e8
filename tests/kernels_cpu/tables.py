"""Tables over every library that this machine runs, and one iteration's batch made by hand."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from xylite import config
from xylite.kernels_cpu import build, tuning
from xylite.kernels_cpu.library import Kernels
from xylite.ops import Batch, DenseKV, Ops, TaskLists, cpu
from xylite.runtime import task_table
from xylite.runtime.step import TaskTable, TokenTable


def names() -> list[str]:
    """One instruction set of each kind that runs here: they share all other code."""
    found = build.instruction_sets()
    return [n for n in found if n in (found[0], "avx512", "avx2", "generic")]


def make(isa: str, threads: int = 2) -> Ops:
    """The table of an instruction set."""
    path = build.library(isa, Path(config.cache_dir()) / "kernels")
    measured = tuning.Tuning(isa in cpu.HAS_DOT)
    return cpu.table_of(Kernels(path, threads=threads), isa, measured)


@dataclass(frozen=True)
class Chunk:
    """One sequence's part of an iteration: tokens before it, its tokens, and its tree if any."""

    past: int
    tokens: int
    tree: Tensor | None = None
    num_draft: int = 0


def token_table(chunks: list[Chunk], block_size: int, seed: int = 0) -> TokenTable:
    """The token table of these chunks, their blocks dealt at random."""
    rng = np.random.default_rng(seed)
    lengths = [c.past + c.tokens for c in chunks]
    counts = [-(-n // block_size) for n in lengths]
    blocks = rng.permutation(sum(counts) + 3)[: sum(counts)]
    width = max(counts, default=0) + 1
    block_table = np.zeros((len(chunks), width), np.int32)
    tokens, positions, slots, seq_of, start, bias, mask, at = [], [], [], [], [0], [], [], 0
    for i, c in enumerate(chunks):
        block_table[i, : counts[i]] = blocks[at : at + counts[i]]
        at += counts[i]
        place = np.arange(c.past, c.past + c.tokens)
        positions += place.tolist()
        slots += (block_table[i, place // block_size] * block_size + place % block_size).tolist()
        seq_of += [i] * c.tokens
        start.append(start[-1] + c.tokens)
        bias.append(sum(map(len, mask)) if c.tree is not None else -1)
        if c.tree is not None:
            mask.append(c.tree.flatten().tolist())
        tokens += [0] * c.tokens

    def ints(x: list[int]) -> np.ndarray:
        return np.array(x, np.int32)

    return TokenTable(
        tokens=ints(tokens),
        positions=ints(positions),
        slots=ints(slots),
        seq_of=ints(seq_of),
        carry=np.full(len(tokens), -1, np.int32),
        q_start=ints(start),
        kv_len=ints(lengths),
        num_draft=ints([c.num_draft for c in chunks]),
        bias_start=ints(bias),
        block_table=block_table,
        tree_mask=np.array([b for m in mask for b in m], bool),
        logit_rows=ints([]),
    )


def batch_of(table: TokenTable, tasks: TaskTable) -> Batch:
    """Both on the device."""
    lists = TaskLists(
        tasks=tuple(torch.from_numpy(c.tasks) for c in tasks.classes),
        core_start=tuple(torch.from_numpy(c.core_start) for c in tasks.classes),
        merges=torch.from_numpy(tasks.merges),
        parts=torch.from_numpy(tasks.parts),
        tile_q=tuple(c.tile_q for c in tasks.classes),
    )
    names = (
        "tokens", "positions", "slots", "seq_of", "q_start", "kv_len", "num_draft", "bias_start",
        "block_table", "tree_mask",
    )  # fmt: skip
    return Batch(**{n: torch.from_numpy(getattr(table, n)) for n in names}, tasks=(lists,))


def tasks_of(
    ops: Ops, table: TokenTable, heads: tuple[int, int], window: int, block_size: int, cores: int
) -> TaskTable:
    num_kv, group = heads
    return task_table.build(
        table,
        num_kv_heads=num_kv,
        group=group,
        window=window,
        tile_classes=ops.device.tile_classes,
        kv_tile=block_size,
        num_cores=cores,
    )


def poisoned_kv(table: TokenTable, num_kv: int, size: int, dim: int, dtype: torch.dtype) -> DenseKV:
    """A pool whose unused blocks hold NaN and whose used blocks hold zeros."""
    num_blocks = int(table.block_table.max(initial=0)) + 4
    used = sorted({int(b) for b, n in zip(table.block_table, table.kv_len, strict=True)
                   for b in b[: -(-int(n) // size)]})  # fmt: skip
    leaf = DenseKV(*(torch.full((num_blocks, num_kv, size, dim), torch.nan, dtype=dtype)
                     for _ in "kv"))  # fmt: skip
    leaf.k[used] = 0
    leaf.v[used] = 0
    return leaf
