from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels_triton.exact import assert_near, in_double
from xylite.kernels_triton import launch
from xylite.ops import DenseKV, reference

TYPES = [torch.float32, torch.float16]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=g).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("with_residual", [True, False])
# One pass, exact and ragged; two passes over rows longer than the tile.
@pytest.mark.parametrize("rows, width", [(1, 64), (7, 100), (2, 8192), (3, 8300)])
def test_add_rms_norm_equals_the_reference(target, rows, width, with_residual, dtype):
    x, w = random(rows, width, dtype=dtype), random(width, dtype=dtype)
    residual = random(rows, width + 1, dtype=dtype)[:, :width] if with_residual else None
    out, total = launch.add_rms_norm(target, x, residual, w, 1e-5)
    exact, exact_total = in_double(reference.add_rms_norm, x, residual, w, 1e-5)
    assert_near(out, exact)
    assert_near(total, exact_total)


def test_add_rms_norm_of_large_and_tiny_rows_stays_finite(target):
    x = torch.stack([torch.full((64,), 1e15), torch.full((64,), 1e-15), torch.zeros(64)])
    out, _ = launch.add_rms_norm(target, x, None, torch.ones(64), 1e-6)
    exact, _ = in_double(reference.add_rms_norm, x, None, torch.ones(64), 1e-6)
    assert_near(out, exact)


def test_add_rms_norm_touches_only_the_rows_that_exist(limited):
    x = random(6, 64)
    out, total = launch.add_rms_norm(limited(4), x, x, random(64), 1e-6)
    assert out[:4].isfinite().all() and total[:4].isfinite().all()
    assert out[4:].isnan().all() and total[4:].isnan().all()


def rope_table(positions: int, rot: int) -> Tensor:
    angle = torch.arange(positions)[:, None] / 10000 ** (torch.arange(rot // 2) * 2 / max(rot, 1))
    return torch.stack((angle.cos(), angle.sin()), 1)


# Every group size that models use, partial rotation, head sizes that are no powers of two.
HEADS = [
    (6, 2, 64, 64), (7, 1, 20, 12), (9, 3, 16, 16), (8, 8, 24, 8), (32, 4, 16, 16), (14, 2, 80, 80),
    (12, 6, 96, 24), (2, 2, 8, 6),
]  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("normed", ["", "q", "k", "qk"])
@pytest.mark.parametrize("h, g, d, rot", HEADS)
def test_rope_and_append_equal_the_reference(target, h, g, d, rot, normed, dtype):
    t, n, p = 5, 3, 16
    qkv = random(t, (h + 2 * g) * d, dtype=dtype)
    positions = torch.tensor([0, 7, 8, 3, 49], dtype=torch.int32)
    slots = torch.tensor([47, 0, 15, 16, 33], dtype=torch.int32)
    norms = {f"{x}_norm": random(d + ord(x), dtype=dtype)[:d] for x in normed}
    kv = DenseKV(*(torch.full((n, g, p, d), torch.nan, dtype=dtype) for _ in range(2)))
    q, kv = launch.qk_norm_rope_append(
        target, qkv, positions, rope_table(50, rot), kv, slots, eps=1e-5, **norms
    )
    pool = DenseKV(*(torch.full((n, g, p, d), torch.nan).double() for _ in range(2)))
    exact_q, exact = in_double(
        reference.qk_norm_rope_append,
        qkv, positions, rope_table(50, rot), pool, slots, eps=1e-5, **norms,
    )  # fmt: skip
    # The sum of two turned halves may cancel: its error is that of its terms.
    assert_near(q, exact_q, exact_q.abs() + 4 * exact_q.abs().amax())
    for written, wanted in ((kv.k, exact.k), (kv.v, exact.v)):
        assert torch.equal(written.isnan(), wanted.isnan())
        there = wanted[~wanted.isnan()]
        assert_near(written[~written.isnan()], there, there.abs() + 4 * there.abs().amax())


def int8_pool(n: int, g: int, p: int, d: int) -> DenseKV:
    """Blocks whose every slot shows whether it was written."""
    k, v = (torch.full((n, g, p, d), 77, dtype=torch.int8) for _ in "kv")
    k_scale, v_scale = (torch.full((n, g, p), torch.nan) for _ in "kv")
    return DenseKV(k, v, k_scale, v_scale)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("h, g, d, rot", HEADS)
def test_append_to_int8_equals_the_reference_but_for_ties(target, h, g, d, rot, dtype):
    t, n, p = 5, 3, 16
    qkv = random(t, (h + 2 * g) * d, dtype=dtype)
    qkv[3] = 0
    positions = torch.tensor([0, 7, 8, 3, 49], dtype=torch.int32)
    slots = torch.tensor([47, 0, 15, 16, 33], dtype=torch.int32)
    norms = {f"{x}_norm": random(d + ord(x), dtype=dtype)[:d] for x in "qk"}
    kv, exact = int8_pool(n, g, p, d), int8_pool(n, g, p, d)
    rope = rope_table(50, rot)
    q, kv = launch.qk_norm_rope_append(target, qkv, positions, rope, kv, slots, **norms)
    exact_q, exact = in_double(
        reference.qk_norm_rope_append, qkv, positions, rope, exact, slots, **norms
    )
    assert_near(q, exact_q, exact_q.abs() + 4 * exact_q.abs().amax())
    for mine, theirs in ((kv.k, exact.k), (kv.v, exact.v)):
        off = (mine.int() - theirs.int()).abs()
        # Rounding differs where a value lies between two steps as far as float32 can tell.
        assert off.max() <= 1 and (off > 0).float().mean() < 0.01
    for mine, theirs in ((kv.k_scale, exact.k_scale), (kv.v_scale, exact.v_scale)):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-5, atol=0, equal_nan=True)
        assert mine.isnan().sum() == (n * p - t) * g
        assert (mine[1, :, 0] == 1).all()  # the token of zeros
    assert (kv.k.transpose(1, 2).reshape(n * p, -1)[1] == 77).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_stay_visible_in_int8(target, bad):
    qkv = random(2, 6 * 16)
    qkv[0, 4 * 16 + 3] = bad  # of v
    qkv[0, 2 * 16 + 5] = bad  # of k
    slots = torch.tensor([0, 1], dtype=torch.int32)
    for run in (lambda *a: launch.qk_norm_rope_append(target, *a), reference.qk_norm_rope_append):
        _, kv = run(qkv, slots, rope_table(8, 16), int8_pool(1, 2, 16, 16), slots)
        for values, scale in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)):
            back = values * scale[..., None]
            assert not back[0, 0, 0].isfinite().any()
            assert back[0, 1, 0].isfinite().all() and back[0, :, 1].isfinite().all()


def test_rope_and_append_walk_kv_heads_in_passes(target):
    """As many passes as the tile row asks for give the same q, k and v."""
    small = target.tiles.vector("rope", "float")
    small = replace(small, sizes={"TILE": 64})
    narrow = replace(target, tiles=replace(target.tiles, rows=(small, *target.tiles.rows)))
    assert launch.rope_tiles(small, 6, 3, 16, 16)["TILE_G"] == 4
    assert launch.rope_tiles(small, 12, 3, 32, 32)["TILE_G"] == 1
    results = []
    for one in (target, narrow):
        kv = DenseKV(torch.zeros(1, 3, 16, 32), torch.zeros(1, 3, 16, 32))
        q, kv = launch.qk_norm_rope_append(
            one, random(4, 18 * 32), torch.arange(4).int(), rope_table(8, 32), kv,
            torch.arange(4).int(),
        )  # fmt: skip
        results.append((q, kv.k, kv.v))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_rope_and_append_touch_only_the_rows_that_exist(limited):
    kv = DenseKV(torch.full((1, 2, 16, 16), torch.nan), torch.full((1, 2, 16, 16), torch.nan))
    slots = torch.arange(6).int()
    q, kv = launch.qk_norm_rope_append(
        limited(4), random(6, 6 * 16), slots, rope_table(8, 16), kv, slots
    )
    assert q[:, :4].isfinite().all() and q[:, 4:].isnan().all()
    for pool in (kv.k, kv.v):
        assert pool[:, :, :4].isfinite().all() and pool[:, :, 4:].isnan().all()


def test_ops_of_no_rows_are_empty(target):
    kv = DenseKV(torch.zeros(1, 2, 16, 16), torch.zeros(1, 2, 16, 16))
    none = torch.zeros(0, dtype=torch.int32)
    q, same = launch.qk_norm_rope_append(
        target, torch.zeros(0, 8 * 16), none, rope_table(8, 16), kv, none
    )
    assert q.shape == (2, 0, 16) and same is kv
    out, total = launch.add_rms_norm(target, torch.zeros(0, 8), None, torch.ones(8), 1e-6)
    assert out.shape == total.shape == (0, 8)
