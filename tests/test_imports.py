"""Who may import whom, and that each module imports alone.

Every import counts, those in functions and under TYPE_CHECKING too. The rules are data at the top;
a new module belongs to the layer with the longest matching name, and an unknown one fails.
"""

import subprocess
import sys
from collections.abc import Mapping

import pytest

from tests.source import ROOT, imports, in_layers, misses, modules, own_imports

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
    "runtime.budgets",
    "runtime.scheduler",
    "runtime.masks",
    "runtime.token_table",
    "runtime.task_table",
    "runtime.decomposition",
    "runtime.step",
    "runtime.interfaces",
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
        "runtime.event_queue",
        "runtime.request",
        "runtime.tickets",
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
        "host_memory",
        "models",
        "ops",
    ),
    "runtime.event_queue": (*LEAVES, *HOST),
    "runtime.turnstile": (),
    "runtime.tickets": (*LEAVES, *HOST, "runtime.event_queue"),
    "runtime.engine": (
        *LEAVES,
        *HOST,
        "runtime.event_queue",
        "runtime.tickets",
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
    "runtime.tickets",
    "runtime.turnstile",
)


def layer_of(module: str) -> str | None:
    matching = [x for x in MAY_IMPORT if module == x or (x and module.startswith(x + "."))]
    return max(matching, key=len, default=None)


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
