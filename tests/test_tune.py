"""`xylite tune`: which linear layers a model has, how candidates are compared, what is printed."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from tests.kernels_cpu import tables
from tests.models import tiny
from xylite import cli, models, ops, tune
from xylite.checkpoint import open_checkpoint
from xylite.config import EngineConfig
from xylite.errors import XyliteError
from xylite.kernels_cpu import tuning
from xylite.kernels_cpu.packed import PackedLinear, PackedQuant, format_of
from xylite.models import weights
from xylite.ops import Ops, Product, Tuner, cpu, reference
from xylite.runtime.build import build

PRODUCT = Product((torch.zeros(8, 4),), 8, 4, False, False, None, 0.0, 512, torch.float32)
BUCKET = (16, 31)


class FakeTuner:
    """Choices are numbers; a call takes as long as `costs` says, on a clock of its own."""

    path = Path("/nowhere/tuning.json")

    def __init__(self, costs: dict[int, float], first: Sequence[int], near: Sequence[int] = ()):
        self.costs, self.first, self.next = costs, first, near
        self.now = 0.0
        self.kept: list[int | None] = []
        self.calls: list[int] = []

    def format_of(self, weight: Any) -> str:
        return "plain"

    def buckets(self, product: Product) -> list[tuple[int, int]]:
        return [(16, 31), (32, 63), (64, 0)]

    def candidates(self, product: Product, bucket: tuple[int, int]) -> Sequence[int]:
        return self.first

    def near(self, product: Product, choice: int) -> Sequence[int]:
        return self.next if choice == self.first[-1] else ()

    def seconds(self, product: Product, bucket: tuple[int, int], choice: int) -> float:
        self.calls.append(choice)
        took = self.costs[choice]
        self.now += took if took < math.inf else 0.01
        return took

    def describe(self, choice: int) -> str:
        return f"#{choice}"

    def keep(self, product: Product, bucket: tuple[int, int], choice: int | None) -> None:
        self.kept.append(choice)

    def measure(self) -> tune.Result | None:
        return tune.measure(self, PRODUCT, BUCKET, 1.0, clock=lambda: self.now)


@pytest.mark.parametrize(
    ("costs", "first", "near", "kept"),
    [
        ([1.0, 0.5, 0.7], [0, 1, 2], [], 1),
        ([1.0, 0.98, 1.1], [0, 1, 2], [], None),
        ([1.0, 1.1, 1.2], [0, 1, 2], [], None),
        ([1.0, math.inf, 0.9], [0, 1, 2], [], 2),
        ([1.0, 0.8, 0.5, 0.9], [0, 1], [2, 3], 2),
        ([1.0, 0.8, 0.9], [0, 1], [2], 1),
        ([math.inf, 0.8], [0, 1], [], 1),
    ],
)
def test_the_fastest_is_kept_if_it_is_clearly_faster(
    costs: list[float], first: list[int], near: list[int], kept: int | None
):
    tuner = FakeTuner({i: 0.01 * c for i, c in enumerate(costs)}, first, near)
    result = tuner.measure()
    assert result is not None
    assert tuner.kept == [kept]
    assert result.before == "#0"
    assert result.choice == (None if kept is None else f"#{kept}")
    assert result.before_s >= result.after_s
    if kept is not None and costs[0] < math.inf:
        assert result.gain == pytest.approx(costs[0] / costs[kept] - 1)


def test_nothing_to_choose_and_nothing_that_works_are_no_result(
    caplog: pytest.LogCaptureFixture,
):
    assert FakeTuner({0: 1.0}, [0]).measure() is None
    assert not caplog.records
    tuner = FakeTuner({0: math.inf, 1: math.inf}, [0, 1])
    assert tuner.measure() is None
    assert tuner.kept == []
    assert "no candidate works for linear plain 8 x 4" in caplog.text


def test_candidates_that_are_far_behind_are_not_timed_on():
    tuner = FakeTuner({0: 0.01, 1: 0.011, 2: 0.05}, [0, 1, 2])
    tuner.measure()
    assert tuner.calls.count(2) == 3  # once unmeasured, and two rounds
    assert tuner.calls.count(1) > 10


def test_a_gain_that_pairs_do_not_confirm_is_none():
    class Disturbed(FakeTuner):
        """Choice 1 has one lucky moment; else both are alike."""

        def seconds(self, product: Product, bucket: tuple[int, int], choice: int) -> float:
            super().seconds(product, bucket, choice)
            return 0.005 if choice == 1 and self.calls.count(1) % 7 == 2 else 0.01

    tuner = Disturbed({0: 0.01, 1: 0.01}, [0, 1])
    tuner.measure()
    assert tuner.kept == [None]


def test_a_file_that_cannot_be_written_is_an_error_with_its_name():
    class Full(FakeTuner):
        def keep(self, product: Product, bucket: tuple[int, int], choice: int | None) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(XyliteError, match=r"^/nowhere/tuning.json cannot be written: No space"):
        Full({0: 0.01, 1: 0.001}, [0, 1]).measure()


def described(table: Ops, **changes: Any) -> list[Product]:
    family, spec = models.describe(tiny.config(**changes))
    params = weights.random_params(spec, family, table, torch.float32, max_len=1)
    return tune.products(family, spec, params, table, torch.float32)


@pytest.fixture
def table(tmp_path: Path) -> Ops:
    """The CPU's table with the file of its tuner in a folder of the test's."""
    made = tables.make(tables.names()[0])
    packer: Any = made.pack_linear.__self__
    return cpu.table_of(packer.kernels, "here", tuning.Tuning(False), tmp_path / "tuning.json")


def test_products_are_the_linear_layers_of_a_pass(table: Ops):
    found = described(table)
    calls = [(p.n, p.k, p.act, p.bias, len(p.weights)) for p in found]
    assert calls == [
        (128, 64, None, False, 2),
        (64, 64, None, False, 2),
        (192, 64, "silu", False, 2),
        (64, 96, None, False, 2),
        (160, 64, None, False, 1),
    ]
    assert all(p.most == tune.MOST_ROWS for p in found[:-1])
    assert found[-1].most == tune.MOST_LOGIT_ROWS
    assert all((w.n, w.k, w.gated) == (p.n, p.k, bool(p.act)) for p in found for w in p.weights)


def test_products_have_biases_and_tied_heads_as_the_model_has(table: Ops):
    found = described(table, attention_bias=True, tie_word_embeddings=True)
    assert [(p.n, p.bias) for p in found] == [
        (128, True), (64, True), (192, False), (64, False), (160, False),
    ]  # fmt: skip


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    cfg = tiny.config(num_hidden_layers=1)
    return tiny.save_directory(tmp_path / "model", cfg, tiny.tensors(cfg))


def run(*words: str) -> int:
    return cli.main(["tune", *words])


def quick(monkeypatch: pytest.MonkeyPatch, table: Ops) -> None:
    """The command with this table; a moment for each choice, and few rows."""
    monkeypatch.setattr(ops, "load", lambda device: table)
    monkeypatch.setattr(cli, "environment", dict)
    monkeypatch.setattr(tuning, "LAST_ROWS", 32)
    measure = tune.measure
    monkeypatch.setattr(tune, "measure", lambda *args: measure(*args[:-1], 0.0))


@pytest.mark.parametrize("more", [(), ("--quantization", "int8"), ("--load-format", "dummy")])
def test_the_command_prints_a_line_per_choice_and_writes_the_file(
    table: Ops, tiny_model: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], more: Sequence[str],
):  # fmt: skip
    quick(monkeypatch, table)
    assert run(str(tiny_model), *more) == 0
    head, *rows, total, written = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["op", "format", "N", "K", "rows"]
    form = "int8-64" if "int8" in more else "fp32"
    assert [row.split()[:5] for row in rows[:2]] == [
        ["linear", form, "128", "64", "16-31"], ["linear", form, "128", "64", "32-63"],
    ]  # fmt: skip
    assert len(rows) == 10
    assert re.match(r"\d+ of 10 choices are faster", total)
    assert table.tuner is not None
    assert str(table.tuner.path) in written
    held = tuning.load(table.tuner.path)
    assert held is not None
    assert {key[1] for key in held.blocks} <= {form}


def test_what_was_tuned_computes_the_same(table: Ops, tiny_model: Path):
    assert table.tuner is not None
    (p, *_) = described(table)
    x = torch.randn(50, p.k, generator=torch.Generator().manual_seed(0))
    before = table.linear(x, p.weights[0])
    for choice in table.tuner.candidates(p, (32, 63)):
        table.tuner.keep(p, (32, 63), choice)
        packer: Any = table.pack_linear.__self__
        held = tuning.load(table.tuner.path)
        assert held is not None and held.blocks
        again = cpu.table_of(packer.kernels, "here", held)
        assert torch.equal(again.linear(x, p.weights[0]), before)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "tpu"], "device 'tpu' is not known; use auto or one of "),
        (["--device", "cpu:1"], "device cpu:1: there is only index 0"),
        (["--device", "reference"], "device reference has nothing to tune: "),
        (["/none"], "model '/none': there is no such directory"),
        (["--max-num-seqs", "3"], "unknown flag --max-num-seqs"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("xylite tune: error: ") and said in err and err.count("\n") == 1


@pytest.mark.parametrize("quantization", [None, "stored", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_products_tuned_are_those_of_the_weights_served(
    table: Ops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None,
    dtype: str,
):  # fmt: skip
    cfg, path = tiny.config(), tmp_path / "m.gguf"
    tiny.save_gguf(path, cfg, tiny.tensors(cfg), gguf.GGMLQuantizationType.Q4_1)
    quick(monkeypatch, table)
    tuned: list[tuple[str, int, int]] = []

    def note(tuner: Tuner, product: Product, *rest: Any) -> None:
        tuned.extend((tuner.format_of(w), product.n, product.k) for w in product.weights)

    monkeypatch.setattr(tune, "measure", note)
    config = EngineConfig(
        model=str(path), device="cpu", dtype=dtype, quantization=quantization, num_blocks=2,
        max_num_batched_tokens=64,
    )  # fmt: skip
    assert list(tune.tune(config)[1]) == []
    params = build(config, open_checkpoint(str(path)), cfg["vocab_size"]).executor.model.params
    heads = [leaf for name, leaf in packed(params).items() if "head" in name]
    served = [leaf for name, leaf in packed(params).items() if "embed" not in name]
    assert sorted(tuned) == sorted((format_of(w), w.n, w.k) for w in served)
    assert [format_of(w) for w in heads] == [
        {None: {"auto": "bf16", "float32": "fp32"}[dtype], "stored": "int4-32-min"}.get(
            quantization, "int8-64"
        )
    ]


def packed(params: Any) -> dict[str, PackedLinear | PackedQuant]:
    """The weights of a model by name."""
    of_model = {name: getattr(params, name) for name in ("embed", "head")}
    names = ("qkv", "out", "gate_up", "down")
    of_layers = {
        f"{i}.{n}": getattr(layer, n) for i, layer in enumerate(params.layers) for n in names
    }
    return {**of_model, **of_layers}


def test_an_unknown_format_is_named_with_those_that_exist(
    table: Ops, tiny_model: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    quick(monkeypatch, table)
    assert run(str(tiny_model), "-q", "fp7") == 2
    assert (
        "quantization 'fp7' is not there on cpu (there is: int4, int8, stored)"
        in capsys.readouterr().err
    )


def test_only_tables_with_a_file_have_a_tuner():
    assert reference.TABLE.tuner is None
    assert tables.make(tables.names()[0]).tuner is None
