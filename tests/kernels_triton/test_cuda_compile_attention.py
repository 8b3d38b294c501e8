"""The attention kernels for CUDA, as far as a machine without a GPU can tell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels_triton.attention_cases import table_cases

ROOT = Path(__file__).parent.parent.parent
PARTS = 4
# What a block may use, in bytes. The tiles of sm_80 also serve chips that have 99 KiB.
SHARED = {"sm_80": 99 * 1024, "sm_90": 227 * 1024}
# A process of its own, because this one runs kernels in the interpreter.
CHILD = """
import json, sys
from tests.kernels_triton.attention_cases import table_cases
from tests.kernels_triton.compile_cuda import compiled
chip, part, parts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for case in list(table_cases(chip))[part::parts]:
    print(json.dumps(compiled(case, int(chip.removeprefix("sm_")))), flush=True)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
def test_attention_fits_the_chip_without_spilling(chip, part):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_DEFAULT_FP_FUSION"] = "1"  # said, because Triton warns that its default changes
    child = subprocess.run(
        [sys.executable, "-c", CHILD, chip, str(part), str(PARTS)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=env,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    made = [json.loads(line) for line in child.stdout.splitlines()]
    cases = list(table_cases(chip))[part::PARTS]
    assert [m["name"] for m in made] == [c.name for c in cases]
    for one, case in zip(made, cases, strict=True):
        assert one["local"] == 0 and one["stack"] == 0, one
        assert one["shared"] <= SHARED[chip], one
        # wgmma multiplies 64 rows at a time: smaller tiles use the older instruction.
        wide = chip == "sm_90" and case.constants.get("TILE_Q", 0) >= 64
        assert one["wgmma"] == wide, one
