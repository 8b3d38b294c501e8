"""Reading the text of a compiled program (module.hivm.opt.mlir) into functions and statements."""

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Statement:
    """One operation; `body` and `other` are its regions (loop body; then and else)."""

    text: str
    body: "list[Statement] | None" = None
    other: "list[Statement] | None" = None


@dataclass(frozen=True, slots=True)
class Argument:
    name: str
    type: str
    attributes: str


@dataclass(frozen=True, slots=True)
class Function:
    arguments: tuple[Argument, ...]
    body: list[Statement]
    attributes: str


@dataclass(frozen=True, slots=True)
class Module:
    """Functions by name, affine maps by name, and the sizes of the chip's memories in bytes."""

    functions: dict[str, Function]
    maps: dict[str, Callable[..., tuple[int, ...]]]
    sizes: dict[str, int]


@dataclass(frozen=True, slots=True)
class MemrefType:
    """Sizes and strides are None where they are known at run time only."""

    sizes: tuple[int | None, ...]
    dtype: str
    space: str


SPACES = {"ub": "UB_SIZE", "cbuf": "L1_SIZE", "ca": "L0A_SIZE", "cb": "L0B_SIZE", "cc": "L0C_SIZE"}

_MEMREF = re.compile(
    r"memref<(?P<shape>[^,>]*)(?:, strided<\[[^\]]*\](?:, offset: [^>]*)?>)?"
    r"(?:, #hivm\.address_space<(?P<space>\w+)>)?>"
)
_FUNCTION = re.compile(r"\s*func\.func @(\w+)\((.*?)\)(?: -> \S+)? attributes \{(.*)\} \{\s*$")
_ARGUMENT = re.compile(r"(%arg\d+): (memref<.*?>>|memref<[^>]*>|\w+)(?: \{(.*?)\})?(?=, %arg|$)")
_MAP = re.compile(r"#(map\d*) = affine_map<\(([^)]*)\)(?:\[([^\]]*)\])? -> \((.*)\)>")


def memref_type(text: str) -> MemrefType:
    """`memref<4x?xf16, ..., #hivm.address_space<ub>>`, taken apart."""
    match = _MEMREF.match(text.strip())
    assert match, text
    *sizes, dtype = match["shape"].split("x")
    known = tuple(None if n == "?" else int(n) for n in sizes)
    return MemrefType(known, dtype, match["space"] or "gm")


def split_top(text: str) -> list[str]:
    """Split at the commas that stand in no bracket."""
    parts, depth, current = [], 0, ""
    for ch in text:
        depth += (ch in "([{<") - (ch in ")]}>")
        if ch == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += ch
    return [*parts, current.strip()] if current.strip() else parts


def names(text: str | None) -> list[str]:
    """Comma-separated names, blanks removed; none for None."""
    return [x.strip() for x in (text or "").split(",") if x.strip()]


def _affine_map(arguments: list[str], results: str) -> Callable[..., tuple[int, ...]]:
    """The map as a Python function; MLIR's floordiv and mod are Python's // and %."""
    body = [
        re.sub(r"\bceildiv\b", "//-", r).replace("floordiv", "//").replace("mod", "%")
        for r in split_top(results)
    ]
    return eval(f"lambda {', '.join(arguments)}: ({', '.join(body)},)")


def _block(lines: list[str], i: int) -> tuple[list[Statement], int]:
    """Statements from line i to the closing brace, and the line of that brace."""
    statements = []
    while True:
        line = lines[i].strip()
        if line.startswith("}"):
            return statements, i
        if line.endswith("{"):
            body, j = _block(lines, i + 1)
            other = None
            if "} else {" in lines[j] or "} do {" in lines[j]:
                other, j = _block(lines, j + 1)
            statements.append(Statement(line[:-1].strip(), body, other))
            i = j + 1
        else:
            statements.append(Statement(re.sub(r" \{[^{}]*\}(?= :|$)", "", line)))
            i += 1


def parse(text: str) -> Module:
    """The module with this text."""
    lines = text.splitlines()
    maps = {m[1]: _affine_map(names(m[2]) + names(m[3]), m[4]) for m in map(_MAP.match, lines) if m}
    sizes = {}
    for space, key in SPACES.items():
        found = re.search(key + r'", (\d+) : i32', text)
        if found:
            sizes[space] = int(found[1]) // 8
    functions = {}
    i = 0
    while i < len(lines):
        match = _FUNCTION.match(lines[i])
        if match:
            body, i = _block(lines, i + 1)
            arguments = tuple(
                Argument(name, kind, attributes)
                for name, kind, attributes in _ARGUMENT.findall(match[2])
            )
            functions[match[1]] = Function(arguments, body, match[3])
        i += 1
    return Module(functions, maps, sizes)
