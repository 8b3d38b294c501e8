"""What no module may do: name devices, keep state, read the environment, run code from data.

The rules are data at the top.
"""

import ast
import re
from collections.abc import Iterator, Mapping

from tests.source import dotted, imports, in_layers, misses, modules

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
