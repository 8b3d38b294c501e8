"""Memory is what the machine and the control groups leave to this process."""

from pathlib import Path

import pytest

from xylite import host_memory


def test_memory_is_bounded_by_the_machine():
    free, total = host_memory.host_memory()
    assert 0 < free <= total


@pytest.mark.parametrize("version", [1, 2])
def test_memory_limits_of_control_groups_are_read(version, tmp_path: Path):
    names = {1: ("limit_in_bytes", "usage_in_bytes", "total_"), 2: ("max", "current", "")}
    limit, used, prefix = names[version]
    (tmp_path / f"memory.{limit}").write_text("1000\n")
    (tmp_path / f"memory.{used}").write_text("700\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\n{prefix}inactive_file 200\nfile 400\n")
    assert host_memory._group_memory(tmp_path) == (500, 1000)
    (tmp_path / f"memory.{limit}").write_text("max\n")
    assert host_memory._group_memory(tmp_path) is None
    assert host_memory._group_memory(tmp_path / "absent") is None
