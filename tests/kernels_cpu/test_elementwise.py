"""Norms, rotary append, KV moves, gated activations and argmax against the reference."""

import pytest
import torch
from torch import Tensor

from xylite.ops import DenseKV, Ops, SampleBatch, reference


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [1, 7, 64, 576, 577])
def test_add_rms_norm(ops: Ops, width: int) -> None:
    w = some(width, seed=1)
    for rows in (0, 1, 3, 50):
        x, residual = some(rows, width) * 3, some(rows, width, seed=2)
        for add in (None, residual):
            got = ops.add_rms_norm(x, add, w, 1e-5)
            wide = None if add is None else add.double()
            want = reference.add_rms_norm(x.double(), wide, w.double(), 1e-5)
            assert torch.equal(got[1], x if add is None else x + add)
            # one rounding each of the square sum, the root and two products
            torch.testing.assert_close(got[0].double(), want[0], rtol=2e-6, atol=1e-6)


def test_add_rms_norm_does_not_depend_on_the_batch(ops: Ops) -> None:
    x, w = some(60, 576), some(576)
    whole = ops.add_rms_norm(x, None, w, 1e-5)[0]
    assert all(torch.equal(ops.add_rms_norm(x[i : i + 1], None, w, 1e-5)[0][0], whole[i])
               for i in range(60))  # fmt: skip


def table_of_turns(length: int, rot: int) -> Tensor:
    angle = torch.arange(length)[:, None] / 100 ** (torch.arange(0, rot, 2) / max(rot, 1))
    return torch.stack((angle.cos(), angle.sin()), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "rot", "norm"), [(64, 64, False), (96, 20, True), (32, 0, True)])
def test_rope_append_turns_heads_and_fills_the_slots(
    ops: Ops, dim: int, rot: int, norm: bool, dtype: torch.dtype
) -> None:
    num_kv, group, size = 2, 3, 64
    q_norm, k_norm = (some(dim, seed=7), some(dim, seed=8)) if norm else (None, None)
    rope = table_of_turns(300, rot)
    for tokens in (0, 1, 2, 5, 33):
        qkv = some(tokens, (num_kv * group + 2 * num_kv) * dim)
        order = torch.randperm(4 * size, generator=torch.manual_seed(1))[:tokens].int()
        positions = (torch.arange(tokens) * 7 % 300).int()
        mine = DenseKV(*(torch.zeros(4, num_kv, size, dim, dtype=dtype) for _ in "kv"))
        theirs = DenseKV(*(torch.zeros(4, num_kv, size, dim, dtype=dtype) for _ in "kv"))
        q, mine = ops.qk_norm_rope_append(
            qkv, positions, rope, mine, order, q_norm=q_norm, k_norm=k_norm, eps=1e-5
        )
        want, theirs = reference.qk_norm_rope_append(
            qkv, positions, rope, theirs, order, q_norm=q_norm, k_norm=k_norm, eps=1e-5
        )
        # bf16: a value next to a rounding edge may fall on its other side
        close = {"rtol": 2.0**-7, "atol": 1e-6} if dtype != torch.float32 else \
            {"rtol": 3e-6, "atol": 2e-6}  # fmt: skip
        torch.testing.assert_close(q.float(), want, rtol=2.0**-7, atol=1e-6)
        lane = 2 if dtype == torch.bfloat16 else 1
        k = mine.k.view(4, num_kv, dim // lane, size, lane).transpose(2, 3).flatten(3)
        v = mine.v.view(4, num_kv, size // lane, dim, lane).transpose(3, 4).flatten(2, 3)
        torch.testing.assert_close(k.float(), theirs.k.float(), **close)
        assert torch.equal(v, theirs.v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "rot", "norm"), [(64, 64, False), (96, 20, True)])
def test_rope_append_of_many_tokens_is_that_of_each(
    ops: Ops, dim: int, rot: int, norm: bool, dtype: torch.dtype
) -> None:
    """Rows in neighbouring slots are written together, wherever in a block they begin."""
    num_kv, group, size, tokens = 2, 3, 64, 150
    q_norm, k_norm = (some(dim, seed=7), some(dim, seed=8)) if norm else (None, None)
    rope, qkv = table_of_turns(300, rot), some(tokens, (num_kv * group + 2 * num_kv) * dim)
    positions = torch.arange(tokens).int()

    def run(rows: slice, slots: Tensor, kv: DenseKV) -> Tensor:
        q, _ = ops.qk_norm_rope_append(
            qkv[rows], positions[rows], rope, kv, slots[rows],
            q_norm=q_norm, k_norm=k_norm, eps=1e-5,
        )  # fmt: skip
        return q.view(num_kv, -1, group, dim)

    for first, gaps in ((0, ()), (9, ()), (64, (3, 40, 41, 99))):
        slots = (first + torch.arange(tokens)).int()
        slots[list(gaps)] = -1
        whole = DenseKV(*(torch.zeros(4, num_kv, size, dim, dtype=dtype) for _ in "kv"))
        single = DenseKV(*(torch.zeros(4, num_kv, size, dim, dtype=dtype) for _ in "kv"))
        q = run(slice(None), slots, whole)
        each = [run(slice(t, t + 1), slots, single) for t in range(tokens)]
        assert torch.equal(q, torch.cat(each, 1))
        assert torch.equal(whole.k, single.k)
        assert torch.equal(whole.v, single.v)
        assert whole.k.count_nonzero() == (tokens - len(gaps)) * num_kv * dim


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_move_slots_reads_all_before_it_writes_any(ops: Ops, dtype: torch.dtype) -> None:
    num_kv, size, dim = 2, 32, 32
    rope = torch.zeros(1, 2, 0)
    qkv = some(6, 3 * num_kv * dim).to(dtype).float()
    zero = torch.zeros(6, dtype=torch.int32)

    def written(slots: list[int], rows: list[int]) -> DenseKV:
        kv = DenseKV(*(torch.zeros(3, num_kv, size, dim, dtype=dtype) for _ in "kv"))
        at = torch.tensor(slots, dtype=torch.int32)
        return ops.qk_norm_rope_append(qkv[rows], zero[: len(rows)], rope, kv, at)[1]

    start = written([0, 1, 40, 95], [0, 1, 2, 3])
    src, dst = torch.tensor([0, 1, 40]), torch.tensor([1, 40, 7])
    (moved,) = ops.move_slots((start,), src, dst)
    want = written([0, 1, 40, 7, 95], [0, 0, 1, 2, 3])
    assert torch.equal(moved.k, want.k)
    assert torch.equal(moved.v, want.v)


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_gated_act(ops: Ops, act: str) -> None:
    for rows, inner in ((0, 4), (1, 7), (3, 96), (40, 33)):
        x = some(rows, 2 * inner) * 8
        got = ops.gated_act(x, act)  # pyright: ignore[reportArgumentType]
        want = reference.gated_act(x.double(), act)  # pyright: ignore[reportArgumentType]
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_gated_act_of_extreme_values(ops: Ops, act: str) -> None:
    gate = torch.tensor([-torch.inf, -200.0, -88.0, -1e-3, 0.0, 88.0, 200.0, torch.nan])
    x = torch.cat((gate.repeat(3), torch.ones(24)))[None]
    got = ops.gated_act(x, act)[0, :8]  # pyright: ignore[reportArgumentType]
    want = reference.gated_act(x.double(), act)[0, :8]  # pyright: ignore[reportArgumentType]
    # silu and gelu of -inf are NaN by their formulas too; what counts is that it is not hidden
    finite = gate.isfinite()
    torch.testing.assert_close(got[finite].double(), want[finite], rtol=3e-6, atol=1e-6)
    assert bool(got[-1].isnan())


def greedy(rows: int) -> SampleBatch:
    zeros = torch.zeros(rows)
    none = torch.zeros(0, dtype=torch.int32)
    ints = torch.full((rows,), -1, dtype=torch.int32)
    return SampleBatch(
        temperature=zeros, top_k=ints, top_p=zeros + 1, min_p=zeros, presence_penalty=zeros,
        frequency_penalty=zeros, repetition_penalty=zeros + 1, uniform=zeros, state_row=ints,
        mask_row=ints, bias_row=none, bias_token=none, bias_value=torch.zeros(0), seen_row=none,
        seen_token=none, penalised=False, filtered=False, greedy=True,
    )  # fmt: skip


def test_greedy_rows_take_the_first_largest(ops: Ops) -> None:
    for rows in (0, 1, 2, 9):
        for width in (1, 5, 16, 1003):
            logits = (some(rows, width + 3) * 4).round()[:, :width]  # rows apart, many ties
            want = logits.argmax(-1)
            assert torch.equal(ops.sample(logits, greedy(rows), None, None), want)
    bad = torch.tensor([[1.0, torch.nan, 3.0], [-torch.inf] * 3])
    assert ops.sample(bad, greedy(2), None, None).tolist() == [1, 0]
