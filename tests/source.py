"""The package's modules as syntax trees, for the tests that read its source."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "xylite"


def name_of(path: Path) -> str:
    """The module's name below xylite; "" is xylite itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> Mapping[str, ast.Module]:
    return {name_of(p): ast.parse(p.read_text()) for p in sorted(PACKAGE.rglob("*.py"))}


def in_layers(module: str, layers: tuple[str, ...]) -> bool:
    return any(module == x or (x and module.startswith(x + ".")) for x in layers)


def imports(tree: ast.Module, module: str) -> Iterator[str]:
    """Full names of what a module imports; `from a import b` gives a.b if that is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import in line {node.lineno}"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix("xylite.")
                is_module = node.module.split(".")[0] == "xylite" and inner in modules()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def own_imports(tree: ast.Module, module: str) -> Iterator[str]:
    """The imports that lie in xylite, by name below it."""
    for name in imports(tree, module):
        if name == "xylite" or name.startswith("xylite."):
            yield name.removeprefix("xylite").removeprefix(".")


def dotted(node: ast.expr) -> str:
    """a.b.c of an attribute chain on a name; "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def misses(problems: list[str]) -> str:
    return "\n" + "\n".join(problems)
