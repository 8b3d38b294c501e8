import json
import logging
from dataclasses import asdict, replace

import pytest

from xylite.kernels_triton import tuned
from xylite.kernels_triton.tiles import HALF, Tiles

TUNED = Tiles(
    "linear", "sm_90", HALF, {"TILE_M": 16, "TILE_N": 32, "TILE_K": 64, "BAND": 2},
    {"num_warps": 2}, max_rows=16, n=4096, k=4096,
)  # fmt: skip


@pytest.fixture
def file(tmp_path, monkeypatch) -> tuned.TunedFile:
    monkeypatch.setenv("XYLITE_CACHE_DIR", str(tmp_path))
    return tuned.file_of("sm_90", "NVIDIA H200", "triton 3.9.0")


def test_what_is_kept_is_found_at_the_next_start(file, tmp_path, caplog):
    assert file.rows() == ()
    other = replace(TUNED, k=2048)
    faster = replace(TUNED, options={"num_warps": 4})
    for row in (TUNED, other, faster):
        file.keep(row)
    assert set(map(str, file.rows())) == {str(faster), str(other)}
    assert [p.name for p in (tmp_path / "tiles").iterdir()] == ["sm-90-nvidia-h200.json"]
    assert not caplog.records


def test_devices_of_one_chip_have_files_of_their_own(file):
    assert file.path != tuned.file_of("sm_90", "NVIDIA H100", "triton 3.9.0").path


@pytest.mark.parametrize("name", ["version", "device", "compiler", "kernels"])
def test_rows_of_another_device_compiler_or_kernel_are_not_used(file, caplog, name):
    file.write([TUNED])
    held = json.loads(file.path.read_text())
    file.path.write_text(json.dumps(held | {name: "another"}))
    assert file.rows() == ()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{file.path} is not used: its {name} is 'another', here it is" in record.getMessage()
    file.keep(TUNED)
    assert file.rows() == (TUNED,)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 3}', "\udcff"])
def test_a_file_that_is_no_table_is_named_in_one_warning(file, caplog, text):
    file.path.parent.mkdir()
    file.path.write_text(text, errors="surrogateescape")
    assert file.rows() == ()
    (record,) = caplog.records
    assert f"{file.path} is not used: " in record.getMessage()


SIZES = TUNED.sizes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"op": "norm"}, "no row of GEMM tiles for sm_90"),
        ({"chip": "sm_80"}, "no row of GEMM tiles for sm_90"),
        ({"dtype": 3}, "no row of GEMM tiles for sm_90"),
        ({"most_rows": 16}, "most_rows"),
        ({"sizes": [16]}, "sizes must be TILE_M, TILE_N, TILE_K, BAND"),
        ({"sizes": {"TILE_M": 16}}, "sizes must be TILE_M, TILE_N, TILE_K, BAND"),
        ({"sizes": {**SIZES, "TILE_N": 48}}, "TILE_N must be a power of two from 16 to 1024"),
        ({"sizes": {**SIZES, "TILE_M": 8}}, "TILE_M must be a power of two from 16"),
        ({"sizes": {**SIZES, "TILE_K": 2048}}, "TILE_K must be a power of two from 16 to 1024"),
        ({"sizes": {**SIZES, "BAND": 0}}, "BAND must be a power of two from 1 to 64"),
        ({"sizes": {**SIZES, "BAND": "4"}}, "BAND must be a power of two"),
        ({"options": {"num_wraps": 4}}, "options must be among num_stages, num_warps"),
        ({"options": {"num_warps": 0}}, "options must be from 1 to 64"),
        ({"options": {"num_warps": "4"}}, "options must be from 1 to 64"),
        ({"max_rows": -1}, "max_rows, n and k must be whole numbers"),
        ({"k": 1.5}, "max_rows, n and k must be whole numbers"),
    ],
)
def test_a_row_that_no_kernel_can_be_launched_with_is_refused(file, caplog, changes, said):
    file.write([TUNED])
    held = json.loads(file.path.read_text())
    held["rows"].append(asdict(TUNED) | changes)
    file.path.write_text(json.dumps(held))
    assert file.rows() == ()
    (record,) = caplog.records
    assert said in record.getMessage()


def test_the_hash_of_kernels_changes_with_their_source(tmp_path, monkeypatch):
    before = tuned.kernels_hash()
    assert before == tuned.kernels_hash() and len(before) == 16
    for name in tuned.KERNELS:
        (tmp_path / name).write_text("")
    monkeypatch.setattr(tuned, "__file__", str(tmp_path / "tuned.py"))
    empty = tuned.kernels_hash()
    (tmp_path / tuned.KERNELS[-1]).write_text("#")
    assert len({before, empty, tuned.kernels_hash()}) == 3


def test_a_folder_that_cannot_be_written_is_an_os_error(file, tmp_path):
    (tmp_path / "tiles").write_text("")
    with pytest.raises(OSError, match="tiles"):
        file.keep(TUNED)
