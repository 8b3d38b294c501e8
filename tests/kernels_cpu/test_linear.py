"""Linear layers over packed panels against float64.

The bound of an element is the textbook one of a chain of K additions: K * 2^-24 * (|x| @ |w|.T),
doubled because the bf16 dot product rounds its product and its sum each. Where that instruction is
used the activations are rounded to bf16 first, and so are the reference's.
"""

import pytest
import torch
from torch import Tensor

from xylite.ops import Activation, Ops, cpu, reference

ROWS = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weight(n: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + n * 10007 + k)
    return (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)


def rows(m: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed + m))


def rounds(ops: Ops, dtype: torch.dtype) -> bool:
    """This table rounds activations to bf16 for weights of `dtype`."""
    one = ops.pack_linear(torch.ones(1, 2, dtype=dtype))
    return ops.linear(torch.tensor([[1 + 2.0**-12, 0]]), one).item() == 1.0


def check(ops: Ops, x: Tensor, w: Tensor, y: Tensor, extra: Tensor | float = 0.0) -> None:
    used = x.bfloat16() if rounds(ops, w.dtype) else x
    exact = used.double() @ w.double().T + extra
    scale = used.double().abs() @ w.double().abs().T + abs(torch.as_tensor(extra))
    bound = 2 * (x.shape[1] + 2) * 2.0**-24 * scale + 1e-30
    assert y.dtype == torch.float32
    assert y.shape == exact.shape
    assert bool(((y - exact).abs() <= bound).all()), float(((y - exact).abs() - bound).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(96, 64), (70, 33), (1, 1), (33, 1537), (300, 1024)])
def test_linear_is_the_product_for_every_number_of_rows(
    ops: Ops, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    w = weight(*shape, dtype)
    packed = ops.pack_linear(w.clone())
    for m in ROWS:
        x = rows(m, shape[1])
        check(ops, x, w, ops.linear(x, packed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(ops: Ops, dtype: torch.dtype) -> None:
    """Bit for bit: any schedule gives the same tokens."""
    packed = ops.pack_linear(weight(100, 700, dtype))
    x = rows(333, 700)
    whole = ops.linear(x, packed)
    for m in (1, 2, 3, 4, 5, 11, 12, 13, 25, 64, 200):
        for start in (0, 7):
            assert torch.equal(ops.linear(x[start : start + m], packed), whole[start : start + m])


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_are_written_whole_and_only_once(ops: Ops, dtype: torch.dtype) -> None:
    """Freed memory is handed out again: NaN left there must not show."""
    packed = ops.pack_linear(weight(70, 64, dtype))
    for m in (1, 17, 64):
        poison = torch.full((m, 70), torch.nan)
        del poison
        assert bool(ops.linear(rows(m, 64), packed).isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_then_residual_or_cap(ops: Ops, dtype: torch.dtype) -> None:
    w, bias = weight(70, 48, dtype), torch.linspace(-2, 2, 70)
    packed = ops.pack_linear(w.clone())
    for m in (1, 9, 40):
        x, residual = rows(m, 48), rows(m, 70, seed=5)
        check(ops, x, w, ops.linear(x, packed, bias), bias.double())
        got = ops.linear(x, packed, bias, residual=residual)
        check(ops, x, w, got, bias.double() + residual.double())
        plain = ops.linear(x, packed, bias)
        capped = ops.linear(x, packed, bias, cap=1.5)
        expected = 1.5 * torch.tanh(plain.double() / 1.5)
        torch.testing.assert_close(capped.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("packed", [None, "int8"])
def test_several_epilogues_follow_each_other_as_in_the_reference(
    ops: Ops, act: Activation | None, cap: float, residual: bool, packed: str | None
) -> None:
    w = weight(70, 64, torch.float32)
    leaf = (ops.packers[packed] if packed else ops.pack_linear)(w.clone(), gated=act is not None)
    used = w
    if packed:
        plain = ops.packers[packed](w.clone())
        used = ops.embed(plain, torch.arange(70).int())
    for m in (1, 17):
        x = rows(m, 64)
        added = rows(m, 35 if act else 70, seed=5) if residual else None
        got = ops.linear(x, leaf, residual=added, act=act, cap=cap)
        expected = reference.linear(x, used, residual=added, act=act, cap=cap)
        assert bool(((got - expected).abs() < (0.2 if packed else 1e-4)).all())


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("inner", [16, 37, 96])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_weights_give_act_of_gate_times_up(
    ops: Ops, dtype: torch.dtype, inner: int, act: str
) -> None:
    ops.pack_linear(torch.ones(1, 1))  # a model with a float32 weight: no row is rounded
    w, bias = weight(2 * inner, 40, dtype) * 3, torch.linspace(-4, 4, 2 * inner)
    packed, plain = ops.pack_linear(w.clone(), gated=True), ops.pack_linear(w.clone())
    for m in (0, 1, 13, 70):
        x = rows(m, 40)
        both = ops.linear(x, plain, bias).double()
        gate, up = both[:, :inner], both[:, inner:]
        gate = (
            torch.nn.functional.silu(gate)
            if act == "silu"
            else torch.nn.functional.gelu(gate, approximate="tanh")
        )
        got = ops.linear(x, packed, bias, act=act).double()  # pyright: ignore[reportArgumentType]
        torch.testing.assert_close(got, gate * up, rtol=3e-6, atol=1e-6)


def test_activations_may_be_bf16_or_not_contiguous(ops: Ops) -> None:
    w = weight(64, 32, torch.bfloat16)
    packed = ops.pack_linear(w.clone())
    x = rows(20, 64).bfloat16()
    assert torch.equal(ops.linear(x[:, :32], packed), ops.linear(x[:, :32].float(), packed))


def test_values_that_are_not_finite_stay_in_their_row(ops: Ops) -> None:
    for dtype in DTYPES:
        packed = ops.pack_linear(weight(40, 31, dtype))  # odd K: padding must not be read
        x = rows(14, 31)
        clean = ops.linear(x, packed)
        x[5, 3], x[9, 0] = torch.nan, torch.inf
        y = ops.linear(x, packed)
        assert not bool(y[5].isfinite().any())
        assert not bool(y[9].isfinite().any())
        others = [i for i in range(14) if i not in (5, 9)]
        assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed_reads_the_rows_of_a_packed_weight(ops: Ops, dtype: torch.dtype) -> None:
    w = weight(77, 35, dtype)
    packed = ops.pack_linear(w.clone())
    for n in (0, 1, 40):
        ids = torch.randint(0, 77, (n,), dtype=torch.int32, generator=torch.manual_seed(n))
        assert torch.equal(ops.embed(packed, ids), w[ids.long()].float())


def test_experts_are_packed_one_after_the_other(ops: Ops) -> None:
    w = torch.stack([weight(24, 20, torch.bfloat16, seed=e) for e in range(5)])
    x, expert_of = rows(50, 20), torch.arange(50) % 4  # the last has no rows
    bias = torch.randn(5, 24, generator=torch.manual_seed(1))
    packed = ops.pack_linear(w.clone())
    got = ops.grouped_linear(x, packed, expert_of.int(), bias)
    for e in range(4):
        one = ops.pack_linear(w[e].clone())
        assert torch.equal(got[expert_of == e], ops.linear(x[expert_of == e], one, bias[e]))


def test_other_dtypes_take_the_reference_path(ops: Ops) -> None:
    w, x = weight(6, 5, torch.float64), rows(3, 5).double()
    packed = ops.pack_linear(w)
    assert not isinstance(packed, cpu.Packed)
    assert ops.act_dtype(torch.float64) == torch.float64
    assert torch.equal(ops.linear(x, packed), x @ w.T)


def test_rows_are_handed_over_as_the_next_product_rounds_them(ops: Ops) -> None:
    """bf16 rows where every weight rounds them anyway, and the numbers are the same."""
    gate, down = weight(96, 64, torch.bfloat16), weight(40, 48, torch.bfloat16)
    x, norm = rows(21, 64), torch.linspace(0.5, 1.5, 64)
    packed = ops.pack_linear(gate.clone(), gated=True), ops.pack_linear(down.clone())

    def run() -> tuple[torch.dtype, Tensor]:
        normed, _ = ops.add_rms_norm(x, None, norm, 1e-5)
        inner = ops.linear(normed, packed[0], act="silu")
        assert normed.dtype == inner.dtype
        return inner.dtype, ops.linear(inner, packed[1])

    narrow, first = run()
    assert narrow == (torch.bfloat16 if rounds(ops, torch.bfloat16) else torch.float32)
    ops.pack_linear(torch.ones(1, 1))
    wide, second = run()
    assert wide == torch.float32
    assert torch.equal(first, second)
