"""Tiles are tuned on the stand-in device: the whole way, from the model to the next start."""

from tests.kernels_triton import stand_in  # isort: skip  (chooses the interpreter)

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

from tests.models import tiny
from xylite import cli, ops, tune
from xylite.kernels_triton import launch, tuned, tuner
from xylite.kernels_triton.device import Services
from xylite.kernels_triton.tiles import FLOAT, HALF, INTERPRETER, TileTable, for_chip
from xylite.kernels_triton.tuner import Choice, TileTuner
from xylite.kernels_triton.weights import pack, quantise_int4, quantise_int8
from xylite.ops import Product
from xylite.ops.shared.triton_table import assemble

BUCKET = (17, 64)
CPU = torch.device("cpu")


@pytest.fixture
def file(tmp_path: Path) -> tuned.TunedFile:
    return tuned.TunedFile(tmp_path / "tiles.json", INTERPRETER, "stand-in", "interpreter")


def product(*weights, **changes) -> Product:
    w = weights[0]
    whole = {
        "weights": weights, "n": w.num_rows, "k": w.num_cols, "bias": False, "residual": False,
        "act": None, "cap": 0.0, "most": 20, "dtype": torch.float32,
    }  # fmt: skip
    return Product(**whole | changes)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def tile_tuner(target, file) -> TileTuner:
    return TileTuner(target, file, lambda run: (run(), 1.0)[1], None)


KINDS = {
    "linear": product(pack(random(70, 96)), pack(random(70, 96))),
    "epilogue": product(pack(random(70, 96)), bias=True, residual=True, cap=3.0),
    "gated": product(pack(random(140, 96)), act="silu", bias=True),
    "gelu": product(pack(random(140, 96)), act="gelu_tanh"),
    "int8": product(quantise_int8(random(70, 96))),
    "w8a8": product(quantise_int8(random(70, 96), activations=True), residual=True),
    "int4": product(quantise_int4(random(70, 96)), dtype=torch.float16),
    "half": product(pack(random(70, 96).half()), dtype=torch.float16),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_product_is_right_with_the_built_in_tiles(tile_tuner, kind):
    p = KINDS[kind]
    first, *others = tile_tuner.candidates(p, BUCKET)
    assert tile_tuner.seconds(p, BUCKET, first) == 1.0 / len(p.weights)
    assert first not in others
    assert others or kind == "int4"


def test_candidates_that_compute_something_else_are_left_out(tile_tuner, monkeypatch):
    p = KINDS["linear"]
    first, other, *_ = tile_tuner.candidates(p, BUCKET)
    linear = launch.linear

    def wrong(target, x, w, *args, **kwargs):
        out = linear(target, x, w, *args, **kwargs)
        if target.tiles.rows[0].sizes == dict(other.sizes):
            out[-1, -1] += 0.1
        return out

    monkeypatch.setattr(launch, "linear", wrong)
    assert tile_tuner.seconds(p, BUCKET, other) == math.inf
    assert tile_tuner.seconds(p, BUCKET, first) < math.inf


@pytest.mark.parametrize(
    "error", [OutOfResources(2, 1, "shared memory"), RuntimeError("PassManager::run failed")]
)
def test_candidates_that_do_not_compile_are_left_out(tile_tuner, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(launch, "linear", fail)
    p = KINDS["linear"]
    (first, *_) = tile_tuner.candidates(p, BUCKET)
    assert tile_tuner.seconds(p, BUCKET, first) == math.inf


def test_a_candidate_is_recorded_once_and_then_replayed(target, file):
    recorded, ran = [], []

    def capture(run):
        recorded.append(run)
        return lambda: ran.append(run)

    made = TileTuner(target, file, lambda run: (run(), 2.0)[1], capture)
    p = KINDS["linear"]
    (first, *_) = made.candidates(p, BUCKET)
    for _ in range(3):
        assert made.seconds(p, BUCKET, first) == 1.0
    assert (len(recorded), len(ran)) == (1, 3)
    made.seconds(p, (1, 16), first)
    assert len(recorded) == 2


def test_near_a_choice_are_other_swizzles_warps_and_stages(file):
    target = launch.Target(132, 132, for_chip("sm_90"), launch.Counts(CPU))
    made = TileTuner(target, file, lambda run: 1.0, None)
    p = product(
        pack(torch.zeros(4096, 4096, dtype=torch.bfloat16)), dtype=torch.bfloat16, most=8192
    )
    (choice, *_) = made.candidates(p, (65, 256))
    near = made.near(p, choice)
    assert {dict(c.sizes)["BAND"] for c in near} == set(tuner.BANDS)
    assert {dict(c.options)["num_warps"] for c in near} == {4, 8}
    assert len({dict(c.options)["num_stages"] for c in near}) == 3


@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bucket", [(1, 16), (17, 64), (1025, 0)])
def test_candidates_of_cuda_fit_the_chip(file, chip, kind, bucket):
    target = launch.Target(132, 132, for_chip(chip), launch.Counts(CPU))
    made = TileTuner(target, file, lambda run: 1.0, None)
    p = dataclasses.replace(KINDS[kind], most=8192)
    found = made.candidates(p, bucket)
    assert 3 < len(found) < 48 and len(set(found)) == len(found)
    both = 2 if p.act else 1
    wide = {"int8": 1, "w8a8": 1, "int4": 1, "half": 2}.get(kind, 4)
    for choice in found[len([r for r in target.tiles.rows if r.op in tuned.GEMM_OPS]) :]:
        s, o = dict(choice.sizes), dict(choice.options)
        x_bytes = {"w8a8": 1, "half": 2, "int4": 2}.get(kind, 4 if wide == 4 else 2)
        shared = o["num_stages"] * s["TILE_K"] * (s["TILE_M"] * x_bytes + both * s["TILE_N"] * wide)
        assert shared <= tuner.SHARED_BYTES[chip]
    if kind == "int4":
        assert len({dict(c.sizes)["TILE_K"] for c in found}) == 1


@pytest.mark.parametrize("generation", ["1.0.0", "1.1.0", "1.2.0"])
def test_candidates_of_ascend_keep_the_options_of_their_kernel(file, generation):
    target = launch.Target(24, 48, for_chip(f"910b-{generation}"), launch.Counts(CPU))
    made = TileTuner(target, file, lambda run: 1.0, None)
    for kind, p in KINDS.items():
        found = made.candidates(dataclasses.replace(p, most=8192), (65, 256))
        assert len(found) > 1, kind
        assert len({c.options for c in found}) == 1


def test_rows_are_kept_for_every_range_and_used_where_they_belong(tile_tuner, file, target):
    p = dataclasses.replace(KINDS["gated"], most=8192)
    assert tile_tuner.buckets(p) == [(1, 16), (17, 64), (65, 256), (257, 1024), (1025, 0)]
    assert tile_tuner.buckets(dataclasses.replace(p, most=16)) == [(1, 16)]
    first, other, *_ = tile_tuner.candidates(p, (17, 64))
    tile_tuner.keep(p, (1, 16), None)
    tile_tuner.keep(p, (17, 64), other)
    table = for_chip(INTERPRETER, file.rows())

    def used(rows: int, n: int = 70) -> Choice:
        row = table.gemm("gated", FLOAT, rows, n, 96, 3)
        return Choice.of(row.sizes, row.options)

    assert [used(r) == other for r in (1, 16, 17, 64, 65)] == [False, False, True, True, False]
    assert used(16) == used(65) == used(17, n=140) == first
    again = TileTuner(dataclasses.replace(target, tiles=table), file, lambda run: 1.0, None)
    assert again.candidates(p, (17, 64))[0] == first


def services(file: tuned.TunedFile, **changes) -> Services:
    return Services(
        device=CPU, chip=INTERPRETER, arch="stand-in", cores=3, vector_cores=3,
        memory=lambda: (1 << 30, 1 << 30), synchronize=lambda: None, buckets=(4, 24),
        tuned=file.rows(), tuned_file=file, **changes,
    )  # fmt: skip


def test_a_table_without_a_file_has_no_tuner(file):
    assert stand_in.stand_in("cuda").tuner is None
    assert assemble("cuda", services(file)).tuner is not None


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_the_command_tunes_the_device_and_the_next_start_uses_it(
    kind, file, tmp_path, monkeypatch, capsys
):
    """A device on which one tile is quicker than the others, and one swizzle of it once more."""
    cfg = tiny.config(num_hidden_layers=1)
    model = tiny.save_directory(tmp_path / "model", cfg, tiny.tensors(cfg))
    quick = {"TILE_M": 16, "TILE_N": 64, "TILE_K": 64, "BAND": 4}
    now, used = [0.0], []
    linear = launch.linear

    def noted(target: launch.Target, *args, **kwargs):
        rows: TileTable = target.tiles
        sizes = rows.rows[0].sizes
        used.append(0.1 if sizes == quick else 0.2 if sizes["TILE_M"] == 16 else 0.4)
        return linear(target, *args, **kwargs)

    def seconds(run) -> float:
        used.clear()
        run()
        took = sum(used)
        now[0] += took
        return took

    monkeypatch.setattr(launch, "linear", noted)
    monkeypatch.setattr(tune, "MOST_ROWS", 5)
    monkeypatch.setattr(tune, "MOST_LOGIT_ROWS", 2)
    monkeypatch.setattr(tune, "LONGEST_S", math.inf)
    measure = tune.measure
    monkeypatch.setattr(tune, "measure", lambda *a: measure(*a[:3], 0.0, clock=lambda: now[0]))
    monkeypatch.setattr(cli, "environment", dict)
    monkeypatch.setattr(ops, "load", lambda device: assemble(kind, services(file, seconds=seconds)))
    assert cli.main(["tune", str(model), "--device", kind]) == 0
    out = capsys.readouterr().out
    assert out.count("300 %  16x64x64 b4") == 5, out
    assert "5 of 5 choices are faster" in out and str(file.path) in out
    rows = file.rows()
    assert len(rows) == 5 and all(dict(r.sizes) == quick and r.max_rows == 16 for r in rows)
    next_start = assemble(kind, services(file))
    used.clear()
    w = next_start.pack_linear(random(128, 64))
    want = random(4, 64) @ random(128, 64).T
    assert torch.allclose(next_start.linear(random(4, 64), w), want, atol=1e-4)
    target: launch.Target = next_start.linear.args[0]
    assert dict(target.tiles.gemm("linear", FLOAT, 4, 128, 64, 3).sizes) == quick
    assert dict(target.tiles.gemm("linear", HALF, 4, 128, 64, 3).sizes) != quick
