"""GGUF and safetensors files: one clear and quick error for everything that cannot be true."""

import json
import struct
import time

import gguf
import pytest

from tests.models import tiny
from tests.models.raw_files import entry, info, raw_gguf, raw_safetensors, tensor, text
from xylite.checkpoint import open_checkpoint
from xylite.errors import ConfigError
from xylite.tensor_files import BLOCKS, read_gguf, read_safetensors

HUGE = 2**63


ALIGN = "general.alignment"


BROKEN_GGUF: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too short"),
    "short": (b"GGUF\3\0\0\0", "too short"),
    "other magic": (raw_gguf(magic=b"GGML"), "begins with b'GGML'"),
    "version 1": (raw_gguf(version=1), "version 1 is not read"),
    "version 4": (raw_gguf(version=4), "version 4 is not read"),
    "big endian": (raw_gguf(version=3 << 24), "big-endian"),
    "tensor count": (raw_gguf(num_tensors=HUGE), f"{HUGE} tensors, the limit"),
    "tensor count beyond the file": (raw_gguf(num_tensors=1000), "truncated"),
    "key count": (raw_gguf(num_keys=HUGE), f"{HUGE} metadata keys, the limit"),
    "key count beyond the file": (raw_gguf(num_keys=60000), "truncated"),
    "key length": (
        raw_gguf(keys=(struct.pack("<Q", HUGE) + bytes(40),)),
        "metadata key 0: .* bytes in a string, the limit",
    ),
    "key length beyond the file": (
        raw_gguf(keys=(struct.pack("<Q", 5000) + bytes(40),)),
        "metadata key 0: 5000 bytes are needed .* truncated",
    ),
    "key not UTF-8": (raw_gguf(keys=(entry(b"\xff\xfe", 4, bytes(4)),)), "not UTF-8"),
    "value not UTF-8": (raw_gguf(keys=(entry("k", 8, text(b"\xff")),)), "key 'k': .* not UTF-8"),
    "key twice": (
        raw_gguf(keys=(entry("k", 4, bytes(4)), entry("k", 4, bytes(4)))),
        "key 'k': stands twice",
    ),
    "value type": (raw_gguf(keys=(entry("k", 77, bytes(8)),)), "key 'k': unknown value type 77"),
    "nested array": (
        raw_gguf(keys=(entry("k", 9, struct.pack("<IQ", 9, 1) + bytes(40)),)),
        "key 'k': an array of value type 9 is not read",
    ),
    "array length": (
        raw_gguf(keys=(entry("k", 9, struct.pack("<IQ", 4, HUGE)),)),
        "key 'k': .* numbers, the limit",
    ),
    "array beyond the file": (
        raw_gguf(keys=(entry("k", 9, struct.pack("<IQ", 10, 100)),)),
        "key 'k': 800 bytes are needed",
    ),
    "strings": (
        raw_gguf(keys=(entry("k", 9, struct.pack("<IQ", 8, 2**30)),)),
        "key 'k': .* strings, the limit",
    ),
    "string in array": (
        raw_gguf(keys=(entry("k", 9, struct.pack("<IQQ", 8, 1, 9999)),)),
        "key 'k': 9999 bytes are needed",
    ),
    "alignment 0": (raw_gguf(keys=(entry(ALIGN, 4, struct.pack("<I", 0)),)), "power of two"),
    "alignment 24": (raw_gguf(keys=(entry(ALIGN, 4, struct.pack("<I", 24)),)), "power of two"),
    "alignment 2**31": (
        raw_gguf(keys=(entry(ALIGN, 4, struct.pack("<I", 2**31)),)),
        "alignment': 2147483648 is not a power of two up to",
    ),
    "alignment text": (raw_gguf(keys=(entry(ALIGN, 8, text("32")),)), "power of two"),
    "no dimensions": (raw_gguf(tensors=(tensor(dims=()),)), "tensor 'a': 0 dimensions"),
    "five dimensions": (raw_gguf(tensors=(tensor(dims=(1,) * 5),)), "tensor 'a': 5 dimensions"),
    "2**32 dimensions": (
        raw_gguf(tensors=(text("a") + struct.pack("<I", 2**32 - 1),)),
        "4294967295 dimensions",
    ),
    "product overflow": (
        raw_gguf(tensors=(tensor(dims=(2**32, 2**32)),)),
        "tensor 'a': impossible dimensions",
    ),
    "dimension 0": (raw_gguf(tensors=(tensor(dims=(32, 0)),)), "impossible dimensions"),
    "unknown type": (raw_gguf(tensors=(tensor(kind=999),)), "tensor 'a': tensor type 999 is not"),
    "unsupported type": (raw_gguf(tensors=(tensor(kind=16),)), "supported: F32, F16, Q4_0"),
    "half a block": (
        raw_gguf(tensors=(tensor(dims=(48,), kind=8),)),
        "rows of 48 elements do not divide into Q8_0 blocks of 32",
    ),
    "misaligned": (raw_gguf(tensors=(tensor(dims=(8,), offset=4),)), "offset 4 is not a multiple"),
    "past the end": (
        raw_gguf(tensors=(tensor(dims=(33,)),)),
        "tensor 'a': ends at byte .* truncated",
    ),
    "offset far away": (raw_gguf(tensors=(tensor(offset=HUGE),)), "tensor 'a': ends at byte"),
    "overlap": (
        raw_gguf(tensors=(tensor(), tensor("b", (8,), offset=96)), data=256),
        "'a' and 'b' overlap",
    ),
    "tensor twice": (
        raw_gguf(tensors=(tensor(), tensor(offset=128)), data=256),
        "tensor 'a': stands twice",
    ),
}


@pytest.mark.parametrize("case", BROKEN_GGUF)
def test_a_gguf_file_that_cannot_be_true_gives_one_quick_error(case, tmp_path):
    raw, message = BROKEN_GGUF[case]
    path = tmp_path / "broken.gguf"
    path.write_bytes(raw)
    start = time.process_time()
    with pytest.raises(ConfigError, match=message) as error:
        open_checkpoint(str(path))
    assert str(path) in str(error.value)
    assert time.process_time() - start < 1


def test_the_gguf_file_that_is_broken_above_is_read_when_it_is_whole(tmp_path):
    path = tmp_path / "whole.gguf"
    keys = (
        entry("n", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
        entry("s", 9, struct.pack("<IQ", 8, 2) + text("ä") + text("")),
        entry("f", 6, struct.pack("<f", 0.5)),
        entry("yes", 7, b"\1"),
        entry("big", 10, struct.pack("<Q", HUGE)),
        entry(ALIGN, 4, struct.pack("<I", 64)),
    )
    tensors = (tensor("a", (32, 2), 8, 0), tensor("b", (3,), 0, 128))
    path.write_bytes(raw_gguf(keys=keys, tensors=tensors, data=140, align=64))
    metadata, found = read_gguf(str(path))
    assert metadata["n"].tolist() == [1, -2, 3] and metadata["s"] == ["ä", ""]
    assert (metadata["f"], metadata["yes"], metadata["big"]) == (0.5, True, HUGE)
    a, b = found["a"], found["b"]
    assert (a.dtype, a.shape, a.nbytes, b.shape, b.nbytes) == ("Q8_0", (2, 32), 68, (3,), 12)
    assert a.offset % 64 == 0 and b.offset == a.offset + 128


def test_any_cut_of_a_gguf_file_is_an_error(tmp_path):
    cfg = tiny.config(num_hidden_layers=1, vocab_size=32)
    tiny.save_gguf(tmp_path / "m.gguf", cfg, tiny.tensors(cfg))
    raw = (tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 3000, 37), len(raw) - 33]:
        cut.write_bytes(raw[:size])
        with pytest.raises(ConfigError, match=r"cut\.gguf"):
            open_checkpoint(str(cut))


def test_block_sizes_are_those_of_the_gguf_package():
    for name, sizes in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == sizes


BROKEN_SAFETENSORS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "header length": (struct.pack("<Q", 2**62) + bytes(50), "claims 4611686018427387904 bytes"),
    "header cut": (raw_safetensors({"a": info()})[:30], "truncated"),
    "data cut": (raw_safetensors({"a": info()}, 15), "'a': ends at byte .* truncated"),
    "data left over": (raw_safetensors({"a": info()}, 20), "tensors end at byte"),
    "not JSON": (raw_safetensors(b"{]"), "not JSON"),
    "deep JSON": (raw_safetensors(b"[" * 100000), "not JSON"),
    "not UTF-8": (raw_safetensors(b'{"\xff": 1}'), "not JSON"),
    "a list": (raw_safetensors([]), "not a JSON object"),
    "entry": (raw_safetensors({"a": 3}), "'a': its header entry is not an object"),
    "dtype": (raw_safetensors({"a": info("Q9")}), "'a': unknown dtype 'Q9'"),
    "dtype list": (raw_safetensors({"a": info(["F32"])}), "'a': unknown dtype"),
    "shape": (raw_safetensors({"a": info(shape=[-4])}), "'a': impossible shape"),
    "shape float": (raw_safetensors({"a": info(shape=[4.0])}), "'a': impossible shape"),
    "shape bool": (raw_safetensors({"a": info(shape=[True])}), "'a': impossible shape"),
    "shape size": (raw_safetensors({"a": info(shape=[5])}), "does not take the 16 bytes"),
    "shape overflow": (raw_safetensors({"a": info(shape=[2**40, 2**40])}), "does not take"),
    "span": (raw_safetensors({"a": info(span=[16, 0])}), "'a': impossible data_offsets"),
    "span of one": (raw_safetensors({"a": info(span=[0])}), "'a': impossible data_offsets"),
    "overlap": (
        raw_safetensors({"a": info(), "b": info(span=[8, 24])}, 24),
        "'a' and 'b' overlap",
    ),
    "twice": (
        raw_safetensors(b'{"a": %s, "a": %s}' % ((json.dumps(info()).encode(),) * 2)),
        "'a' stands twice",
    ),
}


@pytest.mark.parametrize("case", BROKEN_SAFETENSORS)
def test_a_safetensors_file_that_cannot_be_true_gives_one_error(case, tmp_path):
    raw, message = BROKEN_SAFETENSORS[case]
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=message) as error:
        open_checkpoint(str(tmp_path))
    assert str(path) in str(error.value)


def test_a_whole_safetensors_file_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw_safetensors({"__metadata__": {"format": "pt"}, "a": info()}))
    a = read_safetensors(str(path))["a"]
    assert (a.dtype, a.shape, a.nbytes) == ("F32", (4,), 16)
    assert a.offset + 16 == path.stat().st_size
