"""Reading GGUF files, good and bad."""

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from shared.errors import ModelError
from shared.models.gguf_import.reader import read_gguf
from tests.models.tiny_gguf import write_tiny_gguf


def test_everything_is_read_as_the_gguf_package_reads_it(gguf_file: Path) -> None:
    ours, theirs = read_gguf(gguf_file), gguf.GGUFReader(gguf_file)
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == expected
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.kind == tensor.tensor_type.name
        assert list(mine.shape) == tensor.shape.tolist()[::-1]
        assert mine.data.tobytes() == tensor.data.tobytes()


def test_every_type_of_metadata_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "uint8": 2**8 - 1,
        "int8": -1,
        "uint16": 2**16 - 1,
        "int16": -2,
        "uint32": 2**32 - 1,
        "int32": -3,
        "uint64": 2**64 - 1,
        "int64": -4,
        "float32": 0.5,
        "float64": 0.1,
        "bool": True,
        "string": "Grüße 漢字",
    }
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    arrays = {"numbers": [1, -2, 3], "floats": [0.5, 1.5], "texts": ["a", "", "ß"], "flags": [True, False]}
    for key, array in arrays.items():
        writer.add_array(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_gguf(path).metadata == {"general.architecture": "llama"} | values | arrays


def test_another_alignment_is_honoured(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("token_embd.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_gguf(path).tensors["token_embd.weight"]
    assert tensor.data.tobytes() == array.tobytes()
    assert tensor.data.shape == (3, 16)


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path, gguf_file: Path) -> None:
    content = gguf_file.read_bytes()
    path = tmp_path / "x.gguf"
    for length in [*range(64), *random.Random(3).sample(range(64, len(content)), 60), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"is cut short|is not a GGUF file"):
            read_gguf(path)


def test_a_file_with_absurd_counts_is_refused_without_allocating_for_them(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    huge = 2**62
    key = struct.pack("<Q", 1) + b"k"
    for rest in (
        struct.pack("<QQ", 0, huge),
        struct.pack("<QQ", huge, 0),
        struct.pack("<QQ", 0, 1) + struct.pack("<Q", huge),
        struct.pack("<QQ", 0, 1) + key + struct.pack("<IQ", 8, huge),
        struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 5, huge),
        struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 8, huge),
        struct.pack("<QQ", 1, 0)
        + key
        + struct.pack("<I", 2)
        + struct.pack("<QQ", huge, huge)
        + struct.pack("<IQ", 0, 0),
    ):
        path.write_bytes(b"GGUF" + struct.pack("<I", 3) + rest)
        with pytest.raises(ModelError, match="cut short"):
            read_gguf(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(100), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), "little-endian"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99), "unknown type 99"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 1),
            "array of the unknown type 9",
        ),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + struct.pack("<I", 0), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<I", 9), "9 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 32, 77, 0), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 33, 2, 0), "no multiple of 32"),
    ],
)
def test_a_malformed_file_is_refused_in_words(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=complaint):
        read_gguf(path)


def test_an_impossible_alignment_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", metadata={"general.alignment": 0})
    with pytest.raises(ModelError, match=r"general\.alignment is 0"):
        read_gguf(path)
