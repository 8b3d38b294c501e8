"""Builds the C++ kernels with the system's compiler and finds what was built before.

One shared library per instruction set, named by a hash of sources and flags: a library that exists
is right. It is looked for in the cache directory, then built there; concurrent starts build side by
side, and the last rename wins. Of the instruction sets that a machine runs, the first that its
compiler knows counts.
"""

import concurrent.futures
import contextlib
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).parent / "src"
BUILD_TIMEOUT_S: Final = 120
ROOM_BYTES: Final = 4 << 20  # more than the library and its objects take

_AVX2: Final = ("-mavx2", "-mfma", "-mf16c")
_AVX512: Final = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_VNNI: Final = (*_AVX512, "-mavx512vnni")
# Instruction sets, best first: the compiler's flags and what /proc/cpuinfo must list.
_X86: Final[Mapping[str, tuple[str, ...]]] = {
    "avx512bf16": (*_VNNI, "-mavx512bf16"),
    "avx512vnni": _VNNI,
    "avx512": _AVX512,
    "avx2": _AVX2,
}
_COMMON: Final = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    # A product and a sum are fused where the source says so, and nowhere else: otherwise two
    # instances of one template could round differently.
    "-ffp-contract=off",
)


log = logging.getLogger(__name__)


class BuildError(Exception):
    """No compiler, or it failed; the message says which."""


class FolderError(BuildError):
    """A folder that cannot be read or written."""


class Refused(BuildError):
    """The compiler does not take the sources with an instruction set's flags."""


def instruction_sets() -> list[str]:
    """What this machine runs, best first; "generic" is always the last."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ["generic"]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ["generic"]
    has = next((set(line.split(":", 1)[1].split()) for line in lines if line[:5] == "flags"), set())

    def runs(flags: tuple[str, ...]) -> bool:
        names = (flag.removeprefix("-m") for flag in flags)
        spelt = {"avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16"}
        return all(spelt.get(name, name) in has for name in names)

    return [name for name, flags in _X86.items() if runs(flags)] + ["generic"]


def _flags(isa: str) -> tuple[str, ...]:
    return (*_COMMON, *_X86.get(isa, ()))


def library_name(isa: str) -> str:
    """File name of the library for `isa`: it changes with any source and flag."""
    digest = hashlib.sha256("\0".join((platform.machine(), *_flags(isa))).encode())
    for source in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return f"kernels-{isa}-{digest.hexdigest()[:16]}.so"


def library(isa: str, cache: Path) -> Path:
    """The library for `isa`, built in `cache` if need be; BuildError if it cannot be."""
    path = cache / library_name(isa)
    try:
        is_there = path.is_file()
    except OSError as e:
        raise FolderError(f"{cache}: {e.strerror or e}") from e
    return path if is_there else build(isa, cache)


@contextlib.contextmanager
def best_library(cache: Path) -> Iterator[tuple[str, Path]]:
    """(instruction set, library) of the best set that the compiler knows.

    cache    where the library is, or is built. If it cannot be written, the library lies in a
             private folder that is gone after the block: load it inside
    raises   BuildError: no set can be built, or a fault that no other set would mend
    """
    failures: list[Refused] = []
    for isa in instruction_sets():
        with contextlib.ExitStack() as stack:
            try:
                path = _built_somewhere(isa, cache, stack)
            except Refused as e:
                failures.append(e)
                continue
            if failures:
                log.warning("the CPU kernels are built for %s, not better: %s", isa, failures[0])
            yield isa, path
            return
    raise failures[0]


def _built_somewhere(isa: str, cache: Path, stack: contextlib.ExitStack) -> Path:
    try:
        return library(isa, cache)
    except FolderError as e:
        try:
            private = tempfile.TemporaryDirectory(prefix="xylite-", ignore_cleanup_errors=True)
        except OSError:
            raise e from None
        path = build(isa, Path(stack.enter_context(private)))
        log.warning("the CPU kernels are built anew at every start: %s", e)
        return path


def build(isa: str, folder: Path) -> Path:
    """Compile for `isa` into `folder`; BuildError with the compiler's words if that fails."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise BuildError("no C++ compiler found (c++, g++ or clang++)")
    target = folder / library_name(isa)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log.info("compiling the CPU kernels for %s with %s, to %s", isa, compiler, folder)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as work:
            made = Path(work) / target.name
            try:
                _compile(compiler, isa, made)
            except Refused:
                # It may be for want of room, which the compiler says in the user's language.
                (Path(work) / "room").write_bytes(bytes(ROOM_BYTES))
                raise
            os.replace(made, target)
    except OSError as e:
        raise FolderError(f"{folder}: {e.strerror or e}") from e
    return target


def _compile(compiler: str, isa: str, made: Path) -> None:
    """The library `made`, with its objects beside it."""
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [made.parent / f"{s.stem}.o" for s in sources]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        jobs = [
            pool.submit(_run, [compiler, *_flags(isa), "-c", str(s), "-o", str(o)])
            for s, o in zip(sources, objects, strict=True)
        ]
        for job in jobs:
            job.result()
    _run([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(made)])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        raise BuildError(f"{command[0]} took more than {BUILD_TIMEOUT_S} s") from e
    if done.returncode:
        raise Refused(f"{command[0]} failed: {done.stdout[-2000:].strip()}")
