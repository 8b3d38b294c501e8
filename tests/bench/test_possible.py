"""What the machine could do at most: tables from made-up results, and those in bench/README.md."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from bench.compare import possible, render
from tests.bench.samples import result, steps_result, three

PLACE = "before\n<!-- possible -->\nold\n<!-- /possible -->\nafter\n"


def offline() -> dict[str, Any]:
    return result(
        *three("xylite auto", 150, 140),
        *three("slow", 100),
        *three("fast", 200, 160),
        *three("small", 900),
    )


def test_tables_have_the_most_that_is_possible_for_each_step_and_op():
    made = possible.section(steps_result(), offline(), {"2026-05-06T00:00:00Z": "[s](s.json)"})
    assert made == textwrap.dedent(
        """\
        | | at most, tok/s | the step | of it | xylite | best peer, tok/s | at most / best peer |
        |---|---:|---:|---:|---:|---:|---:|
        | bfloat16, decode at 1 | 400 | 200 | 50% | 145 | 180 (fast) | 2.22 |
        | bfloat16, mixed | 27 | 20 | 75% | - | - | - |
        | int8, decode at 1 | 533 | 400 | 75% | - | - | - |

        | bfloat16 | decode at 1 | mixed |
        |---|---:|---:|
        | linear 2 of 3 | 36.0 (56%) | 360 (83%) |
        | all, one by one | 36.0 | 360 |
        | the step | 40.0 (50%) | 400 (75%) |

        | int8 | decode at 1 |
        |---|---:|
        | linear 2 of 3 | 18.0 (83%) |
        | all, one by one | 18.0 |
        | the step | 20.0 (75%) |

        Limits, at the moments of the steps: bfloat16 2,000 GFLOP/s, float32 1,000 GFLOP/s, int8 4,000 GFLOP/s, memory 50 to 70 GB/s, caches 400 GB/s.

        - [s](s.json), 2026-05-06, commit fed: `python -m bench.ops.steps` on 2 cores of A CPU (avx2), torch 2.0.
        """  # noqa: E501 (a line of a table or list is one line)
    )


def test_peers_count_at_their_own_precision_only():
    made = offline()
    made["engines"] += [
        {"name": "xylite int8", "precision": "int8", "is_ours": True},
        {"name": "tiny", "precision": "int8", "is_ours": False},
    ]
    made["samples"] += [*three("xylite int8", 300), *three("tiny", 50)]
    text = possible.section(steps_result(), made, {})
    assert "| int8, decode at 1 | 533 | 400 | 75% | 300 | 50.0 (tiny) | 10.67 |" in text


def test_a_readme_gets_the_tables_it_has_places_for(tmp_path: Path):
    readme, inner = tmp_path / "README.md", tmp_path / "bench" / "README.md"
    inner.parent.mkdir()
    readme.write_text("<!-- performance -->\nold\n<!-- /performance -->\n")
    inner.write_text(PLACE)
    compared, steps = tmp_path / "compare-a.json", inner.parent / "steps.json"
    compared.write_text(json.dumps(offline()))
    steps.write_text(json.dumps(steps_result()))
    words = [str(compared), "--steps", str(steps), "--plot", str(tmp_path / "p.svg")]
    assert render.main([*words, "--readme", str(readme), str(inner)]) == 0
    assert "decode 1: tok/s" in readme.read_text() and "at most" not in readme.read_text()
    written = inner.read_text()
    assert "- [steps.json](steps.json), 2026-05-06" in written and "old" not in written
    assert written.startswith("before\n<!-- possible -->\n| |")
    assert written.endswith("<!-- /possible -->\nafter\n")


@pytest.mark.parametrize("steps", [None, steps_result(machine={"cpu": "B CPU"})])
def test_nothing_is_written_without_steps_of_the_same_machine(
    steps: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    readme, inner = tmp_path / "README.md", tmp_path / "inner.md"
    before = "<!-- performance -->\nold\n<!-- /performance -->\n"
    readme.write_text(before)
    inner.write_text(PLACE)
    compared, path = tmp_path / "compare-a.json", tmp_path / "steps.json"
    compared.write_text(json.dumps(offline()))
    if steps is not None:
        path.write_text(json.dumps(steps))
    words = [str(compared), "--steps", str(path), "--plot", str(tmp_path / "p.svg")]
    assert render.main([*words, "--readme", str(readme), str(inner)]) == 1
    told = capsys.readouterr().err
    assert "inner.md: " in told
    assert ("machines differ in cpu: B CPU and A CPU" if steps else "steps.json") in told
    assert readme.read_text() == before and inner.read_text() == PLACE
    assert not (tmp_path / "p.svg").exists()


def test_the_tables_in_the_readmes_are_of_the_last_results():
    paths = render.full_results()
    results = [json.loads(path.read_text()) for path in paths]
    files = {r["date"]: path for r, path in zip(results, paths, strict=True)}
    made = render.merged(results)
    for readme in render.READMES:
        assert readme.read_text() == render.rewritten(
            readme, made, files, render.PLOT, render.STEPS
        )
