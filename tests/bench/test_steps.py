"""bench.ops.steps: what a step must do is counted, and set against what the machine can do. The
table is the reference, so times mean nothing here."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.compare import machine
from bench.ops import peak, steps, work
from bench.ops.batches import Chunk
from bench.ops.shapes import SHAPES
from bench.ops.timing import Roofline
from bench.ops.work import Work
from xylite.ops import reference

TINY = SHAPES["tiny"]
CHUNKS = {"prefill": (Chunk(0, 5),), "both": (Chunk(6, 1), Chunk(3, 2))}
ROOF = Roofline({"": 1e3, "float32": 1e2, "int8": 1e4}, bandwidth=10.0, cache=100.0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "STEPS", CHUNKS)
    monkeypatch.setattr(steps, "TURNS", 1)
    monkeypatch.setattr(steps, "limits_of", lambda *_: lambda: ROOF)


def counted(chunks: tuple[Chunk, ...]) -> dict[str, Work]:
    model = steps.Model(reference.TABLE, TINY, torch.float32)
    with torch.inference_mode():
        return steps.work_of(model.step_of(chunks), reference.TABLE, chunks, TINY.vocab, "")


def test_the_work_of_a_step_is_that_of_its_products_and_visible_keys(small: None):
    found = counted(CHUNKS["both"])
    tokens, rows = 3, 2  # logits are wanted of each chunk's last token
    for n, k, gated in TINY.weights.values():
        one = found[f"linear {n // 2 if gated else n} of {k}"]
        assert one.flops == TINY.layers * 2 * tokens * n * k
        assert one.memory_bytes == TINY.layers * n * k * 4
        out = n // 2 if gated else n
        assert one.cached_bytes == TINY.layers * tokens * (k + out) * 4
        assert one.calls == TINY.layers
    head = found[f"linear {TINY.vocab} of {TINY.width}"]
    assert head.flops == 2 * rows * TINY.vocab * TINY.width
    assert found["embed"].memory_bytes == tokens * TINY.width * 4
    # One after 6 sees 7, two after 3 see 4 and 5; each head multiplies twice.
    each = TINY.heads * TINY.head_dim
    assert found["attention"].flops == TINY.layers * 2 * 2 * (7 + 4 + 5) * each
    token = 2 * TINY.kv_heads * TINY.head_dim * 4
    assert found["attention"].memory_bytes == TINY.layers * (6 + 3) * token
    assert found["qk_norm_rope_append"].memory_bytes == TINY.layers * tokens * token
    assert found["add_rms_norm"].calls == 2 * TINY.layers + 1
    assert found["sample"].cached_bytes == rows * TINY.vocab * 4


def test_a_prompts_own_keys_come_from_no_memory(small: None):
    found = counted(CHUNKS["prefill"])
    assert found["attention"].memory_bytes == 0
    pairs = 1 + 2 + 3 + 4 + 5
    assert found["attention"].flops == TINY.layers * 4 * pairs * TINY.heads * TINY.head_dim


def test_the_least_time_is_that_of_the_slowest_of_arithmetic_memory_and_caches():
    assert Work(flops=4e3, memory_bytes=10).seconds(ROOF) == 4.0
    assert Work(flops=4e3, memory_bytes=10, form="int8").seconds(ROOF) == 1.0
    assert Work(flops=1, memory_bytes=50, cached_bytes=10).seconds(ROOF) == 5.0
    assert Work(flops=1, memory_bytes=5, cached_bytes=300).seconds(ROOF) == 3.0
    # Where caches were not measured, all is memory's.
    assert Work(memory_bytes=5, cached_bytes=15).seconds(Roofline({"": 1.0}, 10.0)) == 2.0


def test_of_two_limits_the_greater_counts():
    other = Roofline({"": 2e3, "int4": 7.0}, bandwidth=5.0, cache=200.0)
    expected = Roofline({"": 2e3, "float32": 1e2, "int8": 1e4, "int4": 7.0}, 10.0, 200.0)
    assert ROOF.or_more(other) == other.or_more(ROOF) == expected


def test_a_step_can_take_no_less_than_its_ops_together():
    wanted = {"linear": Work(flops=2e3), "norm": Work(flops=1e2, form=work.FLOAT32)}
    found = steps.figures(6, 4.0, {"linear": 2.5, "norm": 2.0}, wanted, ROOF)
    assert (found["least_seconds"], found["most_tok_s"]) == (3.0, 2.0)
    assert (found["tok_s"], found["roofline_percent"]) == (1.5, 75.0)
    assert found["ops_seconds"] == 4.5
    assert {k: op["roofline_percent"] for k, op in found["ops"].items()} == {
        "linear": 80.0, "norm": 50.0,
    }  # fmt: skip


def test_steps_are_written_with_what_they_were_measured_on(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "steps.json"
    steps.main(["--shape", "tiny", "--seconds", "0", "--out", str(path)], reference.TABLE)
    result = json.loads(path.read_text())
    assert result.keys() >= {"date", "commit", "machine", "versions", "device"}
    assert result["command"].endswith("--shape tiny --seconds 0 --out steps.json")
    assert result["formats"].keys() == {"plain"}
    found = result["formats"]["plain"]
    assert found.keys() == CHUNKS.keys()
    for step in found.values():
        assert step["ops_seconds"] == pytest.approx(sum(o["seconds"] for o in step["ops"].values()))
        assert step["most_tok_s"] == pytest.approx(step["tokens"] / step["least_seconds"])
    printed = capsys.readouterr().out
    assert "linear 320 of 128 " in printed and f" of {found['both']['most_tok_s']:,.0f} tok/s)" in (
        printed
    )


def test_an_unknown_format_of_a_step_is_refused_by_name(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        steps.main(["--format", "plain", "int3"], reference.TABLE)
    assert "format 'int3' is not there on reference (there is: plain)" in capsys.readouterr().err


# The processor's own limits


@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))),
    reason="without a compiler the best product stands for the limit, as on accelerators",
)
def test_the_processors_instructions_are_measured_and_those_it_lacks_are_not():
    made = peak.Instructions(threads=2).measure("bfloat16", 0.01)
    flags = machine.describe()["flags"]
    assert made.flops[""] == made.flops["bfloat16"] >= made.flops["float32"] > 1e8
    assert ("int8" in made.flops) == ("avx512_vnni" in flags)
    if "avx512_bf16" in flags:
        assert made.flops["bfloat16"] > made.flops["float32"]
    assert made.bandwidth > 1e8 and made.cache > 1e8


def test_without_a_compiler_products_stand_for_limits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    products = Roofline({"": 5.0}, 7.0)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(steps, "roofline", lambda *args: products)
    assert steps.limits_of(reference.TABLE, torch.bfloat16, "")() == products
    assert "no C++ compiler found" in capsys.readouterr().err


def test_a_format_without_an_instruction_is_limited_by_its_product(
    monkeypatch: pytest.MonkeyPatch,
):
    class Own:
        def measure(self, dtype: str, seconds: float) -> Roofline:
            return Roofline({"": 5.0}, 9.0, 11.0)

    asked: list[Any] = []

    def products(ops: Any, clock: Any, dtype: torch.dtype, formats: Any) -> Roofline:
        asked.append(sorted(formats))
        return Roofline({"": 4.0, "int8": 3.0}, 7.0)

    monkeypatch.setattr(peak, "instructions_of", lambda ops: Own())
    monkeypatch.setattr(steps, "roofline", products)
    table = dataclasses.replace(reference.TABLE, packers={"int8": reference.TABLE.pack_linear})
    limits = steps.limits_of(table, torch.bfloat16, "int8")
    assert limits() == Roofline({"": 5.0, "int8": 3.0}, 9.0, 11.0)
    assert asked == [["", "int8"]]
