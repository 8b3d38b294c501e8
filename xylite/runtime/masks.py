"""Which tokens may be drawn, as bit masks of an iteration's rows."""

from collections.abc import Sequence as Ids

import numpy as np

from xylite.runtime.plan import Plan
from xylite.runtime.request import Draft
from xylite.runtime.sequence import Sequence
from xylite.runtime.step import I32


def is_masked(seq: Sequence) -> bool:
    """Each of the sequence's rows needs a mask of allowed tokens."""
    return seq.constraint is not None or seq.request.params.allowed_token_ids is not None


def fill_masks(plan: Plan, out: np.ndarray) -> list[Sequence]:
    """Write the masks of a plan's rows, [num_mask_rows, ceil(V / 32)] int32, in row order.

    Only once every earlier step is committed: constraints follow accepted tokens. Gives the
    sequences whose constraint failed or leaves nothing to choose from; their rows allow everything.
    """
    out[:] = -1
    row = 0
    failed: list[Sequence] = []
    for c in plan.chunks:
        seq = c.seq
        if not (c.samples and is_masked(seq)):
            continue
        rows = out[row : row + 1 + c.num_draft]
        row += len(rows)
        if seq.finish is not None or seq.epoch != c.epoch:
            continue
        if seq.constraint is not None:
            try:
                seq.constraint.fill(c.draft, rows)
            except Exception:  # noqa: BLE001 - a plug-in's fault is not the other requests' fault
                rows[:] = -1
                failed.append(seq)
        allowed = seq.request.params.allowed_token_ids
        if allowed is not None:
            if seq.allowed_bits is None:
                seq.allowed_bits = bits(allowed, out.shape[1])
            rows &= seq.allowed_bits
        if c.draft is not None:
            _open_dead_rows(c.draft, rows)
        if not rows[0].any():
            rows[:] = -1
            failed.append(seq)
    return failed


def _open_dead_rows(draft: Draft, rows: np.ndarray) -> None:
    """Let the rows of draft tokens that are forbidden, and of those below them, allow everything.

    Nothing leads to such a row: the row before it never draws the token. So a constraint need not
    say what may follow a token that it forbids, and each row has something to draw.
    """
    dead = [False] * len(rows)
    for i, token in enumerate(draft.tokens):
        up = i if draft.parents is None else 1 + draft.parents[i]
        dead[1 + i] = dead[up] or not (int(rows[up, token // 32]) >> (token % 32)) & 1
    rows[dead] = -1


def bits(ids: Ids[int], words: int) -> I32:
    """Bit mask of `words` int32 with the bits of `ids` set."""
    flags = np.zeros(words * 32, np.bool_)
    flags[np.asarray(ids, np.int64)] = True
    return np.packbits(flags, bitorder="little").view(np.int32)
