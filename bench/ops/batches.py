"""Iterations drawn from recorded lengths, as a table's functions take them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.ops.shapes import Shape
from xylite.ops import AttentionKind, Batch, Device, TaskLists
from xylite.runtime import task_table
from xylite.runtime.step import TokenTable


@dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` tokens after `past`; the last `drafts` of them are a chain of draft tokens."""

    past: int
    tokens: int
    drafts: int = 0

    @property
    def kv_len(self) -> int:
        """Keys it sees, its own included."""
        return self.past + self.tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """How large an iteration may be.

    num_seqs  sequences that decode or verify
    budget    tokens of an iteration
    longest   tokens of a sequence: longer requests are cut to it
    """

    num_seqs: int
    budget: int
    longest: int


def draw(rng: np.random.Generator, lengths: np.ndarray, mix: str, limits: Limits) -> list[Chunk]:
    """One iteration of requests of these lengths [n, 2] (prompt and answer tokens).

    decode   sequences somewhere in their answer
    verify   the same, with 3 to 15 draft tokens each
    prefill  prompts, half of them partly computed before, cut to the budget
    mixed    a quarter of the budget's sequences decode or verify, prompts fill the rest
    """
    chunks: list[Chunk] = []
    if mix != "prefill":
        count = max(limits.num_seqs // (4 if mix == "mixed" else 1), 1)
        for prompt, answer in lengths[rng.integers(len(lengths), size=count)]:
            drafting = mix == "verify" or (mix == "mixed" and rng.random() < 0.3)
            drafts = int(rng.integers(3, 16)) if drafting else 0
            past = int(prompt + rng.integers(answer))
            chunks.append(Chunk(min(past, limits.longest - 1 - drafts), 1 + drafts, drafts))
    room = limits.budget - sum(c.tokens for c in chunks)
    while mix in ("prefill", "mixed") and room > 0:
        prompt = min(int(lengths[rng.integers(len(lengths)), 0]), limits.longest)
        done = int(rng.integers(prompt)) if rng.random() < 0.5 else 0
        chunks.append(Chunk(done, min(prompt - done, room)))
        room -= chunks[-1].tokens
    return chunks


def token_table(chunks: Sequence[Chunk], block_size: int, rng: np.random.Generator) -> TokenTable:
    """The table of these chunks; their blocks lie in the pool in no order, as after some time."""
    counts = np.array([-(-c.kv_len // block_size) for c in chunks])
    order = rng.permutation(int(counts.sum())).astype(np.int32)
    start = np.concatenate(([0], np.cumsum(counts)))
    block_table = np.zeros((len(chunks), int(counts.max())), np.int32)
    positions = [np.arange(c.past, c.kv_len, dtype=np.int32) for c in chunks]
    slots = []
    for i, place in enumerate(positions):
        block_table[i, : counts[i]] = order[start[i] : start[i + 1]]
        slots.append(block_table[i, place // block_size] * block_size + place % block_size)
    tokens = np.array([c.tokens for c in chunks], np.int32)
    total = int(tokens.sum())
    return TokenTable(
        tokens=rng.integers(0, 97, total).astype(np.int32),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots).astype(np.int32),
        seq_of=np.repeat(np.arange(len(chunks), dtype=np.int32), tokens),
        carry=np.full(total, -1, np.int32),
        q_start=np.concatenate(([0], np.cumsum(tokens))).astype(np.int32),
        kv_len=np.array([c.kv_len for c in chunks], np.int32),
        num_draft=np.array([c.drafts for c in chunks], np.int32),
        bias_start=np.full(len(chunks), -1, np.int32),
        block_table=block_table,
        tree_mask=np.zeros(0, np.bool_),
        logit_rows=(np.cumsum(tokens) - 1).astype(np.int32),
    )


def kind_of(shape: Shape) -> AttentionKind:
    """Plain causal attention, the model's only kind."""
    return AttentionKind(index=0, scale=shape.head_dim**-0.5)


def on_device(
    table: TokenTable, shape: Shape, device: Device, block_size: int, *, window: int = 0
) -> Batch:
    """The table with its task lists for one attention kind, where the device reads it."""
    place = device.torch_device
    lists: tuple[TaskLists, ...] = ()
    classes = device.tile_classes
    if classes and device.classes_of is not None:
        classes = device.classes_of(shape.head_dim, kind_of(shape))
    if classes:
        made = task_table.build(
            table,
            num_kv_heads=shape.kv_heads,
            group=shape.group,
            window=window,
            tile_classes=classes,
            kv_tile=block_size,
            num_cores=device.num_cores,
        )
        lists = (
            TaskLists(
                tasks=tuple(torch.from_numpy(c.tasks).to(place) for c in made.classes),
                core_start=tuple(torch.from_numpy(c.core_start).to(place) for c in made.classes),
                merges=torch.from_numpy(made.merges).to(place),
                parts=torch.from_numpy(made.parts).to(place),
                tile_q=tuple(c.tile_q for c in made.classes),
            ),
        )
    names = (
        "tokens", "positions", "slots", "seq_of", "q_start", "kv_len", "num_draft", "bias_start",
        "block_table", "tree_mask",
    )  # fmt: skip
    arrays: dict[str, Any] = {n: torch.from_numpy(getattr(table, n)).to(place) for n in names}
    return Batch(**arrays, tasks=lists)
