"""What README, packaging and scripts promise about the code is so."""

import ast
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import xylite
from bench.compare import render
from tests.http.fake_engine import FakeEngine
from tests.write_readme import README, with_settings
from xylite import models
from xylite.http import make_app

ROOT = Path(__file__).parent.parent
TEXT = README.read_text()
# What a package is called where it is imported, if that is not its own name.
IMPORTED_AS = {"pyyaml": "yaml"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_settings_table_is_what_the_structs_say():
    assert with_settings(TEXT) == TEXT, "run `make docs`"


def test_the_readme_has_a_place_for_the_performance_table():
    lines = TEXT.splitlines()
    begin, end = lines.index("<!-- performance -->"), lines.index("<!-- /performance -->")
    assert begin < end
    assert TEXT.count(render.BEGIN) == TEXT.count(render.END) == 1


def test_every_route_is_in_the_table_of_endpoints():
    app = make_app(FakeEngine())
    table = TEXT[TEXT.index("| endpoint |") :].partition("\n\n")[0]
    written = {f"/{m}" for m in re.findall(r"(?<=[ ,])/([\w/{}]*)(?=[ ,])", table)}
    routes = {
        re.sub(r":[^}]*}", "}", resource.canonical)
        for resource in app.router.resources()
        if isinstance(resource, web.Resource)
    }
    assert routes == written


def test_every_family_of_models_is_named_in_the_readme():
    start = TEXT[TEXT.index("## Start") : TEXT.index("## Use it as a server")]
    assert [name for name in models.families() if f"`{name}`" not in start] == []


def test_modules_files_and_links_in_the_readme_exist():
    steps = TEXT[TEXT.index("| step | module |") :].partition("\n\n")[0]
    modules = [
        m for row in steps.splitlines()[2:] for m in re.findall("`(.*?)`", row.split("|")[2])
    ]
    assert len(modules) > 10
    missing = [
        m
        for m in modules
        if not (ROOT / "xylite" / f"{m}.py").exists() and not (ROOT / "xylite" / m).is_dir()
    ]
    missing += [t for t in re.findall(r"\]\(([^)#]+)\)", TEXT) if not (ROOT / t).exists()]
    missing += [t for t in re.findall(r"`(tests/\S+\.py)`", TEXT) if not (ROOT / t).exists()]
    missing += [
        t for t in re.findall(r"(?<=path )bench/traces/\S+", TEXT) if not (ROOT / t).exists()
    ]
    assert not missing


def test_every_file_of_data_has_its_source_and_licence_in_a_readme():
    described = {
        ROOT / "bench" / "README.md": ROOT / "bench" / "traces",
        **{p: p.parent for p in (ROOT / "bench" / "traces").glob("*/README.md")},
    }
    for readme, folder in described.items():
        files = {p.name for p in folder.iterdir() if p.is_file()} - {"README.md"}
        named = re.findall(r"^\| (\S+\.(?:jsonl|csv)) ", readme.read_text(), re.MULTILINE)
        assert files == set(named), f"{folder} against {readme}"
    folders = {p for p in (ROOT / "bench" / "traces").iterdir() if p.is_dir()}
    assert folders <= set(described.values())


def test_make_targets_named_anywhere_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"make ([a-z][\w-]+)", TEXT + makefile))
    assert named - {"PYTHON"} <= targets
    steps = re.findall(r"^step (\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert set(steps) == {"lint", "test", "test-ascend"} <= targets


def test_public_names_load_and_are_listed():
    assert set(xylite.__all__) <= set(dir(xylite))
    for name in xylite.__all__:
        assert getattr(xylite, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = xylite.nothing


def test_importing_xylite_loads_nothing_heavy():
    script = "import sys, xylite; sys.exit('torch' in sys.modules or 'aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


def third_party_imports() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "xylite").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names - {"xylite"}


def test_dependencies_are_what_is_imported(project: dict[str, Any]):
    def imported(requirements: list[str]) -> set[str]:
        names = [canonicalize_name(Requirement(r).name) for r in requirements]
        return {IMPORTED_AS.get(n, n).replace("-", "_") for n in names}

    extras = project["optional-dependencies"]
    core = imported(project["dependencies"])
    devices = imported(extras["cuda"]) | imported(extras["npu"])
    found = third_party_imports()
    assert found <= core | devices, f"not declared: {found - core - devices}"
    # PyYAML is imported by msgspec, for --config.
    assert core - {"yaml"} <= found, f"declared for nothing: {core - found}"


def pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_the_tests_run_with_the_versions_of_the_constraints():
    wrong: list[str] = []
    for pin in pins():
        try:
            version = metadata.version(pin.name)
        except metadata.PackageNotFoundError:
            continue
        # 2.13.0+cpu is a build of 2.13.0.
        if not pin.specifier.contains(version.partition("+")[0]):
            wrong.append(f"{pin}, installed is {version}")
    assert not wrong


def test_constraints_pin_every_direct_dependency(project: dict[str, Any]):
    pinned = {canonicalize_name(pin.name) for pin in pins()}
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    assert {canonicalize_name(Requirement(r).name) for r in wanted} <= pinned


def test_sources_and_tables_are_in_the_package():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = [p.removeprefix("**/") for p in tool["package-data"]["*"]]
    data = [
        p
        for p in (ROOT / "xylite").rglob("*")
        if p.is_file() and p.suffix not in (".py", ".pyc", ".so") and "__pycache__" not in p.parts
    ]
    assert any(p.name == "py.typed" for p in data)
    left_out = [str(p) for p in data if not any(fnmatch(p.name, pattern) for pattern in patterns)]
    assert not left_out
    packages = [
        p for p in (ROOT / "xylite").rglob("*.py") if not (p.parent / "__init__.py").exists()
    ]
    assert not packages, "folders with modules need an __init__.py to be packaged"
