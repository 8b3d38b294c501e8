"""Building at first start: found again, rebuilt on change, and clear when it cannot be done."""

import ctypes
import errno
import multiprocessing
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from xylite import config
from xylite.kernels_cpu import build

TINY = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree of one small file instead of the kernels."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(TINY)
    monkeypatch.setattr(build, "SOURCES", folder)
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


def test_other_things_among_the_sources_do_not_count(sources: Path) -> None:
    name = build.library_name("generic")
    (sources / "__pycache__").mkdir()
    (sources / "notes.txt").write_text("x")
    assert build.library_name("generic") == name
    (sources / "tiny.h").write_text("")
    assert build.library_name("generic") != name


@pytest.fixture
def old_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that knows AVX2 and nothing newer, on a machine that runs all sets."""
    real = shutil.which("c++")
    assert real is not None
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "c++"
    script.write_text(
        '#!/bin/sh\nfor x; do case $x in -mavx512*) echo "unknown option $x"; exit 1;; esac; done\n'
        f'exec {real} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(build, "instruction_sets", lambda: ["avx512bf16", "avx512", "generic"])


def test_an_older_compiler_builds_the_best_set_that_it_knows(
    sources: Path, tmp_path: Path, old_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    with build.best_library(tmp_path / "cache") as (isa, path):
        assert isa == "generic"
        assert ctypes.CDLL(str(path)).answer() == 42
    assert path == tmp_path / "cache" / build.library_name("generic")
    assert "built for generic, not better: " in caplog.text
    assert "unknown option -mavx512" in caplog.text


def test_where_no_set_can_be_built_the_error_is_that_of_the_best(
    sources: Path, tmp_path: Path, old_compiler: None
) -> None:
    (sources / "tiny.cpp").write_text("int answer() { return nothing_like_this; }\n")
    with (
        pytest.raises(build.BuildError, match="unknown option -mavx512"),
        build.best_library(tmp_path / "cache"),
    ):
        pass


def test_without_a_folder_to_write_to_the_library_is_built_for_this_process(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file")
    with build.best_library(tmp_path / "cache") as (isa, path):
        assert isa == build.instruction_sets()[0]
        loaded = ctypes.CDLL(str(path))
    assert loaded.answer() == 42
    assert not path.parent.exists()
    assert f"built anew at every start: {tmp_path / 'cache'}" in caplog.text


def test_a_full_disk_is_as_good_as_no_folder(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache, full = tmp_path / "cache", "No space left on device"
    run, write_bytes = build._run, Path.write_bytes
    tried: list[list[str]] = []

    def compiles(command: list[str]) -> None:
        tried.append(command)
        if str(cache) in command[-1]:
            raise build.Refused("c++ failed: kein Platz")
        run(command)

    def writes(path: Path, data: bytes) -> int:
        if cache in path.parents:
            raise OSError(errno.ENOSPC, full)
        return write_bytes(path, data)

    monkeypatch.setattr(build, "_run", compiles)
    monkeypatch.setattr(Path, "write_bytes", writes)
    with build.best_library(cache) as (isa, path):
        assert isa == build.instruction_sets()[0]
        assert ctypes.CDLL(str(path)).answer() == 42
    assert len(tried) == 3, "one in vain, then a source and the library"
    assert list(cache.iterdir()) == []
    assert f"built anew at every start: {cache}: {full}\n" in caplog.text


def test_who_waits_for_the_compiler_is_told_what_for(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", build.log.name)
    for _ in range(2):
        build.library("generic", tmp_path)
    assert caplog.text.count("compiling the CPU kernels for generic with ") == 1
    assert caplog.text.endswith(f", to {tmp_path}\n")


def test_a_folder_that_may_not_be_searched_is_as_good_as_none(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def may_not(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", may_not)
    with build.best_library(tmp_path / "cache") as (_, path):
        assert path.parent != tmp_path / "cache"
        assert ctypes.CDLL(str(path)).answer() == 42


def test_what_is_no_fault_of_the_set_is_not_tried_with_the_others(
    sources: Path, tmp_path: Path, old_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def too_slow(isa: str, folder: Path) -> Path:
        tried.append(isa)
        raise build.BuildError("c++ took more than 120 s")

    monkeypatch.setattr(build, "build", too_slow)
    with (
        pytest.raises(build.BuildError, match="took more than"),
        build.best_library(tmp_path / "cache"),
    ):
        pass
    assert tried == ["avx512bf16"]


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


LIMITED = """
import resource, sys
from pathlib import Path
from xylite.kernels_cpu.library import Kernels, ThreadsError
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), used + (200 << 20)))
try:
    Kernels(Path(sys.argv[1]), threads=500)
except ThreadsError as e:
    print(e)
assert len(list(Path("/proc/self/task").iterdir())) == 1
"""


def test_threads_that_the_system_does_not_give_are_an_error_and_none_is_left() -> None:
    cache = Path(config.cache_dir()) / "kernels"
    path = build.library(build.instruction_sets()[0], cache)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "the system does not give 500 threads to the CPU kernels\n"


def test_every_machine_has_the_generic_set_last() -> None:
    assert build.instruction_sets()[-1] == "generic"
