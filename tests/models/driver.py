"""Runs a family's forward without an engine: token tables are made by hand from chunks.

Also for kernel tests: `make_batch` gives a Batch for any mix of prefill, decode and draft chunks.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from xylite import models, tree
from xylite.models import layers
from xylite.models.spec import ModelSpec
from xylite.ops import Batch, Ops


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, start + count) of a sequence; the last len(parents) of them are a draft tree.

    parents[i] is the draft token that draft token i follows, -1 = the last token before the draft.
    """

    seq: int
    start: int
    count: int
    parents: tuple[int, ...] | None = None


def tree_mask(parents: Sequence[int]) -> Tensor:
    """[n, n] bool: row i sees column j if j is i or one of its ancestors."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] = mask[parent]
        mask[i, i] = True
    return mask


def make_batch(
    chunks: Sequence[Chunk],
    tokens: Mapping[int, Sequence[int]],
    blocks: Mapping[int, Sequence[int]],
    block_size: int,
) -> Batch:
    """The token table of an iteration, without task tables.

    tokens, blocks   of each sequence, in order
    """
    ids, places, slots, seq_of, q_start = [], [], [], [], [0]
    masks, bias_start, num_draft = [torch.zeros(0, dtype=torch.bool)], [], []
    for i, c in enumerate(chunks):
        mask = tree_mask(c.parents or ())
        num = mask.shape[0]
        first_draft = c.start + c.count - num
        depth = mask.sum(-1).tolist()
        for j in range(c.start, c.start + c.count):
            ids.append(tokens[c.seq][j])
            slots.append(blocks[c.seq][j // block_size] * block_size + j % block_size)
            place = j if j < first_draft else first_draft - 1 + depth[j - first_draft]
            places.append(place)
            seq_of.append(i)
        q_start.append(len(ids))
        num_draft.append(num)
        bias_start.append(sum(m.numel() for m in masks) if num else -1)
        masks.append(mask.flatten())
    width = max((len(blocks[c.seq]) for c in chunks), default=0)
    rows = [[*blocks[c.seq], *([0] * (width - len(blocks[c.seq])))] for c in chunks]

    def int32(x: Any) -> Tensor:
        return torch.tensor(x, dtype=torch.int32)

    return Batch(
        tokens=int32(ids),
        positions=int32(places),
        slots=int32(slots),
        seq_of=int32(seq_of),
        q_start=int32(q_start),
        kv_len=int32([c.start + c.count for c in chunks]),
        num_draft=int32(num_draft),
        bias_start=int32(bias_start),
        block_table=int32(rows).view(len(chunks), width),
        tree_mask=torch.cat(masks),
    )


def random_schedule(rng: random.Random, lengths: Sequence[int]) -> list[list[Chunk]]:
    """Steps that compute all tokens of all sequences in chunks of random sizes and order."""
    done = [0] * len(lengths)
    steps = []
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        waiting = [s for s, d in enumerate(done) if d < lengths[s]]
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        step = []
        for s in chosen:
            count = min(lengths[s] - done[s], rng.choice((1, 1, 2, 3, 7, 16)))
            step.append(Chunk(s, done[s], count))
            done[s] += count
        steps.append(step)
    return steps


@dataclass
class Driver:
    """One model with a cache. Each sequence's blocks are scattered over the pool at random.

    Blocks that no sequence has used hold NaN, as the invariant allows.
    """

    params: Any
    spec: ModelSpec
    family: ModuleType
    ops: Ops
    tokens: Sequence[Sequence[int]]
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    seed: int = 0
    blocks: dict[int, list[int]] = field(init=False)
    kv: Any = field(init=False)

    def __post_init__(self) -> None:
        needed = [-(-len(t) // self.block_size) for t in self.tokens]
        pool = list(range(1, sum(needed) + 3))
        random.Random(self.seed).shuffle(pool)
        self.blocks = {s: [pool.pop() for _ in range(n)] for s, n in enumerate(needed)}
        kv = layers.make_kv(
            self.spec,
            sum(needed) + 3,
            self.block_size,
            dtype=self.dtype,
            device=self.ops.device.torch_device,
        )
        for leaf in tree.leaves(kv):
            for block in (0, *pool):
                leaf[block] = torch.nan
        self.kv = kv

    def step(self, chunks: Sequence[Chunk]) -> Tensor:
        """Logits of every token of the chunks, [T, V]."""
        batch = make_batch(chunks, dict(enumerate(self.tokens)), self.blocks, self.block_size)
        batch = tree.map(lambda t: t.to(self.ops.device.torch_device), batch)
        hidden, self.kv = self.family.forward(self.params, self.kv, batch, self.spec, self.ops)
        return self.family.logits(self.params, hidden, self.spec, self.ops)

    def run(self, steps: Sequence[Sequence[Chunk]]) -> list[Tensor]:
        """Logits of every token of every sequence, [len, V] each, over all steps."""
        vocab = self.spec.vocab_size
        out = [torch.full((len(t), vocab), torch.nan) for t in self.tokens]
        for chunks in steps:
            rows = self.step(chunks)
            at = 0
            for c in chunks:
                out[c.seq][c.start : c.start + c.count] = rows[at : at + c.count]
                at += c.count
        return out


def describe(config: Mapping[str, Any]) -> tuple[ModuleType, ModelSpec]:
    """Family and spec of a config.json."""
    return models.describe(config)
