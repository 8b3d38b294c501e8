"""Mixed batches for attention, with the right answers in float64; numpy only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from xylite.runtime.step import TokenTable

F64 = NDArray[np.float64]
EMPTY = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` tokens after `past`; with `parents`, the last ones are the drafts of a tree. The
    first `shared` blocks are those of the chunk before."""

    past: int
    tokens: int
    parents: tuple[int, ...] | None = None
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model and its KV pool look like."""

    heads: int = 2
    group: int = 4
    dim: int = 64
    block_size: int = 16
    window: int = 0
    cap: float = 0.0

    @property
    def scale(self) -> float:
        return self.dim**-0.5


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One iteration. q [G, T * group, D], k and v [N, G, P, D] hold values that the kernel's type
    represents; blocks that no sequence uses are NaN, block 0 among them. `expected` is like q."""

    shape: Shape
    table: TokenTable
    q: F64
    k: F64
    v: F64
    expected: F64 = field(repr=False)


def random_tree(rng: np.random.Generator, size: int) -> tuple[int, ...]:
    """Parents of a random tree of draft tokens."""
    return tuple(int(rng.integers(-1, i)) for i in range(size))


def _tree_mask(parents: Sequence[int]) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
    mask, depth = np.eye(len(parents), dtype=bool), np.zeros(len(parents), np.int32)
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] |= mask[parent]
            depth[i] = depth[parent] + 1
    return mask, depth


def _visible(chunk: Chunk, position: NDArray[np.int32], window: int) -> NDArray[np.bool_]:
    """[tokens, past + tokens] the keys that each token sees."""
    kv_len = chunk.past + chunk.tokens
    see = np.arange(kv_len) <= chunk.past + np.arange(chunk.tokens)[:, None]
    if chunk.parents is not None:
        d = len(chunk.parents)
        see[-d:, kv_len - d :] = _tree_mask(chunk.parents)[0]
    if window:
        see &= np.concatenate([np.arange(chunk.past), position]) > position[:, None] - window
    return see


def make_case(
    rng: np.random.Generator,
    shape: Shape,
    chunks: Sequence[Chunk],
    rounded: Callable[[F64], F64] = lambda x: x,
) -> Case:
    """Random values for these chunks; `rounded` makes them what the kernel's type can hold."""
    g, group, dim, size = shape.heads, shape.group, shape.dim, shape.block_size
    num_tokens = sum(c.tokens for c in chunks)
    needed = [-(-(c.past + c.tokens) // size) for c in chunks]
    order = 1 + rng.permutation(sum(needed) + 3)
    blocks = np.split(order[: sum(needed)], np.cumsum(needed)[:-1]) if chunks else []
    block_table = np.zeros((max(len(chunks), 1), max([*needed, 1]) + 1), np.int32)
    k, v = (np.full((len(order) + 1, g, size, dim), np.nan) for _ in range(2))
    q = rounded(rng.standard_normal((g, num_tokens * group, dim)))
    expected = np.zeros_like(q)
    positions, masks, bias_start, size_of_masks, first = [EMPTY], [np.zeros(0, bool)], [], 0, 0
    for s, (chunk, mine) in enumerate(zip(chunks, blocks, strict=True)):
        k[mine], v[mine] = (rounded(rng.standard_normal(k[mine].shape)) for _ in range(2))
        mine[: chunk.shared] = block_table[s - 1, : chunk.shared]
        block_table[s, : len(mine)] = mine
        position = np.arange(chunk.past, chunk.past + chunk.tokens, dtype=np.int32)
        bias_start.append(-1)
        if chunk.parents is not None:
            d = len(chunk.parents)
            mask, depth = _tree_mask(chunk.parents)
            position[-d:] = chunk.past + chunk.tokens - d + depth
            bias_start[-1] = size_of_masks
            masks.append(mask.ravel())
            size_of_masks += d * d
        positions.append(position)
        see = np.repeat(_visible(chunk, position, shape.window), group, axis=0)
        rows = slice(first * group, (first + chunk.tokens) * group)
        keys, values = (
            x[mine].transpose(1, 0, 2, 3).reshape(g, -1, dim)[:, : see.shape[1]] for x in (k, v)
        )
        scores = q[:, rows] @ keys.transpose(0, 2, 1) * shape.scale
        if shape.cap:
            scores = shape.cap * np.tanh(scores / shape.cap)
        scores = np.where(see, scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True)) if chunk.tokens else scores
        expected[:, rows] = p @ values / p.sum(-1, keepdims=True) if chunk.tokens else 0
        first += chunk.tokens
    tokens = np.array([c.tokens for c in chunks], np.int32)
    table = TokenTable(
        tokens=EMPTY,
        positions=np.concatenate(positions),
        slots=EMPTY,
        seq_of=np.repeat(np.arange(len(chunks), dtype=np.int32), tokens),
        carry=EMPTY,
        q_start=np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32),
        kv_len=np.array([c.past + c.tokens for c in chunks], np.int32),
        num_draft=np.array([len(c.parents or ()) for c in chunks], np.int32),
        bias_start=np.array(bias_start, np.int32),
        block_table=block_table,
        tree_mask=np.concatenate(masks),
        logit_rows=EMPTY,
    )
    return Case(shape, table, q, k, v, expected)


def mixes(rng: np.random.Generator, block_size: int) -> dict[str, list[Chunk]]:
    """Batches by name; lengths lie around the edges of tiles and blocks."""
    p = block_size
    around = [0, 1, p - 1, p, p + 1, 2 * p - 1, 2 * p, 3 * p + 5]

    def tree(past: int, size: int, known: int = 1) -> Chunk:
        return Chunk(past, size + known, random_tree(rng, size))

    return {
        "one token": [Chunk(0, 1)],
        "decode": [Chunk(past, 1) for past in around],
        "prefill": [
            Chunk(0, p + 1), Chunk(p - 1, 2), Chunk(5, 2 * p), Chunk(2 * p, 15), Chunk(1, 3)
        ],
        "verify": [tree(around[-1], 7), tree(0, 1), tree(p - 1, 5, 2), Chunk(p, 4), tree(p, 12)],
        "everything": [
            Chunk(0, p + 3), Chunk(4 * p + 1, 1), tree(2 * p - 3, 9), Chunk(9, 0), Chunk(p, p),
            Chunk(3 * p, 1), tree(p // 2, 2), Chunk(2 * p - 1, 5),
        ],
    }  # fmt: skip
