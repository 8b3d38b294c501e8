"""Chunks become the arrays of one iteration.

What stays the same while a sequence runs (its sampling parameters, its block table) lives in row
arrays that are written when the sequence gets its row; a step gathers from them. So the cost of
tabulating a step is a short loop over chunks and a fixed number of numpy calls.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from xylite.runtime.masks import is_masked
from xylite.runtime.plan import Chunk, Plan
from xylite.runtime.sequence import Sequence
from xylite.runtime.step import I32, SampleTable, StateReset, Step, TaskTable, TokenTable

TaskBuilder = Callable[[TokenTable], tuple[TaskTable, ...]]

_EMPTY = np.zeros(0, np.int32)
_NO_MASK = np.zeros(0, np.bool_)
_NO_RESET = StateReset(rows=_EMPTY, tokens=_EMPTY, start=np.zeros(1, np.int32), output=_EMPTY)


def _no_tasks(table: TokenTable) -> tuple[TaskTable, ...]:
    return ()


class Tabulator:
    """Builds each iteration's `Step` from its plan.

    max_num_seqs  rows
    max_blocks    most blocks of one sequence
    block_size    tokens per block
    tasks         makes the task tables of a token table
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        tasks: TaskBuilder = _no_tasks,
    ):
        n = max_num_seqs
        self._block_size = block_size
        self._tasks = tasks
        self._blocks = np.zeros((n, max_blocks), np.int32)
        self._num_blocks = [0] * n
        self._seed = np.zeros(n, np.int64)
        self._float = np.zeros((n, 6), np.float32)
        self._top_k = np.zeros(n, np.int32)
        self._penalised = np.zeros(n, np.bool_)
        self._sparse = np.zeros(n, np.bool_)
        self._bias: list[tuple[I32, np.ndarray]] = [(_EMPTY, np.zeros(0, np.float32))] * n
        self._ends: list[I32] = [_EMPTY] * n
        # Of iterations of decodes alone, all that does not change with the tokens.
        self._count = np.arange(n + 1, dtype=np.int32)
        self._zero = np.zeros(n, np.int32)
        self._none = np.full(n, -1, np.int32)
        self._kept: tuple[I32, I32, SampleTable] | None = None

    def _set_row(self, seq: Sequence) -> None:
        row, p = seq.row, seq.request.params
        self._num_blocks[row] = 0
        self._seed[row] = seq.seed
        self._top_k[row] = max(p.top_k, 0)
        self._float[row] = (
            p.temperature,
            p.top_p,
            p.min_p,
            p.presence_penalty,
            p.frequency_penalty,
            p.repetition_penalty,
        )
        self._penalised[row] = has_penalty(seq)
        bias = {**p.logit_bias, **dict.fromkeys(p.banned_token_ids, -np.inf)}
        self._bias[row] = (
            np.fromiter(bias.keys(), np.int32, len(bias)),
            np.fromiter(bias.values(), np.float32, len(bias)),
        )
        ends = sorted({*seq.request.end_tokens, *p.stop_token_ids}) if p.min_tokens else []
        self._ends[row] = np.array(ends, np.int32)
        self._sparse[row] = bool(bias or ends)

    def build(self, plan: Plan) -> Step:
        """The arrays of a plan. Also notes on each sequence which row draws its next token."""
        for seq in plan.admitted:
            if seq.row >= 0:
                self._set_row(seq)
                self._kept = None
        chunks = plan.chunks
        if not plan.copies and all(
            c.num == 1 and c.samples and not is_masked(c.seq) for c in chunks
        ):
            return self._decodes(plan)
        return self._mixed(plan)

    def _mixed(self, plan: Plan) -> Step:
        """The arrays of any chunks."""
        chunks = plan.chunks
        n = len(chunks)
        rows = np.fromiter((c.seq.row for c in chunks), np.int32, n)
        start = np.fromiter((c.start for c in chunks), np.int32, n)
        num = np.fromiter((c.num for c in chunks), np.int32, n)
        num_draft = np.fromiter((c.num_draft for c in chunks), np.int32, n)
        samples = np.fromiter((c.samples for c in chunks), np.bool_, n)
        first_row = np.zeros(n + 1, np.int32)
        np.cumsum(np.where(samples, 1 + num_draft, 0), out=first_row[1:])

        table = self._token_table(plan, rows, start, num, num_draft, samples, first_row)
        sample, num_mask_rows = self._sample_table(plan, rows, start + num - num_draft, first_row)
        for c, row in zip(chunks, first_row.tolist(), strict=False):
            c.seq.sample_row = row
        prompt_rows, prompt_targets, num_prompt_logprobs = self._prompt_rows(plan, table.q_start)
        return Step(
            number=plan.number,
            table=table,
            sample=sample,
            tasks=self._tasks(table),
            zero_blocks=np.array(plan.zero, np.int32),
            copy_src=np.fromiter((c.src for c in plan.copies), np.int32, len(plan.copies)),
            copy_dst=np.fromiter((c.dst for c in plan.copies), np.int32, len(plan.copies)),
            reset=_state_reset(plan.admitted),
            prompt_rows=prompt_rows,
            prompt_targets=prompt_targets,
            num_prompt_logprobs=num_prompt_logprobs,
            compact=any(c.draft is not None and c.draft.parents for c in chunks),
            num_mask_rows=num_mask_rows,
        )

    def _decodes(self, plan: Plan) -> Step:
        """The arrays of chunks of one token, each followed by a drawn one.

        So they are most of the time, and mostly of the same sequences as before.
        """
        chunks = plan.chunks
        n = len(chunks)
        rows = np.array([c.seq.row for c in chunks], np.int32)
        start = np.array([c.start for c in chunks], np.int32)
        tokens = [0] * n
        carry = [-1] * n
        for i, c in enumerate(chunks):
            seq = c.seq
            if c.start < len(seq.tokens):
                tokens[i] = seq.tokens[c.start]
            else:
                carry[i] = seq.sample_row
            seq.sample_row = i
        each, size = self._count[:n], self._block_size
        block_table = self._block_table(chunks, rows)
        table = TokenTable(
            tokens=np.array(tokens, np.int32),
            positions=start,
            slots=block_table[each, start // size] * size + start % size,
            seq_of=each,
            carry=np.array(carry, np.int32),
            q_start=self._count[: n + 1],
            kv_len=start + 1,
            num_draft=self._zero[:n],
            bias_start=self._none[:n],
            block_table=block_table,
            tree_mask=_NO_MASK,
            logit_rows=each,
        )
        return Step(
            number=plan.number,
            table=table,
            sample=self._kept_sample_table(plan, rows, table),
            tasks=self._tasks(table),
            zero_blocks=np.array(plan.zero, np.int32),
            copy_src=_EMPTY,
            copy_dst=_EMPTY,
            reset=_state_reset(plan.admitted),
            prompt_rows=_EMPTY,
            prompt_targets=_EMPTY,
            num_prompt_logprobs=0,
            compact=False,
            num_mask_rows=0,
        )

    def _kept_sample_table(self, plan: Plan, rows: I32, table: TokenTable) -> SampleTable:
        """That of the iteration before, as far as it is still right."""
        kept = self._kept
        if kept is not None and np.array_equal(kept[0], rows):
            return replace(kept[2], token_index=table.kv_len - kept[1])
        sample, _ = self._sample_table(plan, rows, table.kv_len, table.q_start)
        has_biases = bool(self._sparse[rows].any())  # which depend on min_tokens
        self._kept = None if has_biases else (rows, table.kv_len - sample.token_index, sample)
        return sample

    def _block_table(self, chunks: list[Chunk], rows: I32) -> I32:
        width = 1
        for c in chunks:
            seq = c.seq
            have, want = self._num_blocks[seq.row], len(seq.blocks)
            if have != want:
                self._blocks[seq.row, have:want] = seq.blocks[have:]
                self._num_blocks[seq.row] = want
            width = max(width, want)
        return self._blocks[rows, :width]

    def _token_table(
        self,
        plan: Plan,
        rows: I32,
        start: I32,
        num: I32,
        num_draft: I32,
        samples: np.ndarray,
        first_row: I32,
    ) -> TokenTable:
        chunks = plan.chunks
        n = len(chunks)
        q_start = np.zeros(n + 1, np.int32)
        np.cumsum(num, out=q_start[1:])
        total = int(q_start[-1])
        tokens: list[int] = []
        carried: list[tuple[int, int]] = []
        for c in chunks:
            seq_tokens = c.seq.tokens
            known_end = c.start + c.num - c.num_draft
            if known_end > len(seq_tokens):
                carried.append((len(tokens), c.seq.sample_row))
                tokens.append(0)
            elif c.num == 1:
                tokens.append(seq_tokens[c.start])
            else:
                tokens += seq_tokens[c.start : known_end]
                if c.draft is not None:
                    tokens += c.draft.tokens
        carry = np.full(total, -1, np.int32)
        for i, row in carried:
            carry[i] = row
        seq_of = np.repeat(np.arange(n, dtype=np.int32), num)
        order = np.arange(total, dtype=np.int32) - np.repeat(q_start[:-1] - start, num)
        block_table = self._block_table(chunks, rows)
        size = self._block_size
        slots = block_table[seq_of, order // size] * size + order % size
        positions, bias_start, tree_mask = _trees(chunks, q_start, order)
        first = (q_start[1:] - num_draft - 1)[samples]
        per_chunk = 1 + num_draft[samples]
        total_rows = int(first_row[-1])
        logit_rows = np.arange(total_rows, dtype=np.int32) + np.repeat(
            first - first_row[:-1][samples], per_chunk
        )
        return TokenTable(
            tokens=np.array(tokens, np.int32),
            positions=positions,
            slots=slots.astype(np.int32, copy=False),
            seq_of=seq_of,
            carry=carry,
            q_start=q_start,
            kv_len=start + num,
            num_draft=num_draft,
            bias_start=bias_start,
            block_table=block_table,
            tree_mask=tree_mask,
            logit_rows=logit_rows.astype(np.int32, copy=False),
        )

    def _sample_table(
        self, plan: Plan, rows: I32, known_end: I32, first_row: I32
    ) -> tuple[SampleTable, int]:
        chunks = plan.chunks
        n = len(chunks)
        per_chunk = np.diff(first_row)
        total = int(first_row[-1])
        row = np.repeat(rows, per_chunk)
        num_prompt = np.fromiter((c.seq.num_prompt for c in chunks), np.int32, n)
        token_index = np.repeat(known_end - num_prompt, per_chunk)
        parent = np.full(total, -1, np.int32)
        draft_token = np.full(total, -1, np.int32)
        depth = np.zeros(total, np.int32)
        seen: list[tuple[int, int]] = []
        if plan.has_drafts:
            for c, r in zip(chunks, first_row.tolist(), strict=False):
                if c.draft is not None:
                    self._draft_rows(c, r, parent, draft_token, depth, seen)
            token_index = token_index + depth
        values = self._float[row]
        penalised = self._penalised[row]
        bias_row, bias_token, bias_value = self._biases(chunks, row, token_index, first_row)
        mask_row = np.full(total, -1, np.int32)
        num_mask_rows = 0
        num_logprobs = -1
        for c, r, k in zip(chunks, first_row.tolist(), per_chunk.tolist(), strict=False):
            params = c.seq.request.params
            if params.logprobs is not None and k:
                num_logprobs = max(num_logprobs, params.logprobs)
            if is_masked(c.seq) and k:
                mask_row[r : r + k] = np.arange(num_mask_rows, num_mask_rows + k)
                num_mask_rows += k
        table = SampleTable(
            temperature=values[:, 0],
            top_k=self._top_k[row],
            top_p=values[:, 1],
            min_p=values[:, 2],
            presence_penalty=values[:, 3],
            frequency_penalty=values[:, 4],
            repetition_penalty=values[:, 5],
            seed=self._seed[row],
            token_index=token_index,
            state_row=np.where(penalised, row, -1).astype(np.int32, copy=False),
            mask_row=mask_row,
            bias_row=bias_row,
            bias_token=bias_token,
            bias_value=bias_value,
            seen_row=np.array([s[0] for s in seen], np.int32),
            seen_token=np.array([s[1] for s in seen], np.int32),
            parent=parent,
            draft_token=draft_token,
            depth=depth,
            num_logprobs=num_logprobs,
        )
        return table, num_mask_rows

    def _draft_rows(
        self,
        chunk: Chunk,
        first: int,
        parent: I32,
        draft_token: I32,
        depth: I32,
        seen: list[tuple[int, int]],
    ) -> None:
        """Rows of one chunk's draft; draft token i has row first + 1 + i."""
        draft = chunk.draft
        assert draft is not None
        counts = bool(self._penalised[chunk.seq.row])
        paths: list[list[int]] = []
        for i, token in enumerate(draft.tokens):
            up = i - 1 if draft.parents is None else draft.parents[i]
            row = first + 1 + i
            parent[row] = first + 1 + up
            draft_token[row] = token
            path = [*paths[up], token] if up >= 0 else [token]
            paths.append(path)
            depth[row] = len(path)
            if counts:
                seen += [(row, t) for t in path]

    def _biases(
        self, chunks: list[Chunk], row: I32, token_index: I32, first_row: I32
    ) -> tuple[I32, I32, np.ndarray]:
        """logit_bias, banned tokens, and ends before min_tokens, as sparse additions."""
        special = np.flatnonzero(self._sparse[row])
        if not len(special):
            return _EMPTY, _EMPTY, np.zeros(0, np.float32)
        at: list[np.ndarray] = []
        ids: list[np.ndarray] = []
        values: list[np.ndarray] = []
        chunk_of = np.searchsorted(first_row, special, side="right") - 1
        r: int
        c: int
        for r, c in zip(special.tolist(), chunk_of.tolist(), strict=True):
            tokens, bias = self._bias[int(row[r])]
            if token_index[r] < chunks[c].seq.request.params.min_tokens:
                ends = self._ends[int(row[r])]
                tokens = np.concatenate([tokens, ends])
                bias = np.concatenate([bias, np.full(len(ends), -np.inf, np.float32)])
            at.append(np.full(len(tokens), r, np.int32))
            ids.append(tokens)
            values.append(bias)
        return np.concatenate(at), np.concatenate(ids), np.concatenate(values)

    @staticmethod
    def _prompt_rows(plan: Plan, q_start: I32) -> tuple[I32, I32, int]:
        """Token rows to score against the prompt token that follows each."""
        rows: list[int] = []
        targets: list[int] = []
        top = 0
        for c, q in zip(plan.chunks, q_start.tolist(), strict=False):
            k = c.num_prompt_rows
            if k:
                rows += range(q, q + k)
                targets += c.seq.tokens[c.start + 1 : c.start + 1 + k]
                top = max(top, c.seq.request.params.prompt_logprobs or 0)
        return np.array(rows, np.int32), np.array(targets, np.int32), top


def has_penalty(seq: Sequence) -> bool:
    """The sequence's tokens must be counted."""
    p = seq.request.params
    return bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0)


def uniforms(seed: np.ndarray, token_index: np.ndarray) -> np.ndarray:
    """float32 in [0, 1) for each (seed, token index): SplitMix64 as a counter-based generator."""
    with np.errstate(over="ignore"):
        z = seed.astype(np.uint64)
        z = _mix(z + np.uint64(0x9E3779B97F4A7C15))
        z = _mix(z + (token_index.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD1342543DE82EF95))
    return ((z >> np.uint64(40)).astype(np.float64) * 2.0**-24).astype(np.float32)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _trees(chunks: list[Chunk], q_start: I32, order: I32) -> tuple[I32, I32, np.ndarray]:
    """Positions (depth-based in trees), where each tree's mask starts, and the masks."""
    bias_start = np.full(len(chunks), -1, np.int32)
    if not any(c.draft is not None and c.draft.parents for c in chunks):
        return order, bias_start, np.zeros(0, np.bool_)
    positions = order.copy()
    masks: list[np.ndarray] = []
    offset = 0
    for i, c in enumerate(chunks):
        if c.draft is None or not c.draft.parents:
            continue
        n = len(c.draft)
        mask = np.eye(n, dtype=np.bool_)
        depth = np.ones(n, np.int32)
        for j, up in enumerate(c.draft.parents):
            if up >= 0:
                mask[j] |= mask[up]
                depth[j] = depth[up] + 1
        end = int(q_start[i + 1])
        positions[end - n : end] = c.start + c.num - n - 1 + depth
        bias_start[i] = offset
        offset += n * n
        masks.append(mask.ravel())
    return positions, bias_start, np.concatenate(masks)


def _state_reset(admitted: list[Sequence]) -> StateReset:
    penalised = [s for s in admitted if s.row >= 0 and has_penalty(s)]
    if not penalised:
        return _NO_RESET
    lengths = [len(s.tokens) for s in penalised]
    start = np.zeros(len(penalised) + 1, np.int32)
    np.cumsum(lengths, out=start[1:])
    tokens = [t for s in penalised for t in s.tokens]
    return StateReset(
        rows=np.array([s.row for s in penalised], np.int32),
        tokens=np.array(tokens, np.int32),
        start=start,
        output=np.array(
            [b + s.num_prompt for b, s in zip(start.tolist(), penalised, strict=False)], np.int32
        ),
    )
