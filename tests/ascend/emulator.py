"""Executes module.hivm.opt.mlir, the last program before CANN's closed code generator.

That program is split into cube and vector parts, software-pipelined, and its memory is planned.
Per block one cube core and two vector cores run as threads; UB, L1 and L0C are byte arrays
addressed as planned; cross-core flags are counted, and a deadlock is noticed the moment it exists.
Every access is checked against the bounds of its memory or argument.

In order per core: races between the pipes of one core are not seen, nor is what the code generator
and its library make of the calls. Output of compiler generations 1.1.0 and 1.2.0 is understood.
"""

import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .cores import Core, Flags
from .decoder import Decoder, Env
from .memory import Bytes, Fault, View
from .program_text import Function, memref_type, parse

POISON = 0xAB


@dataclass(slots=True)
class Result:
    """leftover: flags set but never awaited; calls: how often each library function ran."""

    leftover: list[Any] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)


def _bind(
    function: Function, args: Sequence[Any], grid: Sequence[int], workspace: Bytes, lock: Bytes
) -> Env:
    """The values of a function's arguments: hidden ones, the kernel's, the grid's sizes."""
    env: Env = {}
    given = iter(args)
    rest = len(args)
    sizes = list(grid)
    for a in function.arguments:
        if "ffts_base" in a.attributes:
            env[a.name] = 0
        elif "sync_block_lock" in a.attributes:
            env[a.name] = View(lock, "i8", 0, [lock.size], [1], "lock")
        elif "workspace" in a.attributes:
            env[a.name] = View(workspace, "i8", 0, [workspace.size], [1], "workspace")
        elif rest:
            rest -= 1
            value = next(given)
            if a.type.startswith("memref"):
                memory = value.reshape(-1).view(np.uint8)
                env[a.name] = View(
                    memory, memref_type(a.type).dtype, 0, [value.size], [1], f"argument {a.name}"
                )
            else:
                env[a.name] = np.float32(value) if a.type == "f32" else int(value)
        else:
            env[a.name] = sizes.pop(0)
    return env


def launch(text: str, args: Sequence[Any], grid: int | Sequence[int]) -> Result:
    """Run the compiled program `text` on every block of `grid`, one block after the other.

    args  the kernel's run-time arguments in order: contiguous numpy arrays (bfloat16 as uint16 or
          int16, see memory.to_bf16), written in place, or numbers
    Raises Fault with what every failing core did wrong.
    """
    module = parse(text)
    decoder = Decoder(module)
    shape = [grid] if isinstance(grid, int) else list(grid)
    shape += [1] * (3 - len(shape))
    kernels = {k: v for k, v in module.functions.items() if "infer_" not in k}
    mixed = any(k.endswith("_mix_aic") for k in kernels)
    bodies = {k: decoder.block(f.body) for k, f in kernels.items()}
    per_block = 0
    for name, function in module.functions.items():
        if name.endswith("infer_workspace_shape_function"):
            found = re.search(r"constant (\d+)", function.body[0].text)
            per_block = int(found[1]) if found else 0
    workspace = np.full(max(1, per_block * shape[0]), POISON, np.uint8)
    lock = np.zeros(64, np.uint8)
    result = Result()
    for block in range(shape[0] * shape[1] * shape[2]):
        _run_block(
            block, kernels, bodies, module.sizes, mixed, result, (args, shape, workspace, lock)
        )
    return result


def _run_block(
    block: int,
    kernels: dict[str, Function],
    bodies: dict[str, Callable[[Core, Env], list[Any] | None]],
    sizes: dict[str, int],
    mixed: bool,
    result: Result,
    arguments: tuple[Sequence[Any], list[int], Bytes, Bytes],
) -> None:
    flags = Flags(3 if mixed else 1)
    shared = {s: np.full(sizes[s], POISON, np.uint8) for s in ("cbuf", "cc")}
    cores = []
    for name, function in kernels.items():
        cube = name.endswith("_mix_aic") or "AIC" in function.attributes
        for sub_block in (0, 1) if mixed and not cube else (0,):
            spaces = {**shared, "ub": np.full(sizes["ub"], POISON, np.uint8)}
            cores.append((name, Core("aic" if cube else "aiv", sub_block, block, spaces, flags)))
    faults: list[str] = []

    def run(name: str, core: Core) -> None:
        failed = True
        try:
            bodies[name](core, _bind(kernels[name], *arguments))
            failed = False
        except Fault as e:
            faults.append(f"{core.kind}{core.sub_block}: {e}")
        finally:
            flags.core_ended(failed)

    threads = [threading.Thread(target=run, args=c) for c in cores]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if faults:
        # A core that stops leaves the others waiting: their deadlock is a consequence.
        causes = [f for f in faults if "DEADLOCK" not in f] or faults
        raise Fault(f"block {block}: " + "; ".join(causes))
    left = {k: v for k, v in flags.counts.items() if v}
    if left:
        result.leftover.append((block, left))
    for name, core in cores:
        events = {k: v for k, v in core.events.items() if v}
        if core.kind == "aiv" and events:
            result.leftover.append((block, name, core.sub_block, events))
        result.calls += core.calls
