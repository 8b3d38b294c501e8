"""Compiles Triton kernels with the real Ascend compiler, on a machine without NPU, CANN or torch.

    TTIR -> linalg (triton-adapter-opt) -> HFusion, HIVM -> cube/vector split -> memory planning
         -> module.hivm.opt.mlir

The last tool, hivmc, exists in CANN only. A stand-in on PATH takes its place: it keeps the program
it is handed, which `emulator.py` can execute. Everything before is what runs on a customer's
machine: triton-ascend and ascendnpu-ir from PyPI. A generation of the compiler is a version of
ascendnpu-ir: 1.0.0 goes with CANN 8.5, 1.1.0 with CANN 9.0, 1.2.0 (installed) with CANN 9.1.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .program_text import memref_type, parse

GENERATIONS = ("1.0.0", "1.1.0", "1.2.0")
TARGET = "Ascend910B4"
# Compilers run side by side: programs of one test session go where each finds its own.
_STAND_IN = """#!/bin/sh
if [ "$1" = "--version" ]; then echo "hivmc 0.1.0"; exit 0; fi
for a in "$@"; do if [ -f "$a" ]; then cp "$a" "{folder}/module.hivm.opt.mlir"; fi; done
"""
_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "bf16": 16, "f32": 32}


@dataclass(slots=True)
class Program:
    """What became of one kernel.

    ok           it reached the planned program
    error        the compiler's errors
    retries      notes of an overflow after which the compiler gave something up
    memory       bytes used, by space: ub (one vector core's), cbuf (L1), cc (L0C)
    limits       bytes the chip has
    vector_cores of the two beside a cube core, how many work; 0 = not a mixed kernel
    kinds        of each pointer argument: 0 read, 1 written, 2 both
    findings     what is legal but slow or dangerous; see `_findings`
    linalg, hivm text of the program after the front end, and at the end
    """

    name: str
    generation: str
    ok: bool = False
    error: str = ""
    retries: list[str] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    vector_cores: int = 0
    kinds: list[int] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    linalg: str = ""
    hivm: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        used = " ".join(
            f"{space} {n // 1024}K/{self.limits.get(space, 0) // 1024}K"
            for space, n in sorted(self.memory.items())
        )
        cores = f" vector cores {self.vector_cores}/2" if self.vector_cores else ""
        more = [*self.retries, *self.findings, self.error]
        return (
            f"{'ok  ' if self.ok else 'FAIL'} {self.name} on {self.generation}: {used}{cores} "
            f"{self.seconds:.1f} s {'; '.join(x for x in more if x)}"
        )


def cache_folder() -> Path:
    """Where unpacked compilers are kept between runs."""
    base = os.environ.get("XYLITE_CACHE_DIR")
    return Path(base) if base else Path.home() / ".cache" / "xylite"


def compiler_folder(generation: str) -> Path:
    """The folder of this generation's compiler; other generations than the installed one are
    downloaded once, as wheels, and only the compiler is unpacked."""
    if importlib.metadata.version("ascendnpu-ir") == generation:
        spec = importlib.util.find_spec("ascendnpuir")
        assert spec and spec.origin
        return Path(spec.origin).parent / "bin"
    folder = cache_folder() / "ascendnpu-ir" / generation
    if not (folder / "bishengir-compile").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as download:
            command = [sys.executable, "-m", "pip", "download", "-qqq", "--no-deps"]
            command += ["--disable-pip-version-check", "--dest", download]
            subprocess.run([*command, f"ascendnpu-ir=={generation}"], check=True)
            (wheel,) = Path(download).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = (n for n in archive.namelist() if n.endswith("bin/bishengir-compile"))
                program = Path(archive.extract(member, download))
            program.chmod(0o755)
            # Renamed when complete, so that test processes side by side never see half a file.
            program.replace(folder / "bishengir-compile")
    return folder


def _memory_used(hivm: str) -> dict[str, int]:
    """Highest byte the planner gave out, by space."""
    used: dict[str, int] = {}
    constants: dict[str, int] = {}
    for line in hivm.splitlines():
        if "func.func" in line:
            constants = {}
        constant = re.match(r"\s*(%\S+) = arith.constant (-?\d+) : i64", line)
        if constant:
            constants[constant[1]] = int(constant[2])
        cast = re.search(r"hivm\.hir\.pointer_cast\(([^)]*)\).*?(memref<.*>)", line)
        if cast:
            kind = memref_type(cast[2])
            elements = 1
            for n in kind.sizes:
                elements *= n or 0
            size = (elements * _BITS[kind.dtype] + 7) // 8
            for name in re.findall(r"%[\w-]+", cast[1]):
                if name in constants:
                    end = constants[name] + size
                    used[kind.space] = max(used.get(kind.space, 0), end)
    return used


def _findings(linalg: str, hivm: str) -> list[str]:
    """Marks of what a kernel author should know; each is a kind, with how often it occurs.

    discrete-access         a gather or scatter became a loop of one-row copies
    unbounded-masked-load   lanes that the mask switches off are read all the same
    read-modify-write       a store rewrites lanes it does not own
    signed-mulhi            tl.rand gives other numbers than elsewhere
    scalar-store            element by element loops in the final program
    """
    found = []
    discrete = len(re.findall(r"DiscreteMemAccess|ExtractedLoadOrStore", linalg))
    if discrete:
        found.append(f"discrete-access={discrete}")
    values = dict(re.findall(r"(%\S+) = bufferization\.to_tensor (%alloc\S*)", linalg))
    whole = set(re.findall(r"memref\.copy %reinterpret_cast\S*?, (%alloc\S*) :", linalg))
    selected = {
        x for pair in re.findall(r"arith\.select %\S+, (%\S+), (%\S+) :", linalg) for x in pair
    }
    unbounded = sum(allocation in whole and v in selected for v, allocation in values.items())
    if unbounded:
        found.append(f"unbounded-masked-load={unbounded}")
    stored = set(re.findall(r"materialize_in_destination %\S+ in writable (%\S+) :", linalg))
    if stored & set(re.findall(r"memref\.copy (%\S+?), %alloc", linalg)):
        found.append("read-modify-write")
    if "arith.mulsi_extended" in linalg:
        found.append("signed-mulhi")
    scalar_stores = len(re.findall(r"memref\.store", hivm))
    if scalar_stores:
        found.append(f"scalar-store={scalar_stores}")
    return found


def _vector_cores(hivm: str) -> int:
    if "_mix_aiv" not in hivm:
        return 0
    bound = "limit_sub_block" not in hivm and "get_sub_block_idx" in hivm[hivm.find("_mix_aiv") :]
    return 2 if bound else 1


class _Subprocess:
    """The subprocess module as triton-ascend uses it, with results read on the way."""

    def __init__(self, program: Program, folder: Path):
        self._program, self._folder = program, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        if command[1:2] == ["--help"]:
            return subprocess.run(command, check=False, **options)
        options["check"] = False
        done = subprocess.run(command, **options)
        tool, p = Path(command[0]).name, self._program
        if tool == "triton-adapter-opt" and done.returncode == 0:
            p.linalg = Path(command[command.index("-o") + 1]).read_text()
        if tool == "bishengir-compile":
            messages = (done.stderr or b"").decode(errors="replace")
            p.retries += re.findall(r"\[NOTE\] (.*)", messages)
            planned = self._folder / "module.hivm.opt.mlir"
            if done.returncode == 0 and planned.exists():
                p.hivm, p.ok = planned.read_text(), True
                # triton reads the object file that hivmc would have written.
                for suffix in (".o", "_reloc.o"):
                    Path(command[command.index("-o") + 1] + suffix).write_bytes(b"no hivmc")
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        return done


@contextlib.contextmanager
def _prepared(program: Program, generation: str) -> Iterator[None]:
    """PATH with this generation and the stand-in; triton's cache off; no question to CANN."""
    from triton.backends import backends

    with tempfile.TemporaryDirectory(prefix="xylite_ascend_") as name:
        folder = Path(name)
        (folder / "bin").mkdir()
        stand_in = folder / "bin" / "hivmc"
        stand_in.write_text(_STAND_IN.format(folder=folder))
        stand_in.chmod(0o755)
        path = [str(folder / "bin"), str(compiler_folder(generation)), os.environ["PATH"]]
        settings = {
            "PATH": os.pathsep.join(path),
            "TRITON_CACHE_DIR": str(folder / "cache"),
            "TRITON_ALWAYS_COMPILE": "1",
        }
        # The back end that triton uses is a module object of its own, not the importable one.
        module: dict[str, Any] = backends["ascend"].compiler.add_stages.__globals__
        before = {key: os.environ.get(key) for key in settings}
        utils, run = module["NPUUtils"], module["subprocess"]
        os.environ.update(settings)
        # The real NPUUtils is built against CANN's headers, only to tell the chip's name here.
        module["NPUUtils"] = lambda: type("NPUUtils", (), {"get_arch": lambda self: TARGET})()
        module["subprocess"] = _Subprocess(program, folder)
        try:
            yield
        finally:
            module["NPUUtils"], module["subprocess"] = utils, run
            for key, value in before.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value


def compile_kernel(
    kernel: Callable[..., Any],
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    name: str = "",
    generation: str = "1.2.0",
    **options: Any,
) -> Program:
    """Compile a @triton.jit kernel up to the planned program; errors are in the result.

    signature  run-time arguments in order: "*bf16", "*i32", "i32", "fp32", ...
    constants  the constexpr arguments
    options    launch options of triton-ascend, such as multibuffer=False
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.errors import TritonError

    program = Program(name or kernel.__name__, generation)
    began = time.perf_counter()
    with _prepared(program, generation):
        # Upstream Triton, which type checkers see, has another name for `constants`.
        description: dict[str, Any] = {"signature": dict(signature), "constants": dict(constants)}
        source = ASTSource(fn=kernel, **description)
        try:
            triton.compile(source, target=GPUTarget("npu", TARGET, 0), options=options)
        except (subprocess.CalledProcessError, RuntimeError, TritonError) as e:
            stderr = getattr(e, "stderr", None)
            text = stderr.decode(errors="replace") if isinstance(stderr, bytes) else str(e)
            errors = re.findall(r"error: (.*)", text) or [text[-600:]]
            program.ok = False
            program.error = " | ".join(dict.fromkeys(x[:300] for x in errors))
    program.seconds = time.perf_counter() - began
    if program.hivm:
        program.memory = _memory_used(program.hivm)
        program.limits = parse(program.hivm).sizes
        program.vector_cores = _vector_cores(program.hivm)
    if program.linalg:
        program.findings = _findings(program.linalg, program.hivm)
        arguments = program.linalg.split("attributes")[0]
        program.kinds = [int(x) for x in re.findall(r"tt\.tensor_kind = (\d+)", arguments)]
    return program
