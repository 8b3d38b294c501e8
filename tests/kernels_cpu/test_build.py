"""Building at first start: found again, rebuilt on change, and clear when it cannot be done."""

import ctypes
import multiprocessing
import shutil
from pathlib import Path

import pytest

from xylite.kernels_cpu import build

TINY = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree of one small file instead of the kernels."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(TINY)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    return folder


def _build(arguments: tuple[Path, Path]) -> str:
    build.SOURCES, folder = arguments  # pyright: ignore[reportConstantRedefinition]
    return str(build.library("generic", folder))


def test_a_library_is_built_once_and_found_again(sources: Path, tmp_path: Path) -> None:
    first = build.library("generic", tmp_path / "cache")
    assert ctypes.CDLL(str(first)).answer() == 42
    made = first.stat().st_mtime_ns
    assert build.library("generic", tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == made
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [first.name]


def test_a_change_of_source_or_flags_gives_another_library(sources: Path) -> None:
    name = build.library_name("generic")
    assert build.library_name("avx2") != name
    (sources / "tiny.cpp").write_text(TINY.replace("42", "43"))
    assert build.library_name("generic") != name


def test_a_library_built_with_the_package_is_used(sources: Path, tmp_path: Path) -> None:
    made = build.build("generic", tmp_path / "built")
    assert build.library("generic", tmp_path / "cache") == made
    assert not (tmp_path / "cache").exists()


def test_starts_at_the_same_time_do_not_disturb_each_other(sources: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        paths = pool.map(_build, [(sources, tmp_path / "cache")] * 3)
    assert len(set(paths)) == 1
    assert ctypes.CDLL(paths[0]).answer() == 42


def test_without_a_compiler_the_error_says_so(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler found"):
        build.library("generic", tmp_path / "cache")


def test_what_the_compiler_says_is_in_the_error(sources: Path, tmp_path: Path) -> None:
    (sources / "tiny.cpp").write_text("int answer() { return nothing_like_this; }\n")
    with pytest.raises(build.BuildError, match="nothing_like_this"):
        build.library("generic", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error_with_its_name(
    sources: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(build.BuildError, match="cache"):
        build.library("generic", tmp_path / "cache")


def test_every_machine_has_the_generic_set_last() -> None:
    assert build.instruction_sets()[-1] == "generic"
