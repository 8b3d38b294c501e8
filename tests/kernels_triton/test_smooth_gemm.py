import itertools

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels_triton.exact import assert_near, in_double
from xylite.errors import ConfigError
from xylite.kernels_triton import launch, weights
from xylite.kernels_triton.smooth_gemm import serpentine
from xylite.ops import reference

# Around the interpreter's tiles of 32 x 64 x 64: one row, ragged everywhere, exact, several tiles.
SHAPES = [(1, 64, 64), (31, 70, 100), (33, 128, 192), (70, 2, 40), (96, 128, 64)]
TYPES = [torch.float32, torch.float16]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=g).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_smooth_gemm_equals_the_reference(target, m, n, k, dtype):
    x, w = random(m, k, dtype=dtype), random(n, k, dtype=dtype)
    size = in_double(reference.linear, x.abs(), w.abs())
    assert_near(launch.linear(target, x, weights.pack(w)), in_double(reference.linear, x, w), size)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_smooth_gemm_adds_bias_and_residual_after_the_cap(target, m, n, k, dtype):
    x, w, bias, residual = (random(*s, dtype=dtype) for s in ((m, k), (n, k), (n,), (m, n)))
    exact = in_double(reference.linear, x, w, bias, residual=residual, cap=5.0)
    size = in_double(reference.linear, x.abs(), w.abs(), bias.abs(), residual=residual.abs())
    actual = launch.linear(target, x, weights.pack(w), bias, residual=residual, cap=5.0)
    assert_near(actual, exact, size)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_smooth_gemm_pairs_gate_and_up_rows(target, m, n, k, act, dtype):
    x, w, bias = random(m, k, dtype=dtype), random(n, k, dtype=dtype), random(n, dtype=dtype)
    exact = in_double(reference.linear, x, w, bias, act=act)
    gate, up = in_double(reference.linear, x.abs(), w.abs(), bias.abs()).chunk(2, 1)
    actual = launch.linear(target, x, weights.pack(w, gated=True), bias, act=act)
    # act'(g) <= 1.13: an error of the gate's sum is multiplied by up, and the other way round.
    assert_near(actual, exact, 2 * gate * up)


def packed(form: str, n: int, k: int) -> weights.PackedWeight:
    w = random(n, k)
    if form == "int4":
        return weights.quantise_int4(w, 32 if k % 64 else 64)
    return weights.quantise_int8(w, activations=form == "w8a8")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize(
    "form, m, n, k", [(f, 33, 70, 96) for f in ("int8", "w8a8", "int4")] + [("int4", 5, 64, 128)]
)
def test_smooth_gemm_unpacks_each_weight_format(target, form, m, n, k, act, dtype):
    x, w, bias = random(m, k, dtype=dtype), packed(form, n, k), random(n, dtype=dtype)
    seen = x.double()
    if form == "w8a8":
        q, scale = launch.quantise(target, x)
        seen = q.double() * scale.double()[:, None]
    values = weights.unpack(w).double()
    if form == "int4":  # the kernel rounds the unpacked weight to the type of x
        values = weights.unpack(w).to(dtype).double()
    exact = reference.linear(seen, values, bias.double(), act=act)
    size = reference.linear(seen.abs(), values.abs(), bias.double().abs())
    if act:
        gate, up = size.chunk(2, 1)
        size = 2 * gate * up
    assert_near(launch.linear(target, x, w, bias, act=act), exact, size)


@pytest.mark.parametrize("dtype", TYPES)
def test_quantised_rows_are_nearest_to_their_values(target, dtype):
    x = random(9, 100, dtype=dtype)
    x[4] = 0
    q, scale = launch.quantise(target, x)
    assert scale[4] == 1 and not q[4].any()
    assert (q.abs().amax(1)[[0, 1, 2, 3, 5, 6, 7, 8]] == 127).all()
    back = q.double() * scale.double()[:, None]
    assert ((back - x.double()).abs() <= 0.501 * scale.double()[:, None]).all()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_values_survive_packing(group):
    g = torch.Generator().manual_seed(group)
    q = torch.randint(0, 16, (6, 3 * group), generator=g).float()
    scale, zero = torch.rand(6, 3, generator=g), torch.randint(0, 16, (6, 3), generator=g).float()
    values = (q.unflatten(1, (3, group)) - zero[..., None]) * scale[..., None]
    assert torch.equal(weights.unpack(weights.pack_int4(q, scale, zero)), values.flatten(1))


@pytest.mark.parametrize("group", [16, 48, 100])
def test_int4_refuses_groups_its_kernel_cannot_take(group):
    with pytest.raises(ConfigError, match=f"K=192: {group}"):
        weights.quantise_int4(random(4, 192), group)


@pytest.mark.parametrize("form", ["int8", "w8a8", "int4"])
@pytest.mark.parametrize("k", [96, 128, 320])
def test_every_packer_makes_a_leaf_that_smooth_gemm_takes(target, form, k):
    w = random(10, k)
    leaf = weights.packers()[form](w, gated=True)
    assert leaf.format == form and (leaf.num_rows, leaf.num_cols) == (10, k)
    step = leaf.scale.max() * (1.01 if form == "int4" else 0.51)
    assert (weights.unpack(leaf) - w).abs().max() <= step
    assert launch.linear(target, random(3, k), leaf, act="silu").isfinite().all()


@pytest.mark.parametrize("told", [0, 1, 31, 40])
@pytest.mark.parametrize("form", ["", "w8a8"])
def test_smooth_gemm_touches_only_the_rows_that_exist(limited, told, form):
    x, w = random(70, 64), random(70, 64)
    x[told:] = torch.nan  # of rows beyond the end nothing may be used
    leaf = weights.pack(w) if form == "" else weights.quantise_int8(w, activations=True)
    out = launch.linear(limited(told), x, leaf)
    assert out[told:].isnan().all()
    assert out[:told].isfinite().all()


def test_smooth_gemm_of_no_rows_is_empty(target):
    assert launch.linear(target, torch.zeros(0, 64), weights.pack(random(5, 64))).shape == (0, 5)


def test_smooth_gemm_names_the_widths_that_do_not_fit(target):
    with pytest.raises(ConfigError, match="x has 63 columns, the weight 64"):
        launch.linear(target, torch.zeros(2, 63), weights.pack(random(5, 64)))


def test_smooth_gemm_keeps_nan_visible(target):
    x = random(4, 64)
    x[2, 3] = torch.nan
    for options in ({}, {"cap": 5.0}, {"act": "silu"}):
        out = launch.linear(target, x, weights.pack(random(8, 64)), **options)
        assert out[2].isnan().all()
        assert out[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_smooth_gemm_survives_extreme_gates(target, act):
    x = torch.tensor([[1e4], [-1e4], [0.0]])
    out = launch.linear(target, x, weights.pack(torch.ones(2, 1)), act=act)
    assert out[0] == 1e8 and out[2] == 0 and abs(out[1]) < 1e-20


@triton.jit
def record_walk(p_out, tiles_m, tiles_n, BAND: tl.constexpr):
    for i in range(tiles_m * tiles_n):
        i_m, i_n = serpentine(i, tiles_m, tiles_n, BAND)
        tl.store(p_out + 2 * i, i_m)
        tl.store(p_out + 2 * i + 1, i_n)


@pytest.mark.parametrize("band", [1, 2, 3, 8])
def test_serpentine_visits_every_tile_once_and_moves_to_neighbours(band):
    for tiles_m, tiles_n in itertools.product((1, 2, 5, 9), (1, 4, 7)):
        out = torch.zeros(tiles_m * tiles_n, 2, dtype=torch.int32)
        record_walk[(1,)](out, tiles_m, tiles_n, BAND=band)
        walk = [(m, n) for m, n in out.tolist()]
        assert sorted(walk) == list(itertools.product(range(tiles_m), range(tiles_n)))
        # From band to band the column, and with it the weight tile, stays.
        for (m0, n0), (m1, n1) in itertools.pairwise(walk):
            assert n0 == n1 or (abs(n0 - n1) == 1 and m0 // band == m1 // band)
