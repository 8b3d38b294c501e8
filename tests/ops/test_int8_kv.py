"""KV in int8 on the reference table: what is stored, what attention makes of it, its memory."""

import pytest
import torch

from tests.models import tiny
from xylite import models, tree
from xylite.models import layers
from xylite.ops import AttentionKind, Batch, DenseKV, reference

N, G, P, D = 4, 2, 8, 16
CPU = torch.device("cpu")


def written(dtype: torch.dtype) -> tuple[DenseKV, DenseKV]:
    """The same 20 tokens in blocks 1, 2, 3: as float64, and as int8."""
    g = torch.Generator().manual_seed(1)
    qkv = torch.randn(20, 8 * D, generator=g, dtype=dtype)
    positions = torch.arange(20, dtype=torch.int32)
    rope = torch.stack((torch.ones(20, D // 2), torch.zeros(20, D // 2)), 1)
    plain = DenseKV(*(torch.zeros(N, G, P, D, dtype=torch.float64) for _ in "kv"))
    packed = DenseKV(
        *(torch.zeros(N, G, P, D, dtype=torch.int8) for _ in "kv"),
        *(torch.zeros(N, G, P) for _ in "kv"),
    )
    for kv in (plain, packed):
        reference.qk_norm_rope_append(qkv, positions, rope, kv, positions + P)
    return plain, packed


def values(kv: DenseKV) -> DenseKV:
    """What an int8 cache stands for."""
    assert kv.k_scale is not None and kv.v_scale is not None
    k, v = (x.double() * s[..., None] for x, s in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)))
    return DenseKV(k, v)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_int8_is_within_half_a_step_of_what_was_given(dtype):
    plain, packed = written(dtype)
    back = values(packed)
    assert packed.k_scale is not None and packed.v_scale is not None
    for a, b, scale in ((plain.k, back.k, packed.k_scale), (plain.v, back.v, packed.v_scale)):
        assert ((a - b).abs() <= 0.5001 * scale[..., None]).all()
        step = a.abs().amax(-1) / 127
        assert torch.allclose(scale.double(), torch.where(step > 0, step, scale.double()))
    assert (packed.k.abs().amax(-1).view(-1)[G * P :].max()) == 127


def test_attention_over_int8_is_attention_over_what_it_stands_for():
    _, packed = written(torch.float64)
    i32 = torch.int32
    batch = Batch(
        tokens=torch.zeros(3, dtype=i32), positions=torch.arange(17, 20, dtype=i32),
        slots=torch.zeros(3, dtype=i32), seq_of=torch.zeros(3, dtype=i32),
        q_start=torch.tensor([0, 3], dtype=i32), kv_len=torch.tensor([20], dtype=i32),
        num_draft=torch.zeros(1, dtype=i32), bias_start=torch.full((1,), -1, dtype=i32),
        block_table=torch.tensor([[1, 2, 3]], dtype=i32),
        tree_mask=torch.zeros(0, dtype=torch.bool),
    )  # fmt: skip
    q = torch.randn(G, 3 * 2, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    kind = AttentionKind(index=0, scale=D**-0.5)
    out = reference.attention(q, packed, batch, kind)
    assert torch.equal(out, reference.attention(q, values(packed), batch, kind))


def test_moves_copies_and_zeros_take_the_scales_along():
    _, packed = written(torch.float32)
    before = values(packed)
    reference.move_slots((packed,), torch.tensor([P]), torch.tensor([0]))
    assert torch.equal(values(packed).k[0, :, 0], before.k[1, :, 0])
    reference.copy_blocks((packed,), torch.tensor([1]), torch.tensor([3]))
    assert torch.equal(values(packed).v[3], before.v[1])
    reference.zero_blocks((packed,), torch.tensor([2]))
    assert all((leaf[2] == 0).all() for leaf in tree.leaves(packed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_block_takes_the_bytes_that_are_accounted_for_it(dtype):
    _, spec = models.describe(tiny.CONFIG)
    cache = layers.make_kv(spec, 5, 16, dtype=dtype, device=CPU)
    assert len(cache) == spec.num_layers and len(tree.leaves(cache[0])) in (2, 4)
    stored = sum(leaf.nbytes for leaf in tree.leaves(cache))
    assert stored == 5 * layers.kv_block_bytes(spec, 16, dtype)
    assert all((leaf == 0).all() for leaf in tree.leaves(cache))
