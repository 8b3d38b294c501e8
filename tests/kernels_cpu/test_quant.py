"""Linear layers with 8-bit and 4-bit weights.

Activations that are integers with 127 among each group are quantised without loss, so there the
result is the exact product but for float32 additions. Others may be off by half a step each, but
for those that stand out: these are exact, or spread over their group where the format is turned.
"""

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from xylite.kernels_cpu.blocks import GGUF, INT8, QuantFormat, Quantized
from xylite.kernels_cpu.packed import Packer
from xylite.ops import Ops

ROWS = (0, 1, 2, 5, 6, 7, 12, 13, 33, 65, 129)
FORMATS = [
    QuantFormat(8, 64, 128),
    QuantFormat(8, 32, 128),  # GGUF Q8_0
    QuantFormat(4, 32, 8),  # GGUF Q4_0
    QuantFormat(4, 32, 0, has_min=True),  # GGUF Q4_1
]


def packer(ops: Ops) -> Packer:
    return ops.pack_linear.__self__  # pyright: ignore[reportFunctionMemberAccess]


def parts(n: int, k: int, form: QuantFormat) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Random (q, scales, mins) and the weight [N, K] float64 that they mean."""
    generator = torch.Generator().manual_seed(n + k)
    groups = -(-k // form.group)
    q = torch.randint(0, 2**form.bits, (n, k), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(n, groups, generator=generator) / 50 + 1e-3).half()
    mins = (torch.rand(n, groups, generator=generator) - 0.5).half() if form.has_min else None
    w = scales.double().repeat_interleave(form.group, 1)[:, :k] * (q.double() - form.zero)
    if mins is not None:
        w += mins.double().repeat_interleave(form.group, 1)[:, :k]
    return q, scales, mins, w


def turned(x: Tensor) -> Tensor:
    """Groups of 64 along the last axis, padded with zeros, times the Hadamard matrix."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(6):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    groups = torch.nn.functional.pad(x.double(), (0, -x.shape[-1] % 64)).unflatten(-1, (-1, 64))
    return (groups @ matrix / 8).flatten(-2)


def step_of(x: Tensor, group: int) -> Tensor:
    """The step of each value's group when its largest magnitude is 127 steps."""
    top = x.abs().unflatten(-1, (-1, group)).amax(-1) / 127
    return top.repeat_interleave(group, -1)


def with_outliers(m: int, k: int) -> Tensor:
    """Rows with two channels that are large in each, and one of another channel in every third."""
    generator = torch.Generator().manual_seed(m + k)
    x = torch.randn(m, k, generator=generator)
    x[:, 7] *= 60
    x[:, k - 3] *= -200
    x[::3, torch.randint(0, k, (1,), generator=generator)] = 90
    return x


def whole_numbers(m: int, k: int, group: int) -> Tensor:
    x = torch.randint(-127, 128, (m, k), generator=torch.Generator().manual_seed(m)).float()
    x[:, ::group] = 127
    return x


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", [(64, 64), (70, 33), (1, 1), (40, 576), (33, 1100)])
def test_whole_numbers_give_the_exact_product(
    ops: Ops, shape: tuple[int, int], form: QuantFormat
) -> None:
    n, k = shape
    q, scales, mins, w = parts(n, k, form)
    leaf = packer(ops).pack_quantized([Quantized(q, scales, mins, form)])
    for m in ROWS:
        x = whole_numbers(m, k, form.group)
        y = ops.linear(x, leaf)
        exact = x.double() @ w.T
        # per group: its integer to float32, three products and an addition
        terms = -(-k // form.group) + 4
        bound = 4 * terms * 2.0**-24 * (x.double().abs() @ (w.abs().T + abs(form.zero) / 40))
        assert bool(((y - exact).abs() <= bound + 1e-30).all())


@pytest.mark.parametrize("form", FORMATS)
def test_rows_are_read_back(ops: Ops, form: QuantFormat) -> None:
    q, scales, mins, w = parts(70, 100, form)
    leaf = packer(ops).pack_quantized([Quantized(q, scales, mins, form)])
    ids = torch.tensor([69, 0, 33, 33, 31], dtype=torch.int32)
    torch.testing.assert_close(ops.embed(leaf, ids).double(), w[ids.long()], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_of_a_weight_is_off_by_half_a_step_at_most(ops: Ops, dtype: torch.dtype) -> None:
    w = torch.randn(50, 200, generator=torch.manual_seed(0)).to(dtype)
    w[3] = 0
    leaf = ops.packers["int8"](w.clone())
    back = ops.embed(leaf, torch.arange(50, dtype=torch.int32))
    step = step_of(turned(w), 64)
    # What is cut off in the last group was not 0 when it was rounded, so only whole groups turn
    # back to what was rounded. The scale is rounded to fp16 first: 127 steps of it may miss the
    # largest value by 127 * 2^-11.
    error = turned((back - w.float())[:, :192]).abs()
    assert bool((error <= step[:, :192] * (0.5 + 127 * 2.0**-11) + 1e-6).all())
    assert bool(((back - w.float()).abs()[:, 192:] <= 8 * step[:, 192:200]).all())
    assert not bool(back[3].any())


def test_activations_are_off_by_half_a_step_at_most(ops: Ops) -> None:
    w = torch.randn(70, 200, generator=torch.manual_seed(0))
    w = w[:, :192]  # whole groups: see above
    leaf = ops.packers["int8"](w.clone())
    used = ops.embed(leaf, torch.arange(70, dtype=torch.int32)).double()
    for m in (1, 7, 40):
        x = with_outliers(m, 192)
        step = step_of(turned(x), 64)
        error = (ops.linear(x, leaf) - x.double() @ used.T).abs()
        assert bool((error <= 0.501 * step @ turned(used).abs().T + 1e-5).all())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("k", [192, 1000])
def test_outliers_cost_their_groups_no_precision(ops: Ops, form: QuantFormat, k: int) -> None:
    """Each is exact, and its group's step is that of the values that are left."""
    q, scales, mins, w = parts(70, k, form)
    leaf = packer(ops).pack_quantized([Quantized(q, scales, mins, form)])
    for m in ROWS[1:]:
        x = with_outliers(m, k)
        far = x.abs() > 4 * x.square().mean(-1, keepdim=True).sqrt()
        assert bool(far.any(-1).all())
        rest = torch.nn.functional.pad(x.masked_fill(far, 0.0), (0, -k % form.group))
        step = step_of(rest, form.group)[:, :k].double()
        error = (ops.linear(x, leaf) - x.double() @ w.T).abs()
        # bound of w: its minimum is subtracted from sums that hold it, and float32 rounds both
        rounding = 2.0**-20 * x.double().abs() @ (w.abs().T + abs(form.zero) / 40)
        assert bool((error <= 0.501 * step @ w.abs().T + rounding).all())


@pytest.mark.parametrize("packed", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_outliers_do_not_depend_on_their_batch(
    ops: Ops, packed: str, dtype: torch.dtype
) -> None:
    leaf = ops.packers[packed](torch.randn(100, 700, generator=torch.manual_seed(0)))
    x = with_outliers(200, 700).to(dtype)
    whole = ops.linear(x, leaf)
    for first, m in ((9, 1), (10, 1), (9, 5), (8, 7), (9, 13), (0, 100)):
        assert torch.equal(ops.linear(x[first : first + m].clone(), leaf), whole[first : first + m])


def test_a_row_of_one_value_has_as_many_outliers_as_fit(ops: Ops) -> None:
    """A single value is all of its row's squares; more of them are not beyond their own mean."""
    leaf = ops.packers["int4"](torch.randn(40, 100, generator=torch.manual_seed(0)))
    used = ops.embed(leaf, torch.arange(40, dtype=torch.int32))
    for count in (0, 1, 3, 4, 5, 100):
        x = torch.zeros(2, 100)
        x[:, :count] = 1e4
        torch.testing.assert_close(ops.linear(x, leaf), x @ used.T, rtol=1e-5, atol=0.1)


def test_a_row_does_not_depend_on_its_batch(ops: Ops) -> None:
    leaf = ops.packers["int8"](torch.randn(100, 700, generator=torch.manual_seed(0)))
    x = torch.randn(200, 700, generator=torch.manual_seed(1))
    whole = ops.linear(x, leaf)
    for m in (1, 2, 5, 6, 7, 13, 100):
        assert torch.equal(ops.linear(x[9 : 9 + m], leaf), whole[9 : 9 + m])


def test_gated_bias_and_cap(ops: Ops) -> None:
    w = torch.randn(74, 64, generator=torch.manual_seed(0))
    bias = torch.linspace(-1, 1, 74)
    gated, plain = ops.packers["int8"](w.clone(), gated=True), ops.packers["int8"](w.clone())
    x = torch.randn(9, 64, generator=torch.manual_seed(1))
    both = ops.linear(x, plain, bias).double()
    want = torch.nn.functional.silu(both[:, :37]) * both[:, 37:]
    got = ops.linear(x, gated, bias, act="silu")
    torch.testing.assert_close(got.double(), want, rtol=3e-6, atol=2e-6)
    capped = ops.linear(x, plain, bias, cap=2.0).double()
    torch.testing.assert_close(capped, 2 * torch.tanh(both / 2), rtol=1e-6, atol=1e-6)


def test_values_that_are_not_finite_stay_in_their_row(ops: Ops) -> None:
    leaf = ops.packers["int8"](torch.randn(40, 100, generator=torch.manual_seed(0)))
    x = torch.randn(14, 100, generator=torch.manual_seed(1))
    clean = ops.linear(x, leaf)
    x[5, 99], x[9, 0] = torch.nan, torch.inf
    y = ops.linear(x, leaf)
    assert not bool(y[5].isfinite().any())
    assert not bool(y[9].isfinite().any())
    others = [i for i in range(14) if i not in (5, 9)]
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("packed", ["int8", "int4"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_gives_nan_in_its_row(
    ops: Ops, packed: str, value: float
) -> None:
    w = torch.randn(40, 200, generator=torch.Generator().manual_seed(0))
    clean = ops.packers[packed](w.clone())
    w[3, 5], w[37, 199] = value, value
    broken = ops.packers[packed](w)
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(1))
    x[:, 5] = x[:, 199] = 0  # NaN for the row all the same
    y, expected = ops.linear(x, broken), ops.linear(x, clean)
    assert bool(y[:, [3, 37]].isnan().all())
    others = [i for i in range(40) if i not in (3, 37)]
    assert torch.equal(y[:, others], expected[:, others])
    assert bool(ops.embed(broken, torch.tensor([3, 37]).int()).isnan().any(-1).all())


def test_the_end_of_a_row_is_not_rounded_with_zeros(ops: Ops) -> None:
    w = torch.cat((torch.zeros(4, 64), torch.tensor([[50.0, 50.5]]).expand(4, 2)), 1)
    back = ops.embed(ops.packers["int4"](w.clone()), torch.arange(4).int())
    assert bool(((back - w).abs() < 0.05).all())


def test_groups_that_the_kernels_have_no_room_for_are_refused(ops: Ops) -> None:
    form = QuantFormat(8, 512, 128)
    leaf = packer(ops).pack_quantized([Quantized(*parts(32, 512, form)[:3], form)])
    with pytest.raises(AssertionError, match="lacks that kind of weight"):
        ops.linear(torch.ones(1, 512), leaf)
    with pytest.raises(AssertionError, match="lacks that kind of weight"):
        ops.embed(leaf, torch.tensor([3]).int())


def test_experts_are_quantised_one_after_the_other(ops: Ops) -> None:
    w = torch.randn(3, 24, 64, generator=torch.manual_seed(0))
    x, expert_of = torch.randn(20, 64, generator=torch.manual_seed(1)), torch.arange(20) % 3
    leaf = ops.packers["int8"](w.clone())
    got = ops.grouped_linear(x, leaf, expert_of.int())
    for e in range(3):
        one = ops.linear(x[expert_of == e], ops.packers["int8"](w[e].clone()))
        assert torch.equal(got[expert_of == e], one)


def test_a_quarter_of_the_memory_of_float32(ops: Ops) -> None:
    leaf = ops.packers["int8"](torch.randn(128, 640))
    assert leaf.format == INT8
    assert leaf.data.nbytes == 128 * 640 * (1 + 2 / 64)


@pytest.mark.parametrize("kind", list(GGUF))
def test_gguf_blocks_are_kept_bit_for_bit(ops: Ops, kind: str) -> None:
    """Against the gguf package's own reading of the same bytes."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(70, 96, generator=generator).numpy()
    raw = quantize(values, GGMLQuantizationType[kind])
    want = torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind]))
    leaf = ops.stored_packers[kind](torch.from_numpy(raw))
    got = ops.embed(leaf, torch.arange(70, dtype=torch.int32))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    assert leaf.data.nbytes == 96 * raw.shape[1]  # three panels of 32 rows


def test_int4_is_off_by_half_a_step_at_most(ops: Ops) -> None:
    w = torch.randn(40, 100, generator=torch.manual_seed(0))
    leaf = ops.packers["int4"](w.clone())
    back = ops.embed(leaf, torch.arange(40, dtype=torch.int32))
    groups = torch.nn.functional.pad(w, (0, 28)).view(40, 4, 32)
    step = ((groups.amax(-1) - groups.amin(-1)) / 15).repeat_interleave(32, 1)[:, :100]
    # scale and minimum are rounded to fp16, 2^-11 of themselves
    assert bool(((back - w).abs() <= step * (0.5 + 15 * 2.0**-11) + w.abs().max() * 2.0**-10).all())
