"""Compiles cases for an NVIDIA chip without a GPU: python -m ... CHIP PART PARTS -> JSON lines.

A process of its own, because Triton's interpreter, once chosen, is all there is in a process.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels_triton.compile_cases import Case, cases

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def resources(cubin: bytes) -> dict[str, int]:
    """Registers per thread, and bytes of stack and local memory, where spilled registers go."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", text)
    assert found, text
    return {name: int(n) for name, n in zip(("registers", "stack", "local"), found.groups())}


def compiled(case: Case, capability: int) -> dict[str, Any]:
    """What became of a case; pointers and strides are multiples of 16, as torch's are."""
    names = case.kernel.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    aligned = [
        [(i,), [["tt.divisibility", 16]]] for i, n in enumerate(names) if n in case.signature
    ]
    source = ASTSource(
        fn=case.kernel,
        signature=signature,
        constexprs=dict(case.constants),
        attrs={
            key: value
            for key, value in aligned
            if signature[names[key[0]]][0] == "*" or names[key[0]].endswith("stride")
        },
    )
    target = GPUTarget("cuda", capability, 32)
    kernel = triton.compile(source, target=target, options=dict(case.options))
    ptx = kernel.asm["ptx"]
    return {
        "name": case.name,
        "kernel": case.kernel.__name__,
        "shared": kernel.metadata.shared,
        "wgmma": "wgmma.mma_async" in ptx,
        "mma": "mma.sync" in ptx,
        **resources(kernel.asm["cubin"]),
    }


def main() -> None:
    chip, part, parts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for case in cases(chip, thorough=False)[part::parts]:
        print(json.dumps(compiled(case, int(chip.removeprefix("sm_")))), flush=True)


if __name__ == "__main__":
    main()
