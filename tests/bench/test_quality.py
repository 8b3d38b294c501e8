"""bench.quality: windows, figures, and the two together on the demo model."""

import argparse
import json
import math
from pathlib import Path

import pytest

from bench import chats, quality
from bench.chats import Chats
from bench.quality import Answers, Scored
from xylite.errors import ConfigError

NO_CHATS = Chats([], [])


@pytest.mark.parametrize("length", [2, 3, 7, 8, 9, 20, 21])
@pytest.mark.parametrize(("window", "stride"), [(8, 4), (8, 7), (8, 1), (2, 1), (1000, 10)])
def test_every_token_but_the_first_is_scored_once_with_context(
    length: int, window: int, stride: int
):
    scored: list[int] = []
    for start, end, first in quality.windows(length, window, stride):
        assert 0 <= start < first < end <= length
        assert end - start <= window
        assert first - start >= min(window - stride, first)
        scored += range(first, end)
    assert scored == list(range(1, length))


def test_perplexity_is_the_inverse_of_the_mean_probability():
    assert quality.perplexity([Scored(math.log(0.5), 0), Scored(math.log(0.125), 0)]) == (
        pytest.approx(4.0)
    )


def test_figures_compare_with_the_first_variant():
    first = Answers({"t": [Scored(-1.0, 5), Scored(-1.0, 6)]}, [(1, 2, 3), (4, 5, 6)], NO_CHATS)
    ours = Answers({"t": [Scored(-1.1, 5), Scored(-1.1, 7)]}, [(1, 2, 3), (4, 9, 6)], NO_CHATS)
    found = quality.compared(ours, first)
    assert found["texts"]["t"]["ratio"] == pytest.approx(math.exp(0.1), abs=1e-4)
    assert found["texts"]["t"]["top1"] == 0.5
    assert (found["continued_mean"], found["continued_whole"]) == (2, 0.5)


def test_texts_together_count_every_token_once():
    first = Answers({"a": [Scored(-1.0, 5)], "b": [Scored(-4.0, 6)] * 2}, [], NO_CHATS)
    ours = Answers({"a": [Scored(-1.0, 5)], "b": [Scored(-4.0, 6), Scored(-7.0, 7)]}, [], NO_CHATS)
    found = quality.compared(ours, first)["texts"]
    assert list(found) == ["a", "b", quality.ALL]
    assert found[quality.ALL]["perplexity"] == pytest.approx(math.exp(4.0), abs=1e-3)
    assert found[quality.ALL]["ratio"] == pytest.approx(math.exp(1.0), abs=1e-4)
    assert (found[quality.ALL]["tokens"], found[quality.ALL]["top1"]) == (3, 0.6667)


def test_divergence_is_that_of_the_whole_distribution_where_all_tokens_are_listed():
    p, q = {1: 0.5, 2: 0.3, 3: 0.2}, {1: 0.25, 2: 0.25, 3: 0.5}
    exact = sum(p[t] * math.log(p[t] / q[t]) for t in p)
    listed = [{t: math.log(x) for t, x in d.items()} for d in (q, p)]
    assert chats.divergence(*listed) == pytest.approx(exact)
    assert chats.divergence(listed[1], listed[1]) == 0.0


def test_divergence_never_exceeds_that_of_the_whole_distribution():
    """Tokens that only one of them lists count as one with all others."""
    p, q = {1: 0.5, 2: 0.3, 3: 0.2}, {1: 0.5, 2: 0.1, 3: 0.4}
    exact = sum(p[t] * math.log(p[t] / q[t]) for t in p)
    ours = {1: math.log(0.5), 3: math.log(0.4)}
    theirs = {1: math.log(0.5), 2: math.log(0.3)}
    assert chats.divergence(ours, theirs) == 0.0  # token 1 and the rest are as likely in both
    ours[2] = math.log(0.1)
    assert chats.divergence(ours, theirs) == pytest.approx(
        0.3 * math.log(0.3 / 0.1) + 0.2 * math.log(0.2 / 0.4)
    )
    assert 0.0 < chats.divergence(ours, theirs) <= exact + 1e-12


def test_figures_of_chats_count_positions_and_answers():
    sure, even = {5: math.log(0.9), 6: math.log(0.1)}, {5: math.log(0.4), 6: math.log(0.6)}
    first = Chats([(5, 6), (5,)], [[sure, sure], [sure]])
    ours = Chats([(5, 6), (6,)], [[sure, even], [sure]])
    found = chats.compared(ours, first)
    assert found["divergence"] == pytest.approx(chats.divergence(even, sure) / 3, abs=1e-5)
    assert (found["top1"], found["same"]) == (0.6667, 0.5)
    assert (found["positions"], found["answers"]) == (3, 2)


def test_the_table_in_the_readme_is_the_last_result():
    text = quality.README.read_text()
    assert quality.with_quality(text, json.loads(quality.RESULT.read_text())) == text


def test_the_result_holds_no_place_of_a_machine():
    assert "/" not in json.loads(quality.RESULT.read_text())["command"].replace(
        "bench/results/quality.json", ""
    )
    assert quality._without_folder("/somewhere/model") == "model"
    assert quality._without_folder("bench/results/quality.json") == "bench/results/quality.json"


def test_a_format_that_the_device_lacks_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    async def answers(variant: str, args: argparse.Namespace, first: Answers | None) -> Answers:
        if variant == "int4":
            raise ConfigError("there is no int4 here", param="quantization")
        return Answers({"t": [Scored(-1.0, 5)]}, [(1, 2)], NO_CHATS)

    monkeypatch.setattr(quality, "answers", answers)
    output = tmp_path / "q.json"
    assert quality.main(["--variant", "int4", "stored", "--output", str(output)]) == 0
    assert list(json.loads(output.read_text())["variants"]) == ["stored"]
    assert "left out: int4: there is no int4 here" in capsys.readouterr().err
    assert quality.main(["--variant", "int4"]) == 2


def said(monkeypatch: pytest.MonkeyPatch, **logprobs: float) -> list[str]:
    """Let each variant score its only token so; the list gets the variants that are asked."""
    asked: list[str] = []

    async def answers(variant: str, args: argparse.Namespace, first: Answers | None) -> Answers:
        asked.append(variant)
        return Answers({"t": [Scored(logprobs[variant], 5)]}, [(1, 2)], NO_CHATS)

    monkeypatch.setattr(quality, "answers", answers)
    return asked


def test_a_variant_is_added_to_an_earlier_result_with_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "q.json"
    asked = said(monkeypatch, bfloat16=-1.0, int8=-2.0, float32=-0.9)
    assert quality.main(["--variant", "bfloat16", "int8", "--output", str(path)]) == 0
    before = json.loads(path.read_text())
    asked.clear()
    assert quality.main(["--variant", "float32", "--add-to", str(path)]) == 0
    assert asked == ["bfloat16", "float32"]
    after = json.loads(path.read_text())
    assert list(after["variants"]) == ["bfloat16", "float32", "int8"]
    ours = after["variants"].pop("float32")
    assert ours["texts"]["t"]["ratio"] == pytest.approx(math.exp(-0.1), abs=1e-4)
    assert ours["run"]["command"].startswith("python -m bench.quality --variant float32 --add-to")
    assert {**before, "variants": 0} == {**after, "variants": 0}
    assert after["variants"] == before["variants"]
    text = quality.markdown(json.loads(path.read_text()))
    assert f" float32: `{ours['run']['command']}`, {ours['run']['date'][:10]}, commit" in text


@pytest.mark.parametrize(
    ("words", "first", "told", "num_asked"),
    [
        (["--window", "2048"], -1.0, "window differs: 1024 there, 2048 here", 0),
        ([], -1.01, "bfloat16 has a perplexity of 2.7456 on t now, and had 2.7183", 2),
    ],
)
def test_what_was_measured_otherwise_is_not_added_to(
    words: list[str], first: float, told: str, num_asked: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    path = tmp_path / "q.json"
    said(monkeypatch, bfloat16=-1.0)
    assert quality.main(["--variant", "bfloat16", "--output", str(path)]) == 0
    before = path.read_text()
    asked = said(monkeypatch, bfloat16=first, int8=-2.0)
    try:
        code = quality.main(["--variant", "int8", "--add-to", str(path), *words])
    except SystemExit as e:
        code = e.code
    assert code == 2 and len(asked) == num_asked
    assert told in capsys.readouterr().err
    assert path.read_text() == before


def test_a_file_cannot_be_shuffled(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        quality.main(["--variant", "int4-shuffled", "--model", str(tmp_path / "m.gguf")])
    assert "int4-shuffled needs a directory with model.safetensors" in capsys.readouterr().err


def test_every_text_can_be_read():
    names = sorted(p.stem for p in quality.TEXTS.glob("*.jsonl"))
    assert names == ["gsm8k", "humaneval", "sonnets"]
    assert all(len(quality.read_text(name)) > 5000 for name in names)


def test_prompts_come_from_every_text():
    texts = {"a": list(range(1000)), "b": list(range(5000, 5100))}
    found = quality.prompts_of(texts, 5)
    assert [len(p) for p in found] == [quality.PROMPT_TOKENS] * 5
    assert len({tuple(p) for p in found}) == 5
    assert {p[0] >= 5000 for p in found} == {True, False}


@pytest.mark.model
def test_windows_of_any_size_give_a_texts_first_window_the_same_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def figures(window: int, stride: int) -> float:
        words = ["--variant", "float32", "--text", "sonnets", "--max-tokens", "24"]
        words += ["--window", str(window), "--stride", str(stride)]
        words += [
            "--prompts",
            "1",
            "--new-tokens",
            "2",
            "--questions",
            "0",
            "--output",
            str(tmp_path / "q.json"),
        ]
        assert quality.main(words) == 0
        found = json.loads((tmp_path / "q.json").read_text())["variants"]["float32"]
        assert found["texts"]["sonnets"]["tokens"] == 23
        assert found["texts"]["sonnets"]["top1"] == 1.0
        return found["texts"]["sonnets"]["perplexity"]

    # Less context makes it worse; a window that holds everything is not cut.
    assert figures(24, 8) == pytest.approx(figures(1000, 500))
    assert figures(4, 2) > figures(24, 8)
    assert "sonnets" in capsys.readouterr().out


def test_chats_without_a_position_say_nothing_and_leave_their_cells_empty():
    nothing = Chats([()], [[]])
    assert chats.compared(nothing, nothing) is None
    result = json.loads(quality.RESULT.read_text())
    for found in result["variants"].values():
        found["chats"] = None
    rows = [line for line in quality.markdown(result).splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1
