import pytest
import torch
from torch import Tensor

from tests.kernels_triton.exact import assert_near, in_double
from xylite.kernels_triton import launch, weights
from xylite.kernels_triton.grouped_gemm import group_tasks
from xylite.ops import reference


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=g).to(dtype)


def experts_of(rows: int, experts: int, kind: str) -> Tensor:
    """Experts of rows: all one, all but some, or evenly, in mixed order."""
    g = torch.Generator().manual_seed(rows)
    of = torch.randint(0, experts, (rows,), generator=g)
    if kind == "one":
        of[:] = experts - 2
    if kind == "some idle":
        of[of % 2 == 0] = experts - 1
    return of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["one", "some idle", "even"])
@pytest.mark.parametrize("rows", [1, 31, 70])
def test_grouped_gemm_gives_each_row_its_experts_weight(target, rows, kind, dtype):
    x, w = random(rows, 64, dtype=dtype), random(5, 48, 64, dtype=dtype)
    of = experts_of(rows, 5, kind)
    exact = in_double(reference.grouped_linear, x, w, of)
    size = in_double(reference.grouped_linear, x.abs(), w.abs(), of)
    assert_near(launch.grouped_linear(target, x, weights.pack(w), of), exact, size)


def test_grouped_gemm_has_the_epilogues_of_the_plain_one(target):
    x, w, bias = random(40, 64), random(5, 48, 64), random(5, 48)
    of = experts_of(40, 5, "some idle")
    leaf = weights.pack(w)
    exact = in_double(reference.grouped_linear, x, w, of, bias, act="silu")
    gate, up = in_double(reference.grouped_linear, x.abs(), w.abs(), of, bias.abs()).chunk(2, 1)
    actual = launch.grouped_linear(target, x, leaf, of, bias, act="silu")
    assert_near(actual, exact, 2 * gate * up)
    residual = random(40, 48)
    exact = in_double(reference.grouped_linear, x, w, of, bias, residual=residual, cap=5.0)
    size = in_double(reference.grouped_linear, x.abs(), w.abs(), of, residual=residual.abs())
    actual = launch.grouped_linear(target, x, leaf, of, bias, residual=residual, cap=5.0)
    assert_near(actual, exact, size)


@pytest.mark.parametrize("form", ["int8", "w8a8", "int4"])
@pytest.mark.parametrize("act", [None, "silu"])
def test_grouped_gemm_finds_the_scales_of_each_expert(target, form, act):
    x, w, of = random(33, 64), random(5, 48, 64), experts_of(33, 5, "even")
    w *= torch.arange(1, 6)[:, None, None]
    leaf = (
        weights.quantise_int4(w, 32)
        if form == "int4"
        else weights.quantise_int8(w, activations=form == "w8a8")
    )
    seen = x.double()
    if form == "w8a8":
        q, scale = launch.quantise(target, x)
        seen = q.double() * scale.double()[:, None]
    values = weights.unpack(leaf).double()
    exact = reference.grouped_linear(seen, values, of, act=act)
    size = reference.grouped_linear(seen.abs(), values.abs(), of)
    if act:
        gate, up = size.chunk(2, 1)
        size = 2 * gate * up
    assert_near(launch.grouped_linear(target, x, leaf, of, act=act), exact, size)


def test_grouped_gemm_of_no_rows_is_empty(target):
    of = torch.zeros(0, dtype=torch.long)
    leaf = weights.pack(random(5, 48, 64))
    assert launch.grouped_linear(target, torch.zeros(0, 64), leaf, of).shape == (0, 48)


@pytest.mark.parametrize("counts", [[0, 0, 0], [5, 0, 64], [33, 32, 1], [0, 200, 0]])
def test_group_tasks_cover_each_row_once_in_tiles_of_one_expert(counts):
    tile_m, rows = 32, sum(counts)
    capacity = -(-rows // tile_m) + min(len(counts), rows)
    tasks = torch.full((capacity + 1, 4), -1, dtype=torch.int32)
    num = torch.zeros(1, dtype=torch.int32)
    group_tasks[(1,)](
        torch.tensor(counts, dtype=torch.int32), tasks, num, E=len(counts), TILE_M=tile_m
    )
    assert num <= capacity and (tasks[num:] == -1).all()
    seen = [(e, row + i) for e, row, n, _ in tasks[:num].tolist() for i in range(n) if n <= tile_m]
    expert_of = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).tolist()
    assert seen == list(zip(expert_of, range(rows), strict=True))
