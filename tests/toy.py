"""A model one can compute by hand, with drafter and constraint, to drive the runtime without torch.

The KV of a token is (token + 1) * (position + 1). The next token is the sum of all KV a query
sees, modulo V, moved on by a whole number drawn from the row's uniform if temperature > 0, then to
the next token that bias and mask allow. So one wrong slot, position, carry, seed or mask changes
every later token.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xylite.runtime.request import Draft, Limits, Request, SamplingParams, make_request
from xylite.runtime.sequence import Sequence as Seq
from xylite.runtime.step import LogprobRows, Step, StepResult
from xylite.runtime.token_table import uniforms

V = 61
WORDS = (V + 31) // 32
GARBAGE = 10**6


class ToyExecutor:
    """Runs Steps on a pool of numbers. `raise_at` and `corrupt` (step, chunk) inject failures."""

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.pool = np.zeros((num_blocks, block_size), np.int64)
        self.counts: dict[int, list[int]] = {}
        self.last_ids = np.zeros(0, np.int32)
        self.raise_at: set[int] = set()
        self.corrupt: set[tuple[int, int]] = set()

    def run(self, step: Step, mask: np.ndarray | None = None) -> StepResult:
        t = step.table
        self.pool[step.zero_blocks] = 0
        self.pool[step.copy_dst] = self.pool[step.copy_src]
        self._reset(step)
        tokens = t.tokens.copy()
        carried = t.carry >= 0
        tokens[carried] = self.last_ids[t.carry[carried]]
        if step.number in self.raise_at:
            self.last_ids = np.zeros(len(t.logit_rows), np.int32)
            raise RuntimeError("injected")
        flat = self.pool.reshape(-1)
        flat[t.slots] = (tokens.astype(np.int64) + 1) * (t.positions + 1)
        finite = np.ones(len(t.kv_len), np.bool_)
        for i in range(len(t.kv_len)):
            if (step.number, i) in self.corrupt:
                flat[t.slots[t.q_start[i] : t.q_start[i + 1]]] = GARBAGE
            finite[i] = not (self._visible(t, int(t.q_start[i + 1]) - 1) >= GARBAGE).any()
            if not finite[i]:  # as NaN would, from layer to layer
                flat[t.slots[t.q_start[i] : t.q_start[i + 1]]] = GARBAGE
        ids = np.array(
            [
                self._draw(step, r, int(self._visible(t, row).sum()), mask)
                for r, row in enumerate(t.logit_rows.tolist())
            ],
            np.int32,
        )
        self.last_ids = ids
        for i in np.flatnonzero(finite).tolist():
            used = t.block_table[i, : -(-int(t.kv_len[i]) // self.block_size)]
            assert (self.pool[used] < GARBAGE).all(), "garbage in a used block"
        accepted = self._verify(step, ids)
        if step.compact:
            self._compact(step, accepted)
        for r in np.flatnonzero(accepted & (step.sample.state_row >= 0)).tolist():
            self.counts[int(step.sample.state_row[r])].append(int(ids[r]))
        return StepResult(
            ids, accepted, finite, self._rows(step, ids), self._prompt_rows(step, tokens)
        )

    def forward(self, step: Step) -> Step:
        """The toy does everything when it samples."""
        return step

    def sample(self, forwarded: Step, mask: np.ndarray | None = None) -> StepResult:
        return self.run(forwarded, mask)

    def _reset(self, step: Step) -> None:
        reset = step.reset
        for i, row in enumerate(reset.rows.tolist()):
            self.counts[row] = reset.tokens[reset.output[i] : reset.start[i + 1]].tolist()

    def _visible(self, t, row: int) -> np.ndarray:
        """KV values that token row `row` sees."""
        i = int(t.seq_of[row])
        chunk_row = row - int(t.q_start[i])
        num = int(t.q_start[i + 1] - t.q_start[i])
        end = int(t.kv_len[i]) - num + chunk_row + 1
        order = np.arange(end)
        if t.bias_start[i] >= 0 and chunk_row >= num - t.num_draft[i]:
            n = int(t.num_draft[i])
            first = int(t.kv_len[i]) - n
            mask = t.tree_mask[t.bias_start[i] :][: n * n].reshape(n, n)
            drafts = np.flatnonzero(mask[chunk_row - (num - n)]) + first
            order = np.concatenate([np.arange(first), drafts])
        blocks = t.block_table[i][order // self.block_size]
        return self.pool[blocks, order % self.block_size]

    def _draw(self, step: Step, r: int, total: int, mask: np.ndarray | None) -> int:
        s = step.sample
        u = float(uniforms(s.seed[r : r + 1], s.token_index[r : r + 1])[0])
        counted: list[int] = []
        if s.state_row[r] >= 0:
            counted = self.counts[int(s.state_row[r])] + s.seen_token[s.seen_row == r].tolist()
        bias = dict(zip(s.bias_token[s.bias_row == r], s.bias_value[s.bias_row == r], strict=True))
        words = None if mask is None or s.mask_row[r] < 0 else mask[s.mask_row[r]]
        return next_token(
            total,
            u,
            temperature=float(s.temperature[r]),
            presence=float(s.presence_penalty[r]),
            counted=counted,
            banned={int(k) for k, v in bias.items() if v == -np.inf},
            words=words,
        )

    @staticmethod
    def _verify(step: Step, ids: np.ndarray) -> np.ndarray:
        s = step.sample
        accepted = np.zeros(len(ids), np.bool_)
        for r in range(len(ids)):
            up = int(s.parent[r])
            accepted[r] = up < 0 or (accepted[up] and ids[up] == s.draft_token[r])
        return accepted

    def _compact(self, step: Step, accepted: np.ndarray) -> None:
        t, s = step.table, step.sample
        flat = self.pool.reshape(-1)
        values = flat.copy()
        for r in np.flatnonzero(accepted).tolist():
            row = int(t.logit_rows[r])
            if s.depth[r]:
                first = int(t.q_start[t.seq_of[row] + 1] - t.num_draft[t.seq_of[row]])
                flat[t.slots[first + s.depth[r] - 1]] = values[t.slots[row]]

    @staticmethod
    def _rows(step: Step, ids: np.ndarray) -> LogprobRows | None:
        if step.sample.num_logprobs < 0:
            return None
        k = step.sample.num_logprobs
        return LogprobRows(
            -ids.astype(np.float32),
            np.repeat(ids[:, None], k, axis=1),
            np.repeat(-ids[:, None].astype(np.float32), k, axis=1),
            np.ones(len(ids), np.int32),
        )

    @staticmethod
    def _prompt_rows(step: Step, tokens: np.ndarray) -> LogprobRows | None:
        if not len(step.prompt_rows):
            return None
        n, k = len(step.prompt_rows), step.num_prompt_logprobs
        chosen = -(tokens[step.prompt_rows] * 1000.0 + step.prompt_targets).astype(np.float32)
        none = np.zeros((n, k), np.int32), np.zeros((n, k), np.float32)
        return LogprobRows(chosen, *none, np.ones(n, np.int32))


def next_token(
    total: int,
    u: float,
    *,
    temperature: float,
    presence: float,
    counted: Sequence[int],
    banned: set[int],
    words: np.ndarray | None,
) -> int:
    """The toy's choice, from the sum of visible KV."""
    token = (total + (int(u * 5) if temperature > 0 else 0)) % V
    if presence:
        token = (token + len(set(counted))) % V
    for _ in range(V):
        allowed = words is None or (int(words[token // 32]) >> (token % 32)) & 1
        if token not in banned and allowed:
            return token
        token = (token + 1) % V
    raise AssertionError("nothing is allowed")


class SumConstraint:
    """Allows a token t if (t + sum of the accepted tokens) is not a multiple of 3.

    Like a grammar it walks over a draft with its own state, and has no state after a token that it
    forbids.
    """

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def _allowed(self, total: int) -> np.ndarray:
        flags = np.zeros(WORDS * 32, np.bool_)
        flags[:V] = (np.arange(V) + total) % 3 != 0
        return np.packbits(flags, bitorder="little").view(np.int32)

    def fill(self, draft: Draft | None, out: np.ndarray) -> None:
        out[0] = self._allowed(sum(self.accepted))
        paths: list[list[int] | None] = []
        for i, token in enumerate(draft.tokens if draft is not None else ()):
            up = i - 1 if draft.parents is None else draft.parents[i]
            path = paths[up] if up >= 0 else []
            if path is None or (sum(self.accepted) + sum(path) + token) % 3 == 0:
                paths.append(None)
                out[1 + i] = 0
                continue
            paths.append([*path, token])
            self.accept(paths[-1])
            out[1 + i] = self._allowed(sum(self.accepted))
            self.rollback(len(paths[-1]))

    def accept(self, ids: Sequence[int]) -> None:
        for token in ids:
            assert (sum(self.accepted) + token) % 3, f"{token} is forbidden after {self.accepted}"
            self.accepted.append(token)

    def rollback(self, n: int) -> None:
        del self.accepted[len(self.accepted) - n :]


class ToyDrafter:
    """Proposes chains and trees, right and wrong: it knows the answer and spoils some of it."""

    def __init__(self, rng: random.Random, max_draft: int):
        self.rng = rng
        self.max_draft = max_draft

    def propose(self, seq: Seq) -> Draft | None:
        n = self.rng.randint(0, self.max_draft)
        if n == 0 or seq.num_pending or seq.finish is not None:
            return None
        truth = expected_tokens(seq.request, seq.index)
        right = truth[seq.num_output : seq.num_output + n]
        kind = self.rng.random()
        if kind < 0.4:
            tokens = [t if self.rng.random() < 0.8 else self.rng.randrange(V) for t in right]
            return Draft(tuple(tokens)) if tokens else None
        tokens, parents = [], []
        last = -1
        for t in right:
            wrong = (t + 1 + self.rng.randrange(V - 1)) % V
            order = [t, wrong] if self.rng.random() < 0.5 else [wrong, t]
            if self.rng.random() < 0.2:
                order = [wrong]
            base = last
            for token in order:
                if token == t:
                    last = len(tokens)
                tokens.append(token)
                parents.append(base)
            if t not in order:
                break
        return Draft(tuple(tokens), tuple(parents)) if tokens else None


def expected_tokens(request: Request, index: int = 0) -> list[int]:
    """What the toy says to a request, computed from scratch at every token."""
    seq = Seq(request, index, 0.0)
    p = request.params
    constraint = request.constraint() if request.constraint else None
    tokens = list(request.prompt)
    out: list[int] = []
    while len(out) < request.max_tokens:
        total = sum((t + 1) * (i + 1) for i, t in enumerate(tokens))
        u = float(uniforms(np.array([seq.seed]), np.array([len(out)]))[0])
        banned = set(p.banned_token_ids)
        ends = request.end_tokens | set(p.stop_token_ids)
        if len(out) < p.min_tokens:
            banned |= ends
        words = None
        if constraint is not None:
            row = np.zeros((1, WORDS), np.int32)
            constraint.fill(None, row)
            words = row[0]
        if p.allowed_token_ids is not None:
            flags = np.zeros(WORDS * 32, np.bool_)
            flags[list(p.allowed_token_ids)] = True
            allowed = np.packbits(flags, bitorder="little").view(np.int32)
            words = allowed if words is None else words & allowed
        token = next_token(
            total,
            u,
            temperature=p.temperature,
            presence=p.presence_penalty,
            counted=out,
            banned=banned,
            words=words,
        )
        out.append(token)
        tokens.append(token)
        if constraint is not None:
            constraint.accept([token])
        if token in ends and len(out) > p.min_tokens:
            break
    return out


def toy_request(
    name: str, prompt: Sequence[int], params: SamplingParams, *, capacity: int = 10**6, **kwargs
) -> Request:
    """A checked request for the toy; token 7 ends a sequence."""
    limits = Limits(vocab_size=V, max_model_len=capacity, max_kv_tokens=capacity)
    kwargs.setdefault("end_tokens", frozenset({7}))
    return make_request(name, prompt, params, limits=limits, default_seed=5, **kwargs)


def drawn_request(name: str, wanted: Mapping[str, Any], capacity: int) -> Request:
    """The request that a random test has drawn."""
    fields = {k: wanted[k] for k in ("cache_salt", "priority", "constraint")}
    return toy_request(name, wanted["prompt"], wanted["params"], capacity=capacity, **fields)
