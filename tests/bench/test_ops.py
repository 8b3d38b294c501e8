"""bench.ops: what is compared computes the same thing, figures count what they say, cases that
fail are said. The device is the stand-in, so times mean nothing here."""

from tests.kernels_triton.stand_in import stand_in  # isort: skip  (chooses the interpreter)

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.ops import __main__ as bench_ops
from bench.ops import attention, batches, checks, exact, report, tutorial
from bench.ops.batches import Chunk, Limits
from bench.ops.shapes import SHAPES
from bench.ops.timing import Clock, Roofline
from xylite.ops import Ops, reference

TINY = SHAPES["tiny"]
CPU = torch.device("cpu")
# A prompt, the rest of one, a decode, a verify, and a chunk too long for the padded batch.
CHUNKS = [Chunk(0, 9), Chunk(20, 5), Chunk(30, 1), Chunk(17, 4, 3), Chunk(3, 40)]


def expected(work: attention.Work) -> torch.Tensor:
    q, kv, batch = attention.stored(reference.TABLE, work)
    return reference.attention(q, kv, batch, batches.kind_of(work.shape))


@pytest.fixture(scope="module")
def work() -> attention.Work:
    return attention.make_work(TINY, CHUNKS, torch.float32, CPU)


def test_the_pool_holds_the_keys_that_rivals_are_given(work):
    """Against attention written out, one query and one head at a time."""
    out, row = expected(work).view(-1, TINY.heads, TINY.head_dim), 0
    for chunk, start in zip(CHUNKS, work.start, strict=False):
        for i in range(chunk.tokens):
            keys = slice(start, start + chunk.past + i + 1)
            for h in range(TINY.heads):
                k, v = (x[keys, h // TINY.group] for x in (work.k, work.v))
                p = (k @ work.q[row, h] * TINY.head_dim**-0.5).softmax(0)
                assert torch.allclose(out[row, h], p @ v, atol=1e-5)
            row += 1


def test_our_attention_computes_what_the_reference_computes(work):
    assert torch.allclose(attention.own(stand_in("cuda"), work)(), expected(work), atol=1e-4)


def test_attention_without_a_kernel_for_these_heads_gets_no_task_lists(work):
    table = stand_in("cuda")
    device = dataclasses.replace(table.device, classes_of=lambda *_: ())
    table = dataclasses.replace(table, device=device, attention=reference.attention)
    assert attention.stored(table, work)[2].tasks == ()


@pytest.mark.parametrize("tiles", range(3))
def test_the_tutorials_attention_computes_the_same(work, tiles, monkeypatch):
    monkeypatch.setattr(tutorial, "ATTENTION", [tutorial.ATTENTION[tiles]])
    run = attention.tutorial(work, Clock(CPU), tune=False)
    assert torch.allclose(run(), expected(work), atol=1e-4)


@pytest.mark.parametrize("chunks", [CHUNKS, CHUNKS[2:4], CHUNKS[4:]])
def test_torchs_attention_computes_the_same(chunks):
    work = attention.make_work(TINY, chunks, torch.float32, CPU)
    assert torch.allclose(attention.sdpa(work)(), expected(work), atol=1e-4)


@pytest.mark.parametrize("tiles", [3, 5, 6])
def test_the_tutorials_product_is_a_product(tiles):
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(33, 70, generator=g), torch.randn(90, 70, generator=g)
    out = tutorial.matmul(x, w, tutorial.MATMUL[tiles])
    assert torch.allclose(out, x @ w.T, atol=1e-4)


def test_work_and_traffic_of_attention_are_counted(work):
    pairs = sum(sum(range(c.past + 1, c.kv_len + 1)) for c in CHUNKS)
    assert work.flops == 4 * pairs * TINY.heads * TINY.head_dim
    keys = sum(c.kv_len for c in CHUNKS)
    tokens = sum(c.tokens for c in CHUNKS)
    elements = 2 * keys * TINY.kv_heads + 2 * tokens * TINY.heads
    assert work.num_bytes == 4 * elements * TINY.head_dim


@pytest.mark.parametrize("mix", ["prefill", "decode", "verify", "mixed"])
def test_iterations_are_drawn_within_their_limits(mix):
    lengths = np.array([[300, 40], [20, 900], [5000, 3]])
    limits = Limits(num_seqs=8, budget=256, longest=512)
    for seed in range(20):
        chunks = batches.draw(np.random.default_rng(seed), lengths, mix, limits)
        assert all(c.tokens > 0 and c.past >= 0 and c.kv_len <= 512 for c in chunks)
        decoding = [c for c in chunks if c.tokens == c.drafts + 1]
        if mix in ("prefill", "mixed"):
            assert sum(c.tokens for c in chunks) == 256
        if mix in ("decode", "verify"):
            assert len(decoding) == len(chunks) == 8
            assert all(bool(c.drafts) == (mix == "verify") for c in chunks)


def test_the_roofline_is_the_slower_of_work_and_traffic():
    roof = Roofline({"": 100.0, "w8a8": 200.0}, 10.0)
    assert roof.seconds(1000, 1) == 10 and roof.seconds(1000, 1, "w8a8") == 5
    assert roof.seconds(1, 50) == 5 and roof.seconds(1000, 1, "int4") == 10


class FakeApi:
    """What torch.cuda offers for timing, with a clock of its own: a call takes 3 ms, a replay 1."""

    def __init__(self, records: bool):
        self.now, self.records, self.capturing = 0.0, records, False
        self.wait_stream = self.synchronize = lambda *others: None
        self.Stream = self.current_stream = lambda: self
        self.stream = lambda side: contextlib.nullcontext()
        self.CUDAGraph = lambda: SimpleNamespace(replay=lambda: self.spend(1e-3))

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def call(self) -> None:
        if self.capturing and not self.records:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.spend(3e-3)

    @contextlib.contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    def Event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: 1e3 * (end.at - event.at)
        return event


@pytest.mark.parametrize("records, replay, seconds", [(True, True, 1e-3), (True, False, 3e-3),
                                                      (False, True, 3e-3)])  # fmt: skip
def test_on_an_accelerator_a_replay_is_timed_where_one_can_be_recorded(records, replay, seconds):
    api = FakeApi(records)
    clock = Clock(CPU, 0.05)
    clock.device, clock._api, clock._flush = SimpleNamespace(type="cuda"), api, torch.zeros(4)
    timing = clock.time(api.call, replay=replay)
    assert timing.median == pytest.approx(seconds) and timing.least == pytest.approx(seconds)
    assert timing.replayed == (records and replay)
    assert abs(timing.repeats - 0.05 / seconds) <= 1.01


def test_a_ratio_is_to_the_quickest_rival_of_a_name():
    row = {"seconds": 2.0, "rivals": {"torch": {"seconds": 5.0}, "torch flex": {"seconds": 4.0},
                                      "tutorial": {"error": "no"}}}  # fmt: skip
    assert report.ratio(row, "torch") == 2 and report.ratio(row, "tutorial") is None


def measured(tmp_path: Path, table: Ops, *words: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "ops.json"
    begin = ["--shapes", "tiny", "--dtype", "float16", "--figure-seconds", "0"]
    code = bench_ops.main([*begin, "--out", str(path), *words], table)
    return code, json.loads(path.read_text())


@pytest.fixture
def without_norm() -> Ops:
    def fails(*args: Any) -> Any:
        raise ValueError("out of resource\nand more")

    return dataclasses.replace(stand_in("npu"), add_rms_norm=fails)


def test_every_op_has_a_row_and_a_failing_one_says_why(tmp_path, without_norm, capsys):
    code, result = measured(tmp_path, without_norm, "--rows", "5", "--formats", "plain", "int4")
    rows = result["rows"]
    assert {r["op"] for r in rows} == set(bench_ops.OPS) and result["left_out"] == 0
    for row in rows:
        if row["op"] == "add_rms_norm":
            assert row["error"] == "ValueError: out of resource" and code == 1
        else:
            assert row["seconds"] > 0 and row["flops"] > 0 and row["bytes"] > 0
            assert row["rivals"]["torch"]["seconds"] > 0
    assert {r["format"] for r in rows if r["op"] == "linear"} == {"", "int4"}
    assert result["device"]["kind"] == "npu" and result["versions"]["torch"]
    assert str(tmp_path) not in json.dumps(result)
    assert "failed: ValueError: out of resource" in capsys.readouterr().out


def test_what_has_no_time_is_left_out_and_counted(tmp_path):
    code, result = measured(tmp_path, stand_in("cuda"), "--seconds", "0", "--formats", "plain")
    assert code == 0 and result["rows"] == [] and result["left_out"] > 40


def test_an_unknown_format_is_refused_by_name(capsys):
    assert bench_ops.main(["--formats", "int3"], stand_in("cuda")) == 2
    assert "format 'int3' is not there on cuda (there is: plain, int8" in capsys.readouterr().err


CHECKED = exact.Sizes((5,), 16, (1,), (64,), 64, 40, 60, Limits(2, 9, 30), "tiny")


def test_checks_find_nothing_wrong_with_right_kernels():
    with exact.poisoned(), torch.inference_mode():
        made = checks.make_checks(stand_in("npu"), torch.float32, CHECKED)
        errors = {c.name: c.run() for c in made}
    assert len(errors) > 30 and max(errors.values()) <= 1, errors


def test_shares_of_the_checks_are_all_of_them_and_keep_families_together():
    made = checks.make_checks(stand_in("cuda"), torch.float16, checks.SMALL)
    shares = [checks.share_of(made, i, 4) for i in range(4)]
    assert sorted(c.name for share in shares for c in share) == sorted(c.name for c in made)
    families = [{c.family for c in share} for share in shares]
    assert sum(map(len, families)) == len(set().union(*families)) < len(made)


def broken(name: str) -> Ops:
    """The stand-in with one function whose first result has one wrong element."""
    table = stand_in("cuda")
    inner = getattr(table, name)

    class Wrong:
        args = getattr(inner, "args", ())

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            out = inner(*args, **kwargs)
            first = out[0] if isinstance(out, tuple) else out
            first = getattr(first, "v", first)
            at = first.view(-1)
            at[3] = at[3] == 0 if first.dtype in (torch.bool, torch.int64) else at[3] + 0.1
            return out

    return dataclasses.replace(table, **{name: Wrong()})


@pytest.mark.parametrize(
    "name",
    ["linear", "grouped_linear", "add_rms_norm", "gated_act", "embed", "qk_norm_rope_append",
     "attention", "sample", "verify", "move_slots", "copy_blocks", "zero_blocks"],
)  # fmt: skip
def test_checks_find_one_wrong_element(name):
    with exact.poisoned(), torch.inference_mode():
        made = checks.make_checks(broken(name), torch.float32, CHECKED)
        mine = [c for c in made if c.name.split()[1].startswith(name)]
        # 8-bit KV is checked at the kernel itself, not through the table.
        errors = [c.run() for c in mine if "int8 KV" not in c.name]
    assert errors and min(errors) > 1


# The plot


def drawn_from(*names: str) -> dict[str, Any]:
    figure = {"model": "tiny", "op": "linear", "format": "", "roofline_percent": 5.0}
    rows = [figure | {"name": n, "rows": r, "seconds": 1.0} for n in names for r in (1, 8)]
    return {"rows": [*rows, {"op": "sample", "error": "it failed"}]}


def test_a_plot_that_cannot_be_drawn_says_why(tmp_path: Path, monkeypatch):
    path = tmp_path / "ops.svg"
    assert report.plot(drawn_from(), path) == "no plot: there are no figures"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "matplotlib is not installed" in report.plot(drawn_from("qkv"), path)
    assert not path.exists()


@pytest.mark.parametrize("names", [("qkv", "out"), ("",)])
def test_a_plot_has_a_curve_for_each_weight_and_the_same_figures_give_the_same_file(
    tmp_path: Path, names: tuple[str, ...]
):
    path = tmp_path / "ops.svg"
    assert report.plot(drawn_from(*names), path) == f"plot: {path}"
    first = path.read_text()
    assert first.startswith("<?xml")
    assert [f"<!-- {name} -->" in first for name in names] == [bool(name) for name in names]
    report.plot(drawn_from(*names), path)
    assert path.read_text() == first
