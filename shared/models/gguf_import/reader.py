"""Reads a GGUF file: its metadata as Python values, its tensors as views of the mapped file.

Written for this purpose rather than taken from the `gguf` package, whose reader makes an array of every string (ten
seconds for a vocabulary of 150,000) and trusts the file's counts.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from shared.errors import ModelError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_DIMENSIONS: Final = 4
_ALIGNMENT: Final = 32


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the file. `shape` has the rows first, the other way round than GGUF writes it."""

    name: str
    kind: str
    """F32, F16, BF16, or the name of a block type such as Q4_1."""
    shape: tuple[int, ...]
    row_bytes: int
    data: npt.NDArray[np.uint8]
    """uint8 [rows, row_bytes], a view of the mapped file; one row for a vector."""


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The content of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def read_gguf(path: Path) -> GGUFFile:
    """Map the file and read its directory. Raises ModelError if it is not a complete GGUF file of a known version."""
    if path.stat().st_size < len(_MAGIC) + 4:
        raise ModelError(f"{path} is not a GGUF file")
    cursor = _Cursor(path)
    if (magic := cursor.take(len(_MAGIC))) != _MAGIC:
        raise ModelError(f"{path} is not a GGUF file{' but a web page' if magic.lstrip()[:1] == b'<' else ''}")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise ModelError(f"{path} is a GGUF file of version {version}; little-endian files of 2 and 3 can be read")
    num_tensors, num_entries = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(num_entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    entries = [_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ModelError(f"{path}: general.alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors = {entry.name: _tensor(cursor, start, entry) for entry in entries}
    return GGUFFile(path, metadata, tensors)


class _Entry(NamedTuple):
    name: str
    type_number: int
    shape: tuple[int, ...]
    offset: int


def _entry(cursor: "_Cursor") -> _Entry:
    """The next tensor of the directory."""
    name, num_dimensions = cursor.string(), cursor.number("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ModelError(f"{cursor.path}: the tensor {name} has {num_dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(num_dimensions))[::-1]
    return _Entry(name, cursor.number("I"), shape, cursor.number("Q"))


def _tensor(cursor: "_Cursor", start: int, entry: _Entry) -> Tensor:
    try:
        kind = GGMLQuantizationType(entry.type_number)
    except ValueError:
        raise ModelError(f"{cursor.path}: the tensor {entry.name} has the unknown type {entry.type_number}") from None
    block_items, block_bytes = GGML_QUANT_SIZES[kind]
    columns = entry.shape[-1]
    if columns % block_items:
        raise ModelError(f"{cursor.path}: the rows of {entry.name} have {columns} items, no multiple of {block_items}")
    num_rows = math.prod(entry.shape[:-1])
    row_bytes = columns // block_items * block_bytes
    data = cursor.slice(start + entry.offset, num_rows * row_bytes)
    return Tensor(entry.name, str(kind.name), entry.shape, row_bytes, data.reshape(num_rows, row_bytes))


class _Cursor:
    """A place in the mapped file that moves on with every value; no read goes past the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self._bytes: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        self._view = self._bytes.data

    def slice(self, start: int, length: int) -> npt.NDArray[np.uint8]:
        if start + length > len(self._bytes):
            raise ModelError(f"{self.path} is cut short: it has {len(self._bytes)} bytes and should have more")
        return self._bytes[start : start + length]

    def take(self, length: int) -> bytes:
        start, end = self.position, self.position + length
        if end > len(self._bytes):
            raise ModelError(f"{self.path} is cut short: it has {len(self._bytes)} bytes and should have more")
        self.position = end
        return bytes(self._view[start:end])

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        content = self.take(self.number("Q"))
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path} holds text that is not UTF-8: {error}") from error

    def value(self, type_number: int) -> Any:
        if type_number == _STRING:
            return self.string()
        if type_number == _ARRAY:
            return self._array()
        if type_number in _SCALARS:
            return self.number(_SCALARS[type_number])
        raise ModelError(f"{self.path} holds metadata of the unknown type {type_number}")

    def _array(self) -> list[Any]:
        item_type, length = self.number("I"), self.number("Q")
        if item_type == _STRING:
            return [self.string() for _ in range(length)]
        if item_type not in _SCALARS:
            raise ModelError(f"{self.path} holds metadata in an array of the unknown type {item_type}")
        code = _SCALARS[item_type]
        content = self.take(length * struct.calcsize(f"<{code}"))
        return list(struct.unpack(f"<{length}{code}", content))
