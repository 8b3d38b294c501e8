"""What the cuda and npu backends say where they cannot run, and which names they rely on."""

import ast
import json
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from xylite import ops
from xylite.errors import ConfigError
from xylite.kernels_triton import attention_tiles, tiles
from xylite.ops import cuda, npu

ROOT = Path(__file__).parent.parent.parent
NAMES = json.loads((ROOT / "tests" / "data" / "torch_npu" / "names.json").read_text())


def install(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Pretend that exactly these versions of packages are installed (torch_npu for torch-npu)."""
    known = {name.replace("_", "-"): version for name, version in versions.items()}

    def version(package: str) -> str:
        if known.get(package) is None:
            raise metadata.PackageNotFoundError(package)
        return str(known[package])

    monkeypatch.setattr(metadata, "version", version)


def cuda_build(monkeypatch, triton: str | None = "3.9.0", **versions: str) -> None:
    install(monkeypatch, triton=triton, **versions)
    monkeypatch.setattr(torch.version, "cuda", "12.9")


def gpu(monkeypatch, capability: tuple[int, int]) -> None:
    cuda_build(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_cuda_names_what_is_missing(monkeypatch):
    install(monkeypatch, triton="3.9.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in cuda.available() and "xylite[cuda]" in cuda.available()
    cuda_build(monkeypatch, triton=None)
    assert "triton is not installed" in cuda.available()
    cuda_build(monkeypatch, triton="3.5.1")
    assert "triton 3.5.1 is older than 3.6" in cuda.available()
    cuda_build(monkeypatch, triton_ascend="3.2.0")
    assert "overwrite each other's files" in cuda.available()
    cuda_build(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no NVIDIA GPU is visible" in cuda.available()


@pytest.mark.parametrize(
    "capability, chip",
    [((8, 0), "sm_80"), ((8, 9), "sm_80"), ((9, 0), "sm_90"), ((12, 0), "sm_80")],
)
def test_cuda_serves_gpus_from_ampere_on(monkeypatch, capability, chip):
    gpu(monkeypatch, capability)
    assert cuda.available() is None
    assert cuda.chip_of(capability) == chip


def test_cuda_refuses_older_gpus_by_number(monkeypatch):
    gpu(monkeypatch, (7, 5))
    assert "compute capability 7.5, the kernels need 8.0" in cuda.available()


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="cuda:2: there are 2 GPUs"):
        cuda.table(2)


def npu_packages(monkeypatch, torch_version: str = "2.9.0+cpu", **changes: str | None) -> None:
    versions = {"torch_npu": "2.9.0.post9", "triton_ascend": "3.2.0", **changes}
    install(monkeypatch, **versions)
    monkeypatch.setattr(torch, "__version__", torch_version)


def fake_torch_npu(monkeypatch, cann: str = "8.5.0", name: str = "Ascend910B4", **changes) -> None:
    npu_packages(monkeypatch)
    services = {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "get_device_name": lambda index: name,
        "utils": SimpleNamespace(get_cann_version=lambda module: cann),
        **changes,
    }
    module = SimpleNamespace(npu=SimpleNamespace(**services))
    monkeypatch.setitem(sys.modules, "torch_npu", module)


def test_npu_names_what_is_missing_and_what_fits(monkeypatch):
    npu_packages(monkeypatch, torch_npu=None)
    assert "torch-npu is not installed" in npu.available()
    assert "CANN 8.5, torch 2.9.0, torch-npu 2.9.0, triton-ascend 3.2.0" in npu.available()
    npu_packages(monkeypatch, triton_ascend=None)
    assert "triton-ascend is not installed" in npu.available()
    npu_packages(monkeypatch, triton="3.9.0")
    assert "overwrite each other's files" in npu.available()
    npu_packages(monkeypatch, torch_version="2.13.0")
    assert "torch-npu 2.9.0.post9 needs torch 2.9.0, here is 2.13.0" in npu.available()


def test_npu_without_cann_says_so(monkeypatch):
    npu_packages(monkeypatch)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert "is CANN installed, and its set_env.sh sourced?" in npu.available()
    with pytest.raises(ConfigError, match="torch_npu cannot be loaded"):
        npu.table(0)


@pytest.mark.parametrize("cann", ["8.5", "8.5.0", "9.0.0", "9.1.RC1"])
@pytest.mark.parametrize("name", ["Ascend910B1", "Ascend910B4-1", "Ascend910_9392"])
def test_npu_serves_what_its_kernels_were_compiled_for(monkeypatch, cann, name):
    fake_torch_npu(monkeypatch, cann, name)
    assert npu.available() is None


def test_npu_refuses_other_chips_and_versions_by_name(monkeypatch):
    fake_torch_npu(monkeypatch, name="Ascend310P3")
    assert "the NPU is a Ascend310P3" in npu.available()
    fake_torch_npu(monkeypatch, cann="8.50.1")
    assert "CANN 8.50.1 is not supported; versions that fit together" in npu.available()
    fake_torch_npu(monkeypatch, is_available=lambda: False)
    assert "no Ascend NPU is visible" in npu.available()


def test_an_npu_that_is_not_there_is_named(monkeypatch):
    fake_torch_npu(monkeypatch)
    with pytest.raises(ConfigError, match="npu:8: there are 8 NPUs"):
        npu.table(8)


def test_every_set_that_fits_has_tiles():
    for row in npu.FITTING:
        chip = f"910b-{row.generation}"
        assert tiles.for_chip(chip).rows and attention_tiles.attention_tiles(chip, 128).tile_q


def test_load_says_why_a_device_cannot_be_used(monkeypatch):
    install(monkeypatch)
    for name in ("cuda", "npu:1"):
        with pytest.raises(ConfigError, match=f"device {name[:4].rstrip(':')} is not available: "):
            ops.load(name)


def chains(tree: ast.AST) -> set[str]:
    """Dotted names that begin with torch_npu, whole chains only."""
    found = set()
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            text = ast.unparse(node)
            if text.startswith("torch_npu."):
                found.add(text)
    return found


def test_every_name_of_torch_npu_that_is_used_exists_in_its_sources():
    tree = ast.parse((ROOT / "xylite" / "ops" / "npu.py").read_text())
    used = chains(tree)
    assert len(used) >= 6, used
    properties = {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "properties"
    }
    assert properties
    for version, names in NAMES.items():
        for chain in used:
            module, _, name = chain.rpartition(".")
            assert name in names.get(module, ()), f"{chain} is not in torch_npu {version}"
        assert properties <= set(names["properties"]), version


def test_only_npu_imports_torch_npu():
    for path in (ROOT / "xylite").rglob("*.py"):
        if path.name != "npu.py":
            assert "import torch_npu" not in path.read_text(), path
