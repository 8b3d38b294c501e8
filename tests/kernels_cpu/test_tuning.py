"""What is measured is held, and what is held wrongly is measured again."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from xylite.kernels_cpu import tuning
from xylite.kernels_cpu.packed import PackedLinear, Packer
from xylite.kernels_cpu.tuner import BlockTuner
from xylite.ops import Ops, Product

BLOCKS = {(2, "bf16", False, 96, 64, 7): (100, 20), (2, "int8-64", True, 64, 96, 9): (50, 10)}
HELD = tuning.Tuning(True, (300, 30), BLOCKS)


def test_tuning_is_held_in_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "made" / "tuning.json"
    assert tuning.load(path) is None
    for held in (HELD, tuning.Tuning(False)):
        tuning.save(path, held)
        assert tuning.load(path) == held
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert not caplog.records


def broken(**changes: Any) -> str:
    whole = {"version": tuning.VERSION, "processor": tuning.processor(), "dot": True,
             "default": None, "blocks": []}  # fmt: skip
    return json.dumps(whole | changes)


ROW = [2, "bf16", False, 96, 64, 7]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("\udcff", "codec can't decode"),
        ("{}", "version"),
        ("[1]", "list indices"),
        (broken(version=1), "its version is 1, here it is 2"),
        (broken(processor="another"), "its processor is 'another'"),
        (broken(dot=1), "expected bool, got 1"),
        (broken(default=[100]), "not enough values"),
        (broken(default=[100, 0]), "from 1 to"),
        (broken(default="10"), "expected list"),
        (broken(blocks=3), "not iterable"),
        (broken(blocks=[[*ROW, 100]]), "5 of 6 parts"),
        (broken(blocks=[[*ROW, 100, -1]]), "from 1 to"),
        (broken(blocks=[[*ROW, 100, 1.5]]), "expected int, got 1.5"),
        (broken(blocks=[[*ROW, 1 << 40, 1]]), "from 1 to"),
        (broken(blocks=[["2", *ROW[1:], 100, 20]]), "expected int, got '2'"),
    ],
)
def test_a_file_that_makes_no_sense_is_named_once_and_measured_again(
    ops: Ops, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, said: str
) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(text, errors="surrogateescape")
    packer: Packer = ops.pack_linear.__self__  # pyright: ignore[reportFunctionMemberAccess]
    made = tuning.at_start(packer.kernels, path, has_dot=False)
    assert made.blocks == {} and tuning.load(path) == made
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage() and said in record.getMessage()


def test_a_folder_that_cannot_be_written_is_no_error_at_start(ops: Ops, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    packer: Packer = ops.pack_linear.__self__  # pyright: ignore[reportFunctionMemberAccess]
    tuning.at_start(packer.kernels, tmp_path / "file" / "tuning.json", has_dot=False)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    with pytest.raises(OSError, match="file"):
        tuning.save(tmp_path / "file" / "tuning.json", HELD)


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "tuning.json" / "sub").mkdir(parents=True)
    with pytest.raises(OSError, match="tuning"):
        tuning.save(tmp_path / "tuning.json", HELD)
    assert [p.name for p in tmp_path.iterdir()] == ["tuning.json"]


def test_the_first_start_measures_and_the_second_reads(ops: Ops, tmp_path: Path) -> None:
    packer: Packer = ops.pack_linear.__self__  # pyright: ignore[reportFunctionMemberAccess]
    path = tmp_path / "tuning.json"
    has_dot = ops.device.arch == "avx512bf16"
    first = tuning.at_start(packer.kernels, path, has_dot=has_dot)
    assert has_dot or not first.dot
    tuning.save(path, dataclasses.replace(first, blocks=BLOCKS))
    assert tuning.at_start(packer.kernels, path, has_dot=has_dot).blocks == BLOCKS


class Timed:
    """Kernels whose products take as long as their blocks say; a clock that goes with them."""

    def __init__(self, costs: dict[tuple[int, int], float]) -> None:
        self.costs = costs
        self.seen: set[tuple[int, int]] = set()
        self.now = 0.0

    def linear(self, kind: int, *args: Any) -> None:
        self.seen.add(args[-2:])
        self.now += self.costs.get(args[-2:], 1.0) * 1e-3

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(("cost", "wins"), [(0.9, True), (0.97, False), (2.0, False)])
def test_the_first_start_changes_blocks_only_for_a_clear_gain(
    monkeypatch: pytest.MonkeyPatch, cost: float, wins: bool
) -> None:
    block, panel = tuning.computed_blocks()
    kernels = Timed({(block // 2, panel): cost})
    monkeypatch.setattr(tuning, "time", kernels)
    found = tuning.better_blocks(kernels, tuning.K_F32)  # pyright: ignore[reportArgumentType]
    assert found == ((block // 2, panel) if wins else None)


def test_the_first_start_tries_panels_cut_up_for_the_first_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "cache_sizes", lambda: (32 << 10, 1 << 20))
    assert tuning.computed_blocks() == (384, 256)
    kernels = Timed({(384, 24): 0.5})
    monkeypatch.setattr(tuning, "time", kernels)
    found = tuning.better_blocks(kernels, tuning.K_F32)  # pyright: ignore[reportArgumentType]
    assert found == (384, 24)


def test_blocks_are_a_kib_at_least_however_small_the_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels divide by them."""
    monkeypatch.setattr(tuning, "cache_sizes", lambda: (1024, 2048))
    assert tuning.computed_blocks() == (1, 1)
    kernels = Timed({})
    monkeypatch.setattr(tuning, "time", kernels)
    assert tuning.better_blocks(kernels, tuning.K_F32) is None  # pyright: ignore[reportArgumentType]
    assert min(min(blocks) for blocks in kernels.seen) >= 1


def test_the_first_start_does_not_measure_long(monkeypatch: pytest.MonkeyPatch) -> None:
    block, panel = tuning.computed_blocks()
    kernels = Timed({(block // 2, panel): 0.5, (block, panel): 100.0})
    monkeypatch.setattr(tuning, "time", kernels)
    assert tuning.better_blocks(kernels, tuning.K_F32) is None  # pyright: ignore[reportArgumentType]
    assert kernels.now < 0.3


def test_blocks_change_no_bit(ops: Ops) -> None:
    packer: Packer = ops.pack_linear.__self__  # pyright: ignore[reportFunctionMemberAccess]
    generator = torch.Generator().manual_seed(0)
    w, x = torch.randn(70, 900, generator=generator), torch.randn(150, 900, generator=generator)
    leaves = [packer.pack(w.to(t)) for t in (torch.float32, torch.bfloat16, torch.float16)]
    for leaf in (*leaves, packer.quantize(w)):
        assert not isinstance(leaf, torch.Tensor)
        results = [
            packer.multiply(x, leaf, None, None, None, 0.0, 0, blocks)
            for blocks in ((384, 36), (1, 1), (16, 4), (100000, 100000))
        ]
        assert all(torch.equal(results[0], r) for r in results[1:])


class Recorder:
    """Kernels that only note the blocks they are given."""

    def __init__(self, threads: int = 2) -> None:
        self.blocks: list[tuple[int, ...]] = []
        self.threads = threads

    def linear(self, *args: int) -> None:
        self.blocks.append(args[-2:])

    quant_linear = linear


def test_blocks_that_were_measured_are_looked_up_by_all_that_counts() -> None:
    recorder = Recorder()
    tuned = tuning.Tuning(
        False,
        (7, 8),
        {(2, "fp32", False, 32, 8, 5): (11, 12), (3, "fp32", False, 32, 8, 6): (13, 14)},
    )
    packer = Packer(recorder, {torch.float32: 0, torch.float16: 1}, tuned)  # pyright: ignore[reportArgumentType]
    plain = PackedLinear(torch.zeros(32 * 8), 32, 8, False)
    for rows in (1, 15, 16, 31, 32):
        packer.multiply(torch.zeros(rows, 8), plain, None, None, None, 0.0)
    assert recorder.blocks == [(7, 8), (7, 8), (11, 12), (11, 12), (7, 8)]
    recorder.blocks.clear()
    half = PackedLinear(torch.zeros(32 * 8, dtype=torch.float16), 32, 8, False)
    gated = PackedLinear(torch.zeros(32 * 8), 32, 8, True)
    other = PackedLinear(torch.zeros(16 * 16), 16, 16, False)
    for leaf in (half, gated, other):
        act = "silu" if leaf.gated else None
        packer.multiply(torch.zeros(16, leaf.k), leaf, None, None, act, 0.0)
    assert recorder.blocks == [(7, 8)] * 3


def product(*weights: Any, **changes: Any) -> Product:
    gated = getattr(weights[0], "gated", False)
    whole: dict[str, Any] = {
        "weights": weights, "n": 64, "k": 32, "bias": False, "residual": False,
        "act": "silu" if gated else None, "cap": 0.0, "most": 8192,
        "dtype": torch.float32,
    }  # fmt: skip
    return Product(**whole | changes)


def test_a_tuner_times_every_kind_of_product(ops: Ops, tmp_path: Path) -> None:
    packer: Packer = ops.pack_linear.__self__  # pyright: ignore[reportFunctionMemberAccess]
    tuner = BlockTuner(packer, tmp_path / "tuning.json", False)
    w = torch.ones(64, 32)
    for p in (
        product(packer.pack(w), packer.pack(w)),
        product(packer.pack(w, gated=True), bias=True),
        product(packer.pack(w), bias=True, residual=True, cap=30.0),
        product(packer.quantize(w)),
    ):
        first, *others = tuner.candidates(p, (16, 31))
        assert first == packer.default_blocks and first not in others
        for choice in (first, others[0]):
            assert 0 < tuner.seconds(p, (16, 31), choice) < 1
        assert tuner.near(p, first) == ()


def test_ranges_of_rows_are_the_buckets_of_the_lookup(ops: Ops, tmp_path: Path) -> None:
    packer: Packer = ops.pack_linear.__self__  # pyright: ignore[reportFunctionMemberAccess]
    tuner = BlockTuner(packer, tmp_path / "tuning.json", False)
    leaf = packer.pack(torch.ones(64, 32))
    ranges = tuner.buckets(product(leaf))
    assert ranges[0][0] == 16 and ranges[-1][0] == 4096
    for first, last in ranges:
        assert tuning.bucket(first) == tuning.bucket(last) != tuning.bucket(last + 1)
    assert [first for first, _ in tuner.buckets(product(leaf, most=40))] == [16, 32]
    assert tuner.buckets(product(torch.zeros(64, 32).double())) == ()


def test_what_a_tuner_keeps_is_what_the_next_table_uses(tmp_path: Path) -> None:
    path, recorder = tmp_path / "tuning.json", Recorder()
    kinds = {torch.float32: 0}
    leaf = PackedLinear(torch.zeros(64 * 32), 64, 32, False)
    packer = Packer(recorder, kinds)  # pyright: ignore[reportArgumentType]
    mine = product(leaf)
    tuning.save(path, HELD)
    tuner = BlockTuner(packer, path, True)
    tuner.keep(mine, (32, 63), (21, 22))
    tuner.keep(mine, (64, 127), (23, 24))
    held = tuning.load(path)
    assert held is not None and (held.dot, held.default) == (HELD.dot, HELD.default)
    assert held.blocks.items() > BLOCKS.items()
    table = Packer(recorder, kinds, held)  # pyright: ignore[reportArgumentType]
    for rows in (31, 32, 63, 64):
        table.multiply(torch.zeros(rows, 32), leaf, None, None, None, 0.0)
    assert recorder.blocks == [(300, 30), (21, 22), (21, 22), (23, 24)]
    tuner.keep(mine, (32, 63), None)
    tuner.keep(mine, (64, 127), None)
    assert tuning.load(path) == HELD


@pytest.mark.parametrize("faster", [tuning.K_BF16, tuning.K_BF16_DOT])
@pytest.mark.parametrize("calls", [15, 30, 45])
def test_what_disturbs_the_first_start_for_a_moment_decides_nothing(
    monkeypatch: pytest.MonkeyPatch, faster: int, calls: int
) -> None:
    """Whichever kernel ran first is not at a disadvantage for it."""

    class Disturbed(Timed):
        def __init__(self) -> None:
            super().__init__({})
            self.count = 0

        def linear(self, kind: int, *args: Any) -> None:
            self.count += 1
            self.now += (1.0 if kind == faster else 1.5) * (2.0 if self.count <= calls else 1.0)

    kernels = Disturbed()
    monkeypatch.setattr(tuning, "time", kernels)
    dot = tuning.dot_is_faster(kernels)  # pyright: ignore[reportArgumentType]
    assert dot == (faster == tuning.K_BF16_DOT)
