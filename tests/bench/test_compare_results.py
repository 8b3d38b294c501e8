"""bench.compare: ratios, tables, README's section and the plot, from made-up samples."""

import json
import re
import textwrap
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.compare import plot, render, report
from tests.bench.samples import result, sample, three


def test_ratios_pair_repeats_and_mark_the_best_peer_of_the_same_precision():
    found = report.ratios(
        result(
            *three("xylite auto", 20, 30, 22),
            *three("slow", 10, 10, 10),
            *three("fast", 20, 10, 20),
            *three("small", 90, 90, 90),
        )
    )
    assert [(r["peer"], r["best"]) for r in found] == [("slow", False), ("fast", True)]
    fast = found[1]
    assert (fast["ratio"], fast["low"], fast["high"]) == (1.1, 1.0, 3.0)


def test_the_best_peer_of_a_latency_is_the_lowest():
    figures = {"ttft_p50_ms": 5.0}
    found = report.ratios(
        result(
            sample("xylite auto", 0, 0, figures={"ttft_p50_ms": 4.0}),
            sample("slow", 0, 0, figures={"ttft_p50_ms": 8.0}),
            sample("fast", 0, 0, figures=figures),
        )
    )
    assert [(r["peer"], r["best"], r["ratio"]) for r in found] == [
        ("slow", False, 0.5),
        ("fast", True, 0.8),
    ]


def test_a_peer_without_the_figure_is_left_out():
    text = report.text(result(*three("xylite auto", 2, 2), *three("slow", 1, 1)))
    assert "xylite auto / slow = 2.00 (2.00 to 2.00)  <- best peer" in text
    assert "fast" not in text


def test_the_table_has_the_best_of_each_row_in_bold_and_a_dash_for_none():
    made = result(
        *three("xylite auto", 200, 210),
        *three("slow", 1, 2),
        sample("xylite auto", 0, 0, workload="start", figures={"first_token_s": 4.0}),
    )
    assert report.markdown(made) == textwrap.dedent(
        """\
        | | xylite auto | slow |
        |---|---:|---:|
        | decode 1: tok/s | **205** | 1.50 |
        | start: first token after, s | **4.00** | - |
        """
    )


def drafted(*values: float, plain: float = 100, workload: str = "chat, 8 at once") -> list[Any]:
    """Samples with drafts and without."""
    return [
        *three("xylite auto", *[plain] * len(values), workload=workload),
        *(
            sample(
                "xylite auto ngram",
                i,
                0,
                workload=workload,
                figures={"tok_s": value, "accepted": 40.0 + i, "per_verify": 2.5},
            )
            for i, value in enumerate(values)
        ),
    ]


def with_drafts(*samples: Any, **fields: Any) -> dict[str, Any]:
    made = result(*samples, **fields)
    made["engines"].append(
        {"name": "xylite auto ngram", "precision": "bf16", "is_ours": True}
        | {"baseline": "xylite auto"}
    )
    return made


def test_drafts_are_compared_with_none_and_not_with_peers():
    made = with_drafts(
        *drafted(150, 210, 180), *three("slow", 10, workload="chat, 8 at once"), *three("slow", 10)
    )
    (row,) = [r for r in report.ratios(made) if r["engine"] == "xylite auto ngram"]
    assert (row["peer"], row["ratio"], row["low"], row["high"]) == ("xylite auto", 1.8, 1.5, 2.1)
    assert "xylite auto ngram / xylite auto = 1.80 (1.50 to 2.10)\n" in report.text(made)


def test_drafts_have_a_table_of_their_own():
    made = with_drafts(*drafted(150, 210, 180), *three("xylite auto", 7, workload="chat 8"))
    assert report.drafts_markdown(made) == textwrap.dedent(
        """\
        | | text | at once | tok/s without drafts | with | times as fast | accepted, % | tokens per verify |
        |---|---|---:|---:|---:|---:|---:|---:|
        | xylite auto ngram | chat | 8 | 100 | 180 | **1.80** (1.50 to 2.10) | 41.0 | 2.50 |
        """  # noqa: E501 (a table's row is one line)
    )
    assert report.markdown(made).splitlines()[2:] == ["| chat 8: tok/s | **7.00** |"]
    assert report.markdown(with_drafts(*drafted(1))) == ""
    assert report.drafts_markdown(result(*three("xylite auto", 1))) == ""


# README


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- performance -->\nold\n<!-- /performance -->\nafter\n")
    return path


def saved(folder: Path, name: str, made: Any) -> Path:
    path = folder / f"compare-{name}.json"
    path.write_text(json.dumps(made))
    return path


def rendered(readme: Path, *paths: Path) -> int:
    plot_path = str(readme.parent / "performance.svg")
    return render.main([*map(str, paths), "--readme", str(readme), "--plot", plot_path])


def test_the_readme_is_made_of_all_full_results_by_date(tmp_path: Path):
    dates = {"a": ("2026-02", False), "b": ("2026-01", False), "c": ("2026-03", True)}
    paths = {
        name: saved(tmp_path, name, result(date=date, quick=quick))
        for name, (date, quick) in dates.items()
    }
    assert render.full_results(tmp_path) == [paths["b"], paths["a"]]


def test_a_section_has_tables_plot_and_each_run_and_stays_the_same(readme: Path):
    first = saved(
        readme.parent,
        "a",
        result(*three("xylite auto", 5, 7, 6), *three("slow", 1), date="2026-01"),
    )
    second = saved(
        readme.parent, "b", with_drafts(*drafted(150, 180), date="2026-02", commit="def")
    )
    assert rendered(readme, first, second) == 0
    once = readme.read_text()
    assert "| decode 1: tok/s | **6.00** | 1.00 |" in once
    assert "| xylite auto ngram | chat | 8 | 100 |" in once
    assert "2 cores of A CPU (avx2)" in once and "slow 1.0" in once
    assert "(performance.svg)" in once and (readme.parent / "performance.svg").exists()
    runs = [line for line in once.splitlines() if line.startswith("- [")]
    assert runs == [
        "- [compare-a.json](compare-a.json), 2026-01, commit abc, 3 turns: xylite auto, slow in "
        "decode 1.",
        "- [compare-b.json](compare-b.json), 2026-02, commit def, 2 turns: xylite auto, "
        "xylite auto ngram in chat, 8 at once.",
    ]
    assert "old" not in once
    assert once.startswith("before\n") and once.endswith("<!-- /performance -->\nafter\n")
    assert rendered(readme, first, second) == 0
    assert readme.read_text() == once


def test_what_was_measured_again_comes_from_the_later_run(readme: Path):
    early = result(*three("xylite auto", 1), *three("slow", 9), date="2026-01")
    noisy = three("xylite auto", 50, 60, clean=False)
    late = result(*noisy, date="2026-02")
    made = render.merged([early, late])
    assert report.values(made["samples"], "xylite auto", "decode 1", "tok_s") == {0: 50, 1: 60}
    assert report.values(made["samples"], "slow", "decode 1", "tok_s") == {0: 9}
    text = render.section(made, {}, "p.svg")
    assert "- 2026-01, commit abc, 1 turn: slow in decode 1." in text
    assert "xylite auto in decode 1; 2 of 2 runs were disturbed by other processes." in text
    gone = render.merged([result(*three("slow", 9)), result(*three("slow", 8), date="2026-02")])
    assert [r["date"] for r in gone["runs"]] == ["2026-02"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": "other"}, "model differs: m and other"),
        ({"machine": {"cpu": "B CPU", "cores": 2, "flags": ["avx2"]}}, "cpu: A CPU and B CPU"),
        ({"machine": {"cpu": "A CPU", "cores": 4, "flags": ["avx2"]}}, "cores: 2 and 4"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(
    changed: Any, words: str, readme: Path, capsys: pytest.CaptureFixture[str]
):
    before = readme.read_text()
    paths = [
        saved(readme.parent, "a", result(*three("slow", 1))),
        saved(readme.parent, "b", result(*three("slow", 1), **changed)),
    ]
    assert rendered(readme, *paths) == 1
    assert words in capsys.readouterr().err
    assert readme.read_text() == before


def test_a_readme_without_a_place_for_the_table_is_left_alone(tmp_path: Path):
    path = saved(tmp_path, "r", result(*three("xylite auto", 5)))
    readme = tmp_path / "README.md"
    readme.write_text("text\n")
    assert rendered(readme, path) == 1
    assert readme.read_text() == "text\n"
    assert not (tmp_path / "performance.svg").exists()


# The plot


def test_bars_are_as_long_as_the_medians_and_drafts_are_measured_against_one():
    made = with_drafts(
        *three("xylite auto", 100, 400, 200),
        *three("slow", 50, 50),
        *drafted(200, 150, 180, workload="edit, 1 at once"),
        *drafted(50, workload="random, 1 at once"),
    )
    first, drafts = plot.panels(made)
    assert first.title == "decode 1: tok/s (more is better)"
    assert [(b.name, b.middle, b.low, b.high) for b in first.bars] == [
        ("xylite auto", 200, 100, 400),
        ("slow", 50, 50, 50),
    ]
    assert drafts.title == "xylite auto ngram, 1 at once: times as fast"
    assert [(b.name, b.middle) for b in drafts.bars] == [("edit", 1.8), ("random", 0.5)]
    assert (first.mark, drafts.mark) == (None, 1.0)
    picture = plot.svg(made)
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="12" fill', picture)]
    assert widths[0] == pytest.approx(4 * widths[1], abs=0.2)
    assert widths[2] == pytest.approx(3.6 * widths[3], abs=0.5)


def test_the_picture_is_sound_whatever_engines_are_called():
    samples = [sample("xylite auto", 0, 1.0), sample("slow", 0, 0.0)]
    made = result(*samples)
    made["engines"][1]["name"] = samples[1]["engine"] = "a <b> & c with a name that has no end"
    tree = ElementTree.fromstring(plot.svg(made))
    texts = [t.text or "" for t in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert any(t.startswith("a <b> & c") and t.endswith("…") for t in texts)
    width, height = (float(tree.get(k, "0")) for k in ("width", "height"))
    for rect in tree.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, w, h = (float(rect.get(k, "0")) for k in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width and 0 <= y <= y + h <= height
