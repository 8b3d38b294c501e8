"""One iteration as arrays only: what is computed, where its KV goes, how its tokens are chosen.

A `Step` holds numpy arrays and numbers, no objects of the scheduler, so it can be recorded,
replayed or sent to another rank. The executor turns it into a `StepResult`. Iterations share arrays
that are the same for all of them, so nobody writes to one; `slots` alone are always a step's own.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """The tokens of one iteration. T tokens in S chunks, chunk after chunk.

    tokens       [T] ids; where carry >= 0 the id is not known yet
    positions    [T] place in the sequence; of draft tokens: depth
    slots        [T] where the token's KV is stored: block * block_size + offset
    seq_of       [T] chunk of the token
    carry        [T] row of the previous step's sampled ids that names this token, or -1
    q_start      [S + 1] first token of each chunk, and T
    kv_len       [S] keys the chunk may see, its own tokens included
    num_draft    [S] how many of the chunk's last tokens are draft tokens
    bias_start   [S] first element of the chunk's mask in tree_mask, or -1: plain causal
    block_table  [S, B] blocks of each sequence, in order; entries past its end are never read
    tree_mask    num_draft x num_draft per tree: row sees column (its ancestors and itself)
    logit_rows   [R] tokens whose hidden state goes to the head
    """

    tokens: I32
    positions: I32
    slots: I32
    seq_of: I32
    carry: I32
    q_start: I32
    kv_len: I32
    num_draft: I32
    bias_start: I32
    block_table: I32
    tree_mask: NDArray[np.bool_]
    logit_rows: I32


TASK_FIELDS: Final = (
    "seq", "q_row", "num_rows", "head", "kv_start", "kv_end", "part", "load", "row", "past", "tree",
)  # fmt: skip
MERGE_FIELDS: Final = (
    "seq", "q_row", "num_rows", "head", "kv_start", "kv_end", "part", "num_parts", "row", "prefix",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class TaskList:
    """Tasks of one tile class, ordered by core.

    tile_q      rows of a query tile (packed rows: token * group + head of the group)
    tasks       [W, len(TASK_FIELDS)]:
                seq       chunk
                q_row     first packed row of the tile, within the chunk
                num_rows  rows of the tile that exist
                head      KV head
                kv_start, kv_end  keys of the sequence that this task reads; kv_start is a
                          multiple of the KV tile, and so is kv_end unless it is the tile's last
                part      first of num_rows rows in the partial results if the KV range was cut
                          or a prefix shared, or -1: the task gives the final result
                load      tile_q * (kv_end - kv_start), for balance reports
                row       first packed row of the tile, within the iteration (row of q and o)
                past      keys before the chunk: row r of the tile sees the keys below
                          past + (q_row + r) // group + 1 (of these the last `window`)
                tree      1: tree_mask decides which of the chunk's draft tokens are seen

                The rows of a shared prefix's tile are those of several chunks, the neighbours from
                `seq` on; its keys lie before the tokens of each.
    core_start  [cores + 1] first task of each core, and W
    """

    tile_q: int
    tasks: I32
    core_start: I32


@dataclass(frozen=True, slots=True, eq=False)
class TaskTable:
    """All attention tasks of one iteration for one attention kind.

    classes  one list per tile class, empty ones included
    merges   [M + P, len(MERGE_FIELDS)] one for every tile that was cut or has a shared prefix, then
             one for every shared prefix, which has no result of its own. Its num_parts parts lie
             one after the other in the partial results, num_rows rows each, from row `part` on;
             in the order of their keys. kv_start and kv_end are the tile's, the rest is as in
             a task, except
                prefix    of the first M: the merge whose parts, the rows from row (of this one) -
                          row (of that one) on, come before the tile's own; or -1
    parts    [3] M, how many rows the partial results have, and P
    """

    classes: tuple[TaskList, ...]
    merges: I32
    parts: I32


@dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """How the R logit rows become tokens.

    Row r predicts what follows token row logit_rows[r]. Rows of one chunk are neighbours: first
    the row of its last known token, then one per draft token.

    seed, token_index  the row's uniform is a function of these two alone
    state_row          row of SamplerState that counts this sequence's tokens, or -1
    mask_row           row of the mask given to `sample`, or -1
    bias_*             sparse additions to logits; -inf bans
    seen_*             draft tokens to count as generated on top of the state, by row
    parent             row that must have drawn draft_token for this row to count; -1 for the first
    draft_token        the draft token this row follows; -1 for the first
    depth              0 for the first row, else the draft token's depth
    num_logprobs       most alternatives any row wants; -1: no log-probabilities at all
    """

    temperature: F32
    top_k: I32
    top_p: F32
    min_p: F32
    presence_penalty: F32
    frequency_penalty: F32
    repetition_penalty: F32
    seed: NDArray[np.int64]
    token_index: I32
    state_row: I32
    mask_row: I32
    bias_row: I32
    bias_token: I32
    bias_value: F32
    seen_row: I32
    seen_token: I32
    parent: I32
    draft_token: I32
    depth: I32
    num_logprobs: int


@dataclass(frozen=True, slots=True, eq=False)
class StateReset:
    """Rows of SamplerState to set anew before sampling.

    rows     [n]
    tokens   all rows' tokens, one row after the other: its prompt, then its output
    start    [n + 1] first token of each row, and the total
    output   [n] first output token of each row, in `tokens`
    """

    rows: I32
    tokens: I32
    start: I32
    output: I32


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One iteration.

    zero_blocks              blocks to clear first (they held a failed request's values)
    copy_src, copy_dst       then blocks to copy: all sources are read before any is written
    prompt_rows              [Q] token rows whose prediction is scored against
    prompt_targets           [Q] these ids, for prompt log-probabilities
    num_prompt_logprobs      alternatives wanted there
    compact                  some draft is a tree: its accepted path must be moved together
    num_mask_rows            rows of the mask that `sample` needs; 0: none
    """

    number: int
    table: TokenTable
    sample: SampleTable
    tasks: tuple[TaskTable, ...]
    zero_blocks: I32
    copy_src: I32
    copy_dst: I32
    reset: StateReset
    prompt_rows: I32
    prompt_targets: I32
    num_prompt_logprobs: int
    compact: bool
    num_mask_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class LogprobRows:
    """Log-probabilities of some rows: of the chosen (or target) id, and of the K most likely."""

    chosen: F32  # [rows]
    top_ids: I32  # [rows, K]
    top: F32  # [rows, K]
    rank: I32  # [rows] how many tokens are as likely as the chosen one or more so, itself included


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What an iteration produced.

    ids       [R] the token drawn at each row
    accepted  [R] the row counts: it is the first of its chunk, or its draft token was drawn by an
              accepted parent
    finite    [S] every hidden state and logit of the chunk is finite
    """

    ids: I32
    accepted: NDArray[np.bool_]
    finite: NDArray[np.bool_]
    logprobs: LogprobRows | None
    prompt_logprobs: LogprobRows | None
