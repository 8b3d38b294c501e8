"""What is measured is held, and what is held wrongly is measured again."""

from pathlib import Path

import pytest
import torch

from xylite.kernels_cpu import tuning
from xylite.kernels_cpu.packed import PackedLinear, Packer
from xylite.ops import Ops

BLOCKS = {(96, 64, 7): (100, 20), (64, 96, 9): (50, 10)}


def test_tuning_is_held_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "made" / "tuning.json"
    tuning.save(path, tuning.Tuning(True, BLOCKS))
    assert tuning.load(path) == tuning.Tuning(True, BLOCKS)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"version": 1}', '{"version": 1, "processor": 3, "blocks": [[1]]}']
)
def test_a_file_that_makes_no_sense_is_measured_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(text)
    assert tuning.load(path) is None


def test_another_processor_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuning.json"
    tuning.save(path, tuning.Tuning(True))
    monkeypatch.setattr(tuning, "processor", lambda: "another")
    assert tuning.load(path) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tuning.save(tmp_path / "file" / "tuning.json", tuning.Tuning(False))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_first_start_measures_and_the_second_reads(ops: Ops, tmp_path: Path) -> None:
    packer: Packer = ops.pack_linear.__self__  # pyright: ignore[reportFunctionMemberAccess]
    path = tmp_path / "tuning.json"
    has_dot = ops.device.arch == "avx512bf16"
    first = tuning.at_start(packer.kernels, path, has_dot=has_dot)
    assert has_dot or not first.dot
    tuning.save(path, tuning.Tuning(first.dot, BLOCKS))
    assert tuning.at_start(packer.kernels, path, has_dot=has_dot).blocks == BLOCKS


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


def test_blocks_that_were_measured_are_looked_up_by_shape_and_rows() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.blocks: list[tuple[int, ...]] = []

        def linear(self, *args: int) -> None:
            self.blocks.append(args[-2:])

    recorder = Recorder()
    leaf_of = {torch.float32: 0}
    packer = Packer(recorder, leaf_of, {(32, 8, 5): (11, 12)})  # pyright: ignore[reportArgumentType]
    leaf = PackedLinear(torch.zeros(32 * 8), 32, 8, False)
    for rows in (1, 15, 16, 31, 32):
        packer.multiply(torch.zeros(rows, 8), leaf, None, None, None, 0.0)
    assert [b == (11, 12) for b in recorder.blocks] == [False, False, True, True, False]


def test_tune_keeps_only_what_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {(2, 2): 1.0, (1, 2): 0.98, (2, 1): 0.5, (1, 1): 2.0}
    now = [0.0]

    class Weight:
        n, k = 10, 20

    def multiply(x: torch.Tensor, w: Weight, block: int, panel: int) -> None:
        now[0] += costs[block, panel] * (1 if len(x) > 100 else 0.99)

    monkeypatch.setattr(tuning.time, "perf_counter", lambda: now[0])
    sizes = {"block": (1, 2), "panel": (1, 2)}
    found = tuning.tune(multiply, Weight(), sizes, (2, 2))
    assert set(found.values()) == {(2, 1)}
    assert len(found) == len(tuning.BUCKETS)
    costs[2, 1] = 1.0
    assert tuning.tune(multiply, Weight(), sizes, (2, 2)) == {}
