"""Every row of the tile table through NVIDIA's assembler, without a GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels_triton.compile_cases import cases

ROOT = Path(__file__).parent.parent.parent
PARTS = 4
# What a block may use, in bytes. The rows for sm_80 also serve chips that have 99 KiB.
SHARED = {"sm_80": 99 * 1024, "sm_90": 227 * 1024}


def outcomes(chip: str, part: int) -> list[dict]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_DEFAULT_FP_FUSION"] = "1"  # said, because Triton warns that its default changes
    child = subprocess.run(
        [sys.executable, "-m", "tests.kernels_triton.compile_cuda", chip, str(part), str(PARTS)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=env,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return [json.loads(line) for line in child.stdout.splitlines()]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
def test_rows_fit_the_chip_and_spill_nothing(chip, part):
    made = outcomes(chip, part)
    assert len(made) == len(cases(chip, thorough=False)[part::PARTS])
    for one in made:
        assert one["local"] == 0 and one["stack"] == 0, one
        assert one["shared"] <= SHARED[chip], one
        tile = re.search(r" (half|int8|w8a8|int4) (\d+)x\d+x\d+", one["name"])
        if tile:
            # wgmma multiplies 64 rows at a time: smaller tiles use the older instruction.
            wide = chip == "sm_90" and int(tile[2]) >= 64
            assert one["wgmma"] == wide and one["mma"] != wide, one
