"""Memory of every compiled row of the tile table: .venv-ascend/bin/python -m tests.ascend.report

Prints one Markdown table per compiler generation: what each kernel uses of the unified buffer (one
vector core's), L1 and L0C, and how many of the two vector cores work in a mixed kernel.
"""

import sys

from tests.ascend.compiler import GENERATIONS, Program, compile_kernel
from tests.kernels_triton.compile_cases import cases

SPACES = {"ub": "UB", "cbuf": "L1", "cc": "L0C"}


def row(program: Program, buffered: bool) -> str:
    cells = [
        f"{program.memory[s] / 1024:.0f} of {program.limits[s] // 1024} K"
        if s in program.memory
        else ""
        for s in SPACES
    ]
    cores = f"{program.vector_cores} of 2" if program.vector_cores else ""
    result = "ok" if program.ok and not program.retries else program.error or "retried"
    return f"| {' | '.join([program.name, 'yes' if buffered else 'no', *cells, cores, result])} |"


def main() -> None:
    for generation in sys.argv[1:] or GENERATIONS:
        print(f"\nCompiler generation {generation}\n")
        print(f"| kernel | multi-buffer | {' | '.join(SPACES.values())} | vector cores | |")
        print("|---|---|---|---|---|---|---|")
        for case in cases(f"910b-{generation}", thorough=False):
            program = compile_kernel(
                case.kernel, case.signature, case.constants, name=case.name,
                generation=generation, **case.options,
            )  # fmt: skip
            print(row(program, bool(case.options.get("multibuffer"))), flush=True)


if __name__ == "__main__":
    main()
