"""Runs Steps on a device. Only the device thread calls `forward`, `sample` and `run`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from xylite.models.spec import ModelSpec
from xylite.ops import Batch, KVCache, Ops, SampleBatch, SamplerState, TaskLists
from xylite.ops.shared.sampling import logprobs as logprobs_of
from xylite.runtime.step import LogprobRows, SampleTable, StateReset, Step, StepResult
from xylite.runtime.token_table import uniforms

LEAST_SPARED: Final = 96  # tokens that the last layer leaves out, for it to be worth it
PROMPT_LOGPROB_ROWS: Final = 64  # rows scored at once: bounds the memory of prompt logprobs


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A family's functions, a model's spec and its parameters on the device.

    vocab_size  ids that have a meaning; logits beyond them are padding and never looked at
    """

    family: ModuleType
    spec: ModelSpec
    params: Any
    vocab_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Forwarded:
    """A step after its forward pass: what sampling needs.

    hidden    of all tokens, or of each chunk's last
    rows      [R] rows of it that go to the head
    sampling  how the rows become tokens; None if there are none
    """

    step: Step
    hidden: Tensor
    rows: Tensor
    sampling: SampleBatch | None


class Executor:
    """One model with its KV cache on one device.

    kv            the cache; each step consumes it and leaves the next one here
    max_num_seqs  rows of sampler state that may be asked for
    """

    def __init__(self, model: Model, ops: Ops, kv: KVCache, max_num_seqs: int):
        self.model = model
        self.ops = ops
        self.kv = kv
        self._device = ops.device.torch_device
        self._max_num_seqs = max_num_seqs
        self._state: SamplerState | None = None
        self._last_ids = torch.zeros(1, dtype=torch.int32, device=self._device)

    def run(self, step: Step, mask: np.ndarray | None = None) -> StepResult:
        """Forward pass and sampling of one iteration; mask as `sample` takes it."""
        return self.sample(self.forward(step), mask)

    def forward(self, step: Step) -> Forwarded:
        """Everything up to the final hidden states; KV of all tokens is stored."""
        try:
            with torch.inference_mode():
                return self._forward(step)
        except BaseException:
            # A step planned on top of this one still names its rows.
            self._last_ids = self._last_ids.new_zeros(max(len(step.table.logit_rows), 1))
            raise

    def _forward(self, step: Step) -> Forwarded:
        ops = self.ops
        if len(step.zero_blocks):
            self.kv = ops.zero_blocks(self.kv, self._put(step.zero_blocks))
        if len(step.copy_src):
            self.kv = ops.copy_blocks(self.kv, self._put(step.copy_src), self._put(step.copy_dst))
        if len(step.reset.rows):
            self._reset(step.reset)
        batch = self._batch(step)
        num_last = self._num_last(step)
        if num_last:
            batch = dataclasses.replace(batch, num_last=num_last)
        # Now, so that sampling follows the pass at once: threads of the CPU's kernels that wait
        # longer than some microseconds go to sleep, and have to be woken.
        t = step.table
        rows = self._put(t.seq_of[t.logit_rows] if num_last else t.logit_rows)
        sampling = self._sample_batch(step.sample) if rows.shape[0] else None
        if ops.replayed is None:
            hidden, self.kv = self._pass(self.kv, batch)
        else:
            hidden, self.kv = ops.replayed(self._pass, self.kv, batch)
        assert hidden.shape[0] == (num_last or len(t.tokens)), (hidden.shape, num_last)
        return Forwarded(step, hidden, rows, sampling)

    def _num_last(self, step: Step) -> int:
        """`Batch.num_last`: not 0 where nothing but the last tokens of chunks is looked at, and the
        others are so many that the last layer takes notably less without them."""
        t = step.table
        num = len(t.kv_len)
        spared = len(t.tokens) - num
        is_last = not (t.num_draft.any() or len(step.prompt_rows))
        return num if self.ops.last_rows is not None and spared >= LEAST_SPARED and is_last else 0

    def _pass(self, kv: KVCache, batch: Batch) -> tuple[Tensor, KVCache]:
        """The model's forward pass: nothing in it depends on anything but its arguments."""
        model = self.model
        return model.family.forward(model.params, kv, batch, model.spec, self.ops)

    def sample(self, forwarded: Forwarded, mask: np.ndarray | None = None) -> StepResult:
        """Draw, verify and score; mask [num_mask_rows, ceil(V / 32)] int32 of allowed tokens."""
        try:
            with torch.inference_mode():
                return self._sample(forwarded, mask)
        except BaseException:
            rows = len(forwarded.step.table.logit_rows)
            self._last_ids = self._last_ids.new_zeros(max(rows, 1))
            raise

    def _sample(self, forwarded: Forwarded, mask: np.ndarray | None) -> StepResult:
        step, hidden = forwarded.step, forwarded.hidden
        if forwarded.sampling is None:
            return StepResult(
                ids=np.zeros(0, np.int32),
                accepted=np.zeros(0, np.bool_),
                finite=_finite(step, _numpy(self.ops.finite(hidden)), np.ones(0, np.bool_)),
                logprobs=None,
                prompt_logprobs=self._prompt_logprobs(step, hidden),
            )
        table, rows = step.sample, forwarded.rows
        is_all = rows.shape[0] == hidden.shape[0]  # each token has its row, as in decoding
        logits = self._logits(hidden if is_all else _taken(hidden, rows))
        sane_rows = self.ops.finite(logits)
        raw = logits.clone() if table.num_logprobs >= 0 else None
        bits = None if mask is None else self._put(mask)
        ids = self.ops.sample(logits, forwarded.sampling, self._state, bits)
        sane = self.ops.finite(hidden)
        accepted = self._verify(table, ids)
        self._last_ids = ids.to(torch.int32)
        self._count(table, ids, accepted)
        if step.compact and accepted is not None:
            self._compact(step, accepted)
        logprobs = None if raw is None else logprobs_of(raw, ids, table.num_logprobs)
        return StepResult(
            ids=_numpy(self._last_ids),
            accepted=np.ones(len(ids), np.bool_) if accepted is None else _numpy(accepted),
            finite=_finite(step, _numpy(sane), _numpy(sane_rows)),
            logprobs=_joined([logprobs]) if logprobs is not None else None,
            prompt_logprobs=self._prompt_logprobs(step, hidden),
        )

    def _logits(self, hidden: Tensor) -> Tensor:
        model = self.model
        logits = model.family.logits(model.params, hidden, model.spec, self.ops)
        return logits[:, : model.vocab_size]

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _put_all(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Several arrays in one copy: packed into one pinned buffer, viewed on the device."""
        if self._device.type == "cpu":
            return {k: torch.from_numpy(np.ascontiguousarray(a)) for k, a in arrays.items()}
        places: dict[str, tuple[int, np.ndarray]] = {}
        size = 0
        for name, array in arrays.items():
            places[name] = (size, array)
            size += -(-array.nbytes // 16) * 16
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        host = buffer.numpy()
        for start, array in places.values():
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            host[start : start + array.nbytes] = flat
        packed = buffer.to(self._device, non_blocking=True)
        return {
            name: packed[start : start + array.nbytes]
            .view(torch.from_numpy(array[:0].reshape(-1)).dtype)
            .reshape(array.shape)
            for name, (start, array) in places.items()
        }

    def _batch(self, step: Step) -> Batch:
        t = step.table
        arrays: dict[str, np.ndarray] = {
            "tokens": t.tokens,
            "positions": t.positions,
            "slots": t.slots,
            "seq_of": t.seq_of,
            "carry": t.carry,
            "q_start": t.q_start,
            "kv_len": t.kv_len,
            "num_draft": t.num_draft,
            "bias_start": t.bias_start,
            "block_table": t.block_table,
            "tree_mask": t.tree_mask,
        }
        for i, tasks in enumerate(step.tasks):
            arrays[f"merges{i}"], arrays[f"parts{i}"] = tasks.merges, tasks.parts
            for j, c in enumerate(tasks.classes):
                arrays[f"tasks{i}.{j}"], arrays[f"core_start{i}.{j}"] = c.tasks, c.core_start
        put = self._put_all(arrays)
        tokens = self._carried(put["tokens"], put["carry"])
        lists = tuple(
            TaskLists(
                tasks=tuple(put[f"tasks{i}.{j}"] for j in range(len(tasks.classes))),
                core_start=tuple(put[f"core_start{i}.{j}"] for j in range(len(tasks.classes))),
                merges=put[f"merges{i}"],
                parts=put[f"parts{i}"],
                tile_q=tuple(c.tile_q for c in tasks.classes),
            )
            for i, tasks in enumerate(step.tasks)
        )
        return Batch(
            tokens=tokens,
            positions=put["positions"],
            slots=put["slots"],
            seq_of=put["seq_of"],
            q_start=put["q_start"],
            kv_len=put["kv_len"],
            num_draft=put["num_draft"],
            bias_start=put["bias_start"],
            block_table=put["block_table"],
            tree_mask=put["tree_mask"],
            tasks=lists,
        )

    def _carried(self, tokens: Tensor, carry: Tensor) -> Tensor:
        """The tokens, those that the step before has drawn filled in."""
        last = self._last_ids
        if self._device.type == "cpu":
            # By numpy: each call of torch gives up the interpreter's lock, and the event loop,
            # which has just been handed a result, would take it from an idle device.
            rows = carry.numpy()
            drawn = last.numpy().take(rows, mode="clip")
            return torch.from_numpy(np.where(rows >= 0, drawn, tokens.numpy()))
        rows = carry.clamp(min=0, max=last.shape[0] - 1)
        return torch.where(carry >= 0, last[rows], tokens)

    def _sample_batch(self, s: SampleTable) -> SampleBatch:
        hot = s.temperature > 0
        put = self._put_all(
            {
                "temperature": s.temperature,
                "top_k": s.top_k,
                "top_p": s.top_p,
                "min_p": s.min_p,
                "presence_penalty": s.presence_penalty,
                "frequency_penalty": s.frequency_penalty,
                "repetition_penalty": s.repetition_penalty,
                "uniform": uniforms(s.seed, s.token_index) if hot.any() else s.temperature,
                "state_row": s.state_row,
                "mask_row": s.mask_row,
                "bias_row": s.bias_row,
                "bias_token": s.bias_token,
                "bias_value": s.bias_value,
                "seen_row": s.seen_row,
                "seen_token": s.seen_token,
            }
        )
        filtered = hot & ((s.top_k > 0) | (s.top_p < 1) | (s.min_p > 0))
        return SampleBatch(
            **put,
            penalised=bool((s.state_row >= 0).any()),
            filtered=bool(filtered.any()),
            greedy=not hot.any(),
        )

    def _verify(self, table: SampleTable, ids: Tensor) -> Tensor | None:
        """Which rows are accepted; None without drafts: all are."""
        if not (table.parent >= 0).any():
            return None
        put = self._put_all(
            {"parent": table.parent, "draft_token": table.draft_token, "depth": table.depth}
        )
        return self.ops.verify(ids, put["parent"], put["draft_token"], put["depth"])

    def _compact(self, step: Step, accepted: Tensor) -> None:
        """Move the KV of each tree's accepted path to where a chain would have put it."""
        t, s = step.table, step.sample
        drafts = np.flatnonzero(s.depth > 0)
        row = t.logit_rows[drafts]
        chunk = t.seq_of[row]
        target = (t.q_start[1:] - t.num_draft)[chunk] + s.depth[drafts] - 1
        kept = accepted[self._put(drafts)]
        src = self._put(t.slots[row])[kept]
        dst = self._put(t.slots[target])[kept]
        self.kv = self.ops.move_slots(self.kv, src, dst)

    # Token counts for penalties

    def _reset(self, reset: StateReset) -> None:
        state = self._state_with(int(reset.rows.max()) + 1)
        rows = self._put(reset.rows).long()
        tokens = self._put(reset.tokens).long()
        owner = torch.repeat_interleave(rows, self._put(np.diff(reset.start)).long())
        at = np.arange(len(reset.tokens))
        first_output = np.repeat(reset.output, np.diff(reset.start))
        is_output = self._put(at >= first_output)
        state.in_prompt[rows] = False
        state.count[rows] = 0
        state.in_prompt[owner[~is_output], tokens[~is_output]] = True
        one = torch.ones((), dtype=torch.int32, device=self._device)
        state.count.index_put_((owner[is_output], tokens[is_output]), one, accumulate=True)

    def _state_with(self, num_rows: int) -> SamplerState:
        """The state with at least `num_rows` rows: it grows with the first penalties asked for."""
        have = 0 if self._state is None else self._state.count.shape[0]
        if have >= num_rows and self._state is not None:
            return self._state
        rows = min(max(num_rows, 2 * have, 8), self._max_num_seqs)
        shape = (rows, self.model.vocab_size)
        in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
        count = torch.zeros(shape, dtype=torch.int32, device=self._device)
        if self._state is not None:
            in_prompt[:have], count[:have] = self._state.in_prompt, self._state.count
        self._state = SamplerState(in_prompt, count)
        return self._state

    def _count(self, table: SampleTable, ids: Tensor, accepted: Tensor | None) -> None:
        """Add accepted tokens (None: all) to the counts of their sequences."""
        if self._state is None or not (table.state_row >= 0).any():
            return
        row = self._put(table.state_row).long()
        counts = row >= 0
        if accepted is not None:
            counts &= accepted
        one = torch.ones((), dtype=torch.int32, device=self._device)
        self._state.count.index_put_((row[counts], ids[counts]), one, accumulate=True)

    def _prompt_logprobs(self, step: Step, hidden: Tensor) -> LogprobRows | None:
        n = len(step.prompt_rows)
        if n == 0:
            return None
        scored = []
        for start in range(0, n, PROMPT_LOGPROB_ROWS):
            rows = self._put(step.prompt_rows[start : start + PROMPT_LOGPROB_ROWS])
            ids = self._put(step.prompt_targets[start : start + PROMPT_LOGPROB_ROWS])
            scored.append(
                logprobs_of(self._logits(_taken(hidden, rows)), ids, step.num_prompt_logprobs)
            )
        return _joined(scored)


def _taken(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], without the threads that x[rows] wakes for any number, and that spin for 7 ms."""
    return x.index_select(0, rows)


def _numpy(x: Tensor) -> np.ndarray:
    return x.cpu().numpy()


def _joined(parts: list[tuple[Tensor, Tensor, Tensor, Tensor]]) -> LogprobRows:
    chosen, top_ids, top, rank = (_numpy(torch.cat(x)) for x in zip(*parts, strict=True))
    return LogprobRows(chosen=chosen, top_ids=top_ids, top=top, rank=rank)


def _finite(step: Step, hidden: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[S] the hidden state of the chunk's last token, those of prompt tokens that are scored, and
    every logit row are finite. Nobody sees others, and what they left in the cache the last sees.

    hidden  [T], or [S] of the last tokens
    """
    start = step.table.q_start
    if len(hidden) != start[-1]:
        finite = hidden.copy()
    elif len(step.prompt_rows):
        finite = np.logical_and.reduceat(hidden, start[:-1])
    else:
        finite = hidden[start[1:] - 1]
    if not rows.all():
        bad = step.table.seq_of[step.table.logit_rows[~rows]]
        finite[bad] = False
    return finite
