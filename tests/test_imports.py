"""The shape of the code base: who may import whom, and what no module may do.

Every import counts, those in functions and under TYPE_CHECKING too. The rules are data at the top;
a new module belongs to the layer with the longest matching name, and an unknown one fails.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "xylite"

LEAVES = ("errors", "config", "tree", "plugins")
HOST = (
    "runtime.request",
    "runtime.sequence",
    "runtime.blocks",
    "runtime.plan",
    "runtime.queues",
    "runtime.commit",
    "runtime.logprobs",
    "runtime.trials",
    "runtime.scheduler",
    "runtime.token_table",
    "runtime.task_table",
    "runtime.step",
    "runtime.stats",
    "runtime.drafters",
    "runtime.connectors",
)

# Layer -> layers it may import besides itself. The longest matching layer counts; "" is xylite
# itself, whose __init__ names the library's public face.
MAY_IMPORT: Mapping[str, tuple[str, ...]] = {
    "": ("config", "runtime.request", "text_engine", "llm"),
    "__main__": ("cli",),
    "cli": (
        *LEAVES,
        "",
        "flags",
        "command_line",
        "console",
        "bench",
        "http",
        "text_engine",
        "runtime.request",
        "tune",
    ),
    "tune": (*LEAVES, "checkpoint", "models", "ops"),
    "bench": ("errors", "config", "console", "flags"),
    "command_line": ("errors", "config", "flags"),
    "console": ("errors",),
    "llm": (*LEAVES, "text_engine", "runtime.request"),
    "flags": ("errors",),
    "http": (
        *LEAVES,
        "",
        "text_engine",
        "text",
        "runtime.request",
        "runtime.stats",
        "runtime.turnstile",
    ),
    "text_engine": (
        *LEAVES,
        "checkpoint",
        "sampling_defaults",
        "text",
        "text_stream",
        "runtime.engine",
        "runtime.build",
        "runtime.request",
        "runtime.stats",
        "runtime.turnstile",
    ),
    "text_stream": (
        *LEAVES,
        "text",
        "runtime.engine",
        "runtime.event_queue",
        "runtime.request",
        "runtime.turnstile",
    ),
    "sampling_defaults": ("errors", "config", "runtime.request"),
    "text": ("errors", "config", "plugins", "checkpoint", "tensor_files", "runtime.request"),
    "runtime.build": (
        *LEAVES,
        *HOST,
        "runtime.drafters.draft_model",
        "runtime",
        "checkpoint",
        "models",
        "ops",
    ),
    "runtime.event_queue": (*LEAVES, *HOST),
    "runtime.interfaces": (*LEAVES, *HOST),
    "runtime.turnstile": (),
    "runtime.engine": (
        *LEAVES,
        *HOST,
        "runtime.event_queue",
        "runtime.interfaces",
        "runtime",
        "checkpoint",
        "models",
        "ops",
    ),
    "runtime": (*LEAVES, *HOST, "checkpoint", "models", "ops"),
    "runtime.drafters.draft_model": (*LEAVES, *HOST, "runtime", "checkpoint", "models", "ops"),
    "models": (*LEAVES, "checkpoint", "tensor_files", "ops"),
    # runtime.step only says how the tables that kernels read are laid out.
    "ops": (*LEAVES, "host_memory", "kernels_triton", "kernels_cpu", "runtime.step"),
    "kernels_triton": ("errors", "config", "tree", "runtime.step"),
    "kernels_cpu": ("errors", "config", "tree"),
    "checkpoint": ("errors", "config", "tensor_files"),
    "tensor_files": ("errors",),
    "plugins": ("errors",),
    "config": ("errors",),
    "errors": (),
    "host_memory": (),
    "tree": (),
    # The host half plans with numbers only.
    **dict.fromkeys(HOST, ("errors", *HOST)),
}

# These load no torch, not even through what they import.
TORCH_FREE = (
    *HOST,
    "",
    "__main__",
    "errors",
    "config",
    "host_memory",
    "plugins",
    "flags",
    "command_line",
    "console",
    "cli",
    "bench",
    "checkpoint",
    "sampling_defaults",
    "tensor_files",
    "text",
)
# These import no torch themselves.
NO_TORCH_OF_THEIR_OWN = (
    *TORCH_FREE,
    "http",
    "text_engine",
    "text_stream",
    "runtime.engine",
    "runtime.event_queue",
    "runtime.interfaces",
    "runtime.turnstile",
)

DEVICE_NAME = re.compile(r"(cuda|npu)(:\d+)?")

FORBIDDEN_MODULES = {
    "pickle": "runs code on load",
    "dill": "runs code on load",
    "cloudpickle": "runs code on load",
    "joblib": "runs code on load",
    "marshal": "crashes on bad input",
    "shelve": "is pickle",
    "subprocess": "starts other programs",
    "multiprocessing": "sends pickles",
}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "torch.save",
    "torch.hub.load",
    "os.system",
    "os.popen",
    "os.execv",
    "os.fork",
    "yaml.load",
    "np.load",
    "numpy.load",
}
# (module, what) -> why it is right there.
ALLOWED: Mapping[tuple[str, str], str] = {
    ("kernels_cpu.build", "subprocess"): "runs the system's compiler on the package's own sources",
}

MUTABLE_CALLS = {
    "list",
    "dict",
    "set",
    "bytearray",
    "defaultdict",
    "OrderedDict",
    "Counter",
    "deque",
    "count",
    "Lock",
    "RLock",
    "Condition",
    "Event",
    "Semaphore",
    "Queue",
    "SimpleQueue",
    "local",
    "ContextVar",
    "WeakKeyDictionary",
    "WeakValueDictionary",
    "Random",
    "default_rng",
    "Generator",
    "ThreadPoolExecutor",
}
MUTATING_METHODS = {
    "append",
    "add",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "popleft",
    "remove",
    "setdefault",
    "update",
    "sort",
    "reverse",
}


def name_of(path: Path) -> str:
    """The module's name below xylite; "" is xylite itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> Mapping[str, ast.Module]:
    return {name_of(p): ast.parse(p.read_text()) for p in sorted(PACKAGE.rglob("*.py"))}


def in_layers(module: str, layers: tuple[str, ...]) -> bool:
    return any(module == x or (x and module.startswith(x + ".")) for x in layers)


def layer_of(module: str) -> str | None:
    matching = [x for x in MAY_IMPORT if module == x or (x and module.startswith(x + "."))]
    return max(matching, key=len, default=None)


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


def test_every_module_has_a_layer():
    homeless = [m for m in modules() if layer_of(m) in (None, "") and m]
    assert not homeless, f"not in MAY_IMPORT: {homeless}"


def test_imports_go_down_only():
    wrong = []
    for module, tree in modules().items():
        layer = layer_of(module)
        assert layer is not None
        for imported in own_imports(tree, module):
            target = layer_of(imported)
            if target != layer and target not in MAY_IMPORT[layer]:
                wrong.append(f"{module or 'xylite'} imports {imported or 'xylite'}")
    assert not wrong, misses(wrong)


def test_no_module_is_part_of_an_import_cycle():
    edges = {m: set(own_imports(t, m)) & set(modules()) - {m} for m, t in modules().items()}
    left = dict(edges)
    while True:
        done = [m for m, targets in left.items() if not targets & set(left)]
        if not done:
            break
        for m in done:
            del left[m]
    assert not left, f"in or above a cycle: {sorted(left)}"


def test_torch_is_imported_only_where_tensors_are():
    wrong = [
        f"{module} imports {name}"
        for module, tree in modules().items()
        if in_layers(module, NO_TORCH_OF_THEIR_OWN) and not module.endswith("draft_model")
        for name in imports(tree, module)
        if name.split(".")[0] in ("torch", "triton")
    ]
    assert not wrong, misses(wrong)


def test_host_half_has_no_clock_no_chance_and_no_io():
    banned = {
        "time",
        "datetime",
        "random",
        "secrets",
        "uuid",
        "socket",
        "asyncio",
        "os",
        "threading",
    }
    wrong = [
        f"{module} imports {name}"
        for module, tree in modules().items()
        if in_layers(module, HOST) and layer_of(module) in HOST
        for name in imports(tree, module)
        if name.split(".")[0] in banned
    ]
    assert not wrong, misses(wrong)


def test_device_names_stand_only_in_ops():
    wrong = []
    for module, tree in modules().items():
        if in_layers(module, ("ops",)):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if DEVICE_NAME.fullmatch(node.value):
                    wrong.append(f"{module}:{node.lineno}: {node.value!r}")
            elif isinstance(node, ast.Attribute) and dotted(node) in ("torch.cuda", "torch.npu"):
                wrong.append(f"{module}:{node.lineno}: {dotted(node)}")
    assert not wrong, misses(wrong)


def module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run at import, those under `if` and `try` too."""
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        statement = todo.pop()
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for part in ("body", "orelse", "finalbody"):
                todo += getattr(statement, part, [])
            for handler in getattr(statement, "handlers", []):
                todo += handler.body


def is_mutable(value: ast.expr | None) -> bool:
    displays = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    if isinstance(value, displays):
        return True
    return isinstance(value, ast.Call) and dotted(value.func).split(".")[-1] in MUTABLE_CALLS


def mutated_names(tree: ast.Module) -> set[str]:
    """Names whose object something in the module changes in place."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript | ast.Attribute):
            if isinstance(node.ctx, ast.Store | ast.Del):
                found.add(dotted(node.value))
        elif isinstance(node, ast.Call):
            method = node.func
            if isinstance(method, ast.Attribute) and method.attr in MUTATING_METHODS:
                found.add(dotted(method.value))
    return found


def test_no_mutable_state_at_module_level():
    """A constant table may be a dict or list if its name says constant and nobody changes it."""
    wrong = []
    for module, tree in modules().items():
        constants: set[str] = set()
        for statement in module_level(tree):
            if isinstance(statement, ast.Assign):
                targets, value = statement.targets, statement.value
            elif isinstance(statement, ast.AnnAssign):
                targets, value = [statement.target], statement.value
            else:
                continue
            if not is_mutable(value):
                continue
            for target in targets:
                name = dotted(target)
                constants.add(name)
                is_call = isinstance(value, ast.Call)
                is_constant = name.isupper() or (name.startswith("__") and name.endswith("__"))
                if not is_constant or (
                    is_call and dotted(value.func) not in ("dict", "set", "list")
                ):
                    wrong.append(f"{module}:{statement.lineno}: {name} is mutable")
        changed = constants & mutated_names(tree)
        wrong += [f"{module}: {name} is a module's constant and is changed" for name in changed]
        wrong += [
            f"{module}:{node.lineno}: global {', '.join(node.names)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Global)
        ]
    assert not wrong, misses(wrong)


def test_only_config_reads_the_environment():
    wrong = [
        f"{module}:{node.lineno}"
        for module, tree in modules().items()
        if module != "config"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and dotted(node) in ("os.environ", "os.getenv")
    ]
    assert not wrong, misses(wrong)


def test_only_the_command_touches_logging_set_up_and_the_interpreter():
    """As a library, xylite changes nothing of its host's."""
    ours = {"logging.basicConfig", "sys.setswitchinterval", "logging.captureWarnings"}
    wrong = [
        f"{module}:{node.lineno}: {dotted(node)}"
        for module, tree in modules().items()
        if module != "cli"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and dotted(node) in ours
    ]
    assert not wrong, misses(wrong)


def test_nothing_runs_code_from_data():
    wrong = []
    for module, tree in modules().items():
        used = {name.split(".")[0] for name in imports(tree, module)} & FORBIDDEN_MODULES.keys()
        wrong += [
            f"{module}: {name} {FORBIDDEN_MODULES[name]}"
            for name in used
            if (module, name) not in ALLOWED
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = dotted(node.func)
                if called in FORBIDDEN_CALLS and (module, called) not in ALLOWED:
                    wrong.append(f"{module}:{node.lineno}: {called}()")
                if any(k.arg == "trust_remote_code" for k in node.keywords):
                    wrong.append(f"{module}:{node.lineno}: trust_remote_code")
    assert not wrong, misses(wrong)


def test_allowances_are_still_needed():
    for module, what in ALLOWED:
        tree = modules()[module]
        names = {n.split(".")[0] for n in imports(tree, module)}
        calls = {dotted(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        assert what in names | calls, f"{module} no longer uses {what}"


# One child imports what is slow and foreign, then forks for each module: every module of xylite is
# still the first of xylite to be imported in its process.
IMPORT_EACH = """
import importlib, os, sys
for name in sys.argv[1].split():
    importlib.import_module(name)
failed = 0
for name in sys.argv[2].split():
    if os.fork() == 0:
        try:
            importlib.import_module(name)
            ours = "torch" in sys.argv[1].split()
            assert ours or "torch" not in sys.modules, "torch came with it"
        except BaseException as e:
            print(f"{name}: {type(e).__name__}: {e}", flush=True)
            os._exit(1)
        os._exit(0)
    failed |= os.wait()[1]
sys.exit(bool(failed))
"""


@pytest.mark.parametrize("torch_free", [True, False], ids=["torch_free", "with_torch"])
def test_each_module_imports_alone_in_a_fresh_process(torch_free: bool):
    names = [
        f"xylite.{m}".removesuffix(".")
        for m in modules()
        if (in_layers(m, TORCH_FREE) and not m.endswith("draft_model")) == torch_free
    ]
    foreign = "numpy msgspec" if torch_free else "numpy msgspec aiohttp torch"
    child = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH, foreign, " ".join(names)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=150,
    )
    assert child.returncode == 0, child.stdout + child.stderr
