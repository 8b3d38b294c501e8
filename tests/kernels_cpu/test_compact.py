"""bf16 weights in compact panels: fewer bytes, and every result bit for bit that of plain ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels_cpu import tables
from tests.kernels_cpu.test_linear import rows, weight
from xylite.kernels_cpu import packed
from xylite.kernels_cpu.packed import PackedCompact, PackedLinear, Packer
from xylite.ops import cpu

BF16 = torch.bfloat16
ROWS = (0, 1, 2, 3, 11, 12, 13, 24, 25, 36, 37, 64, 150)


@pytest.fixture
def packer() -> Packer:
    """That of a table whose bf16 products are those of the dot product."""
    if "avx512bf16" not in tables.names():
        pytest.skip("compact panels are for processors with a bf16 dot product")
    made = tables.make("avx512bf16").pack_linear.__self__  # pyright: ignore[reportFunctionMemberAccess]
    assert isinstance(made, Packer) and made.kinds == cpu.kinds_of(dot=True)
    return made


def plain(packer: Packer, w: Tensor, gated: bool = False) -> PackedLinear:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "MOST_COMPACT", 0.0)
        made = packer.pack(w, gated)
    assert isinstance(made, PackedLinear)
    return made


def with_outliers(w: Tensor) -> Tensor:
    """Some weights far from the others, and those that have exponents of their own."""
    w = w.clone()
    flat = w.view(-1)
    flat[::2111] *= 2.0**-40
    flat[::3307] *= 2.0**20
    flat[::53] = 0
    flat[5:10] = torch.tensor([-0.0, 1e-40, -1e-40, torch.finfo(BF16).tiny, torch.finfo(BF16).max])
    return w


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype is torch.float32 else torch.int16)


SHAPES = [(96, 576), (70, 36), (33, 1537), (300, 1024), (64, 2050), (32, 250)]


@pytest.mark.parametrize("change", [lambda w: w, with_outliers], ids=["usual", "outliers"])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_plain_panels_bit_for_bit(
    packer: Packer, shape: tuple[int, int], change: Callable[[Tensor], Tensor]
) -> None:
    w = change(weight(*shape, BF16))
    compact, whole = packer.pack(w), plain(packer, w)
    assert isinstance(compact, PackedCompact)
    assert 0.75 < compact.data.nbytes / whole.data.nbytes < 0.9
    bias = torch.linspace(-1, 1, shape[0])
    for m in ROWS:
        x, residual = rows(m, shape[1]), rows(m, shape[0], seed=1)
        for blocks in (None, (16 << 10, 2 << 10)):  # the second: many blocks of k
            a = packer.multiply(x, compact, bias, residual, None, 0.0, blocks=blocks)
            b = packer.multiply(x, whole, bias, residual, None, 0.0, blocks=blocks)
            assert torch.equal(bits(a), bits(b)), m


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_gated_products_are_those_of_plain_panels_bit_for_bit(packer: Packer, act: str) -> None:
    w = weight(220, 300, BF16)
    compact, whole = packer.pack(w, gated=True), plain(packer, w, gated=True)
    assert isinstance(compact, PackedCompact)
    for m in ROWS:
        a = packer.multiply(rows(m, 300), compact, None, None, act, 0.0)
        b = packer.multiply(rows(m, 300), whole, None, None, act, 0.0)
        assert torch.equal(bits(a), bits(b)), m


@pytest.mark.parametrize("shape", [(64, 576), (70, 36), (33, 1537), (40, 1026)])
def test_rows_are_read_as_they_were(packer: Packer, shape: tuple[int, int]) -> None:
    w = with_outliers(weight(*shape, BF16))
    compact = packer.pack(w)
    assert isinstance(compact, PackedCompact)
    ids = torch.arange(shape[0], dtype=torch.int32).flip(0)
    assert torch.equal(bits(packer.gather(compact, ids)), bits(w[ids.long()].float()))
    beyond = torch.tensor([-5, shape[0] + 7], dtype=torch.int32)  # as plain panels take them
    assert torch.equal(packer.gather(compact, beyond), w[[0, -1]].float())


def test_experts_of_different_sizes_lie_one_after_the_other(packer: Packer) -> None:
    w = torch.stack([weight(48, 288, BF16), with_outliers(weight(48, 288, BF16, seed=1))])
    w = torch.stack([*w, weight(48, 288, BF16, seed=2)])
    compact = packer.pack(w)
    assert isinstance(compact, PackedCompact) and compact.experts == 3
    x = rows(5, 288)
    for e in range(3):
        a = packer.multiply(x, compact, None, None, None, 0.0, expert=e)
        b = packer.multiply(x, plain(packer, w[e]), None, None, None, 0.0)
        assert torch.equal(bits(a), bits(b)), e


def test_infinities_and_nan_stay(packer: Packer) -> None:
    w = weight(64, 128, BF16)
    w[3, 4], w[7, 100], w[40, 0] = torch.inf, torch.nan, -torch.inf
    compact = packer.pack(w)
    assert isinstance(compact, PackedCompact)
    rows_read = packer.gather(compact, torch.arange(64, dtype=torch.int32))
    assert torch.equal(bits(rows_read), bits(w.float()))


@pytest.mark.parametrize(
    "w",
    [
        torch.exp2(torch.randint(-60, 60, (64, 128)).float()),  # exponents of all sizes
        torch.zeros(1, 1),
    ],
    ids=["wide", "one"],
)
def test_weights_that_would_take_as_much_stay_plain(packer: Packer, w: Tensor) -> None:
    assert isinstance(packer.pack(w.to(BF16)), PackedLinear)


def test_other_types_stay_plain(packer: Packer) -> None:
    for dtype in (torch.float32, torch.float16):
        assert isinstance(packer.pack(weight(64, 128, dtype)), PackedLinear)


def test_without_a_dot_product_weights_stay_plain(packer: Packer) -> None:
    widening = Packer(packer.kernels, cpu.kinds_of(dot=False))
    assert isinstance(widening.pack(weight(64, 128, BF16)), PackedLinear)
