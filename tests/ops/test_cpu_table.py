"""The CPU's table as a whole: a small model on it and on the reference, in any schedule."""

import dataclasses
import itertools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels_cpu.tables import Chunk, batch_of, make, names, tasks_of, token_table
from xylite import models, tree
from xylite.errors import ConfigError
from xylite.kernels_cpu import build
from xylite.kernels_cpu.library import ThreadsError
from xylite.models import layers, weights
from xylite.ops import Batch, DenseKV, KVCache, Ops, cpu, reference
from xylite.runtime.step import TokenTable

CONFIG = {
    "model_type": "llama",
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 112,
    "vocab_size": 201,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
SIZE = 64
TOKENS = 140


class Run:
    """A model on a table, one sequence, computed in chunks of any length."""

    def __init__(self, ops: Ops, dtype: torch.dtype, config: Mapping[str, Any] = CONFIG):
        self.ops = ops
        self.family, self.spec = models.describe(config)
        self.params: Any = weights.random_params(self.spec, self.family, ops, dtype)
        self.kv = layers.make_kv(self.spec, 8, SIZE, dtype=dtype, device=torch.device("cpu"))

    def logits(self, cuts: list[int], neighbours: int = 0) -> Tensor:
        """[TOKENS, V] of the sequence cut at `cuts`, with others in the same iterations."""
        ids = torch.randint(0, 201, (TOKENS,), generator=torch.manual_seed(1)).int()
        edges = [0, *cuts, TOKENS]
        out = []
        for start, end in itertools.pairwise(edges):
            batch = self.batch(start, end - start, neighbours)
            tokens = torch.cat((ids[start:end], ids[:neighbours]))
            batch = dataclasses.replace(batch, tokens=tokens)
            hidden, self.kv = self.hidden(self.kv, batch)
            rows = self.family.logits(self.params, hidden, self.spec, self.ops)
            out.append(rows[: end - start])
        return torch.cat(out)

    def hidden(self, kv: KVCache, batch: Batch) -> tuple[Tensor, KVCache]:
        return self.family.forward(self.params, kv, batch, self.spec, self.ops)

    def batch(self, past: int, tokens: int, neighbours: int) -> Batch:
        chunks = [Chunk(past, tokens), *(Chunk(0, 1) for _ in range(neighbours))]
        table: TokenTable = token_table(chunks, SIZE)
        # The sequence keeps its blocks 0 to 2; each neighbour has one of its own.
        table.block_table[0] = 0
        width = -(-(past + tokens) // SIZE)
        table.block_table[0, :width] = range(width)
        place = torch.arange(past, past + tokens).numpy()
        table.slots[:tokens] = place
        for i in range(neighbours):
            table.block_table[1 + i, 0] = 3 + i
            table.slots[tokens + i] = (3 + i) * SIZE
        if not self.ops.device.tile_classes:
            return _without_tasks(table)
        heads = (self.spec.num_kv_heads, self.spec.group)
        return batch_of(table, tasks_of(self.ops, table, heads, 0, SIZE, 2))


def _without_tasks(table: TokenTable) -> Batch:
    fields = [f.name for f in dataclasses.fields(Batch) if f.name not in ("tasks", "num_last")]
    return Batch(**{n: torch.from_numpy(getattr(table, n)) for n in fields})


SCHEDULES = ([], [1], [64], [7, 63, 64, 65, 100], list(range(1, TOKENS)))


@pytest.fixture(params=names())
def ops(request: pytest.FixtureRequest) -> Ops:
    return make(request.param)


def test_a_float32_model_agrees_with_the_reference(ops: Ops) -> None:
    mine = Run(ops, torch.float32).logits([])
    want = Run(reference.TABLE, torch.float32).logits([])
    torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-4)
    assert torch.equal(mine.argmax(-1), want.argmax(-1))


def test_a_bf16_model_is_at_least_as_near_to_float32_as_bf16_arithmetic(ops: Ops) -> None:
    """The weights are the same, so float32 arithmetic on them is the truth."""
    truth_ops = dataclasses.replace(
        reference.TABLE,
        pack_linear=lambda w, gated=False: w.float(),
        act_dtype=lambda dtype: torch.float32,
    )
    run = Run(truth_ops, torch.bfloat16)
    run.kv = layers.make_kv(run.spec, 8, SIZE, dtype=torch.float32, device=torch.device("cpu"))
    truth = run.logits([])
    mine = (Run(ops, torch.bfloat16).logits([]) - truth).square().mean()
    plain = (Run(reference.TABLE, torch.bfloat16).logits([]) - truth).square().mean()
    assert mine <= plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_schedule_gives_the_same_bits(ops: Ops, dtype: torch.dtype) -> None:
    whole = Run(ops, dtype).logits([])
    for cuts in SCHEDULES[1:4]:
        for neighbours in (0, 3):
            assert torch.equal(Run(ops, dtype).logits(cuts, neighbours), whole)


def test_token_by_token_gives_the_same_bits_in_int8_too(ops: Ops) -> None:
    quantised = dataclasses.replace(ops, pack_linear=ops.packers["int8"])
    whole = Run(quantised, torch.bfloat16).logits([])
    assert torch.equal(Run(quantised, torch.bfloat16).logits(SCHEDULES[-1]), whole)


def test_without_a_compiler_torch_does_the_work_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(isa: str, cache: Any) -> None:
        raise build.BuildError("no C++ compiler found (c++, g++ or clang++)")

    monkeypatch.setattr(build, "library", fail)
    with caplog.at_level(logging.WARNING):
        ops = cpu.table(0)
    assert "no C++ compiler found" in caplog.text
    assert cpu.available() is None
    assert ops.name == "cpu"
    assert torch.equal(
        Run(ops, torch.float32).logits([]), Run(reference.TABLE, torch.float32).logits([])
    )


def test_a_library_that_the_system_does_not_load_leaves_the_torch_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "kernels.so"
    broken.write_text("no library")
    monkeypatch.setattr(build, "library", lambda isa, cache: broken)
    assert cpu.table(0).linear is reference.TABLE.linear
    assert str(broken) in caplog.text


def test_too_many_threads_are_refused_by_the_setting_s_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(path: Path, threads: int) -> None:
        raise ThreadsError(f"the system does not give {threads} threads to the CPU kernels")

    monkeypatch.setattr(cpu, "Kernels", fail)
    with pytest.raises(ConfigError, match=r"does not give \d+ threads .* num_threads") as e:
        cpu.table(0)
    assert e.value.param == "num_threads"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_whole_blocks_are_copied_and_cleared_as_the_reference_does(ops: Ops, dtype: torch.dtype):
    def pool() -> KVCache:
        generator = torch.manual_seed(3)
        leaves = torch.randn(4, 6, 2, SIZE, 32, generator=generator).to(dtype)
        return (DenseKV(leaves[0], leaves[1]), DenseKV(leaves[2], leaves[3]))

    src, dst = torch.tensor([1, 2, 5]).int(), torch.tensor([2, 1, 0]).int()
    made = ops.copy_blocks(pool(), src, dst)
    right = reference.copy_blocks(pool(), src, dst)
    assert all(map(torch.equal, tree.leaves(made), tree.leaves(right)))
    made = ops.zero_blocks(made, dst)
    right = reference.zero_blocks(right, dst)
    assert all(map(torch.equal, tree.leaves(made), tree.leaves(right)))


def test_there_is_one_cpu() -> None:
    with pytest.raises(ConfigError, match="cpu:1"):
        cpu.table(1)


def test_every_op_of_a_step_is_our_own() -> None:
    ops = cpu.table(0)
    own = ("pack_linear", "embed", "linear", "add_rms_norm", "qk_norm_rope_append", "attention",
           "gated_act", "grouped_linear", "sample", "move_slots",
           "copy_blocks", "zero_blocks")  # fmt: skip
    assert all(getattr(ops, n) is not getattr(reference.TABLE, n) for n in own)
    assert ops.device.block_size % ops.device.block_multiple == 0
