"""A model's weights: from safetensors files to tensors of our own.

Owns which weight lies in which file, number formats, and the account of what was asked for and what is there. The model
asks for what it needs by name and shape while it is built; problems are collected and raised all at once at the end.
Files are mapped into memory while this object is open, and what leaves it is a copy: no page of a file stays behind.

A weight in GGUF blocks is stored as [rows, bytes_per_row] uint8, and the file's metadata says so under `shoal.gguf`:
JSON `{name: {"type": "Q4_1", "shape": [rows, columns]}}`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.executor.kernels.grouped_linear import Bits
from services.executor.quantization.gguf_blocks import dequantize_into, expected_bytes
from services.executor.quantization.groups import STORED_BITS, Groups, joined, quantize, read_blocks
from shared.errors import ModelError

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_FLOATS: Final = ("F64", "F32", "F16", "BF16")
_HARMLESS_SUFFIXES: Final = (".rotary_emb.inv_freq",)
"""Written by old versions of transformers; computed from the configuration instead."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a weight lies, and what it is once it is numbers."""

    file: Any  # safe_open
    shape: tuple[int, ...]
    dtype: str
    blocks: str | None
    """Its GGUF type if it is stored in blocks."""


class Weights:
    """The weights in a model folder. A context manager: leaving it without an exception calls `finish`."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        """Read the headers of the files in `folder`. Raises ModelError that names the file or weight at fault.

        `dtype` is for products to keep their weights in; what is loaded here is float32.
        """
        self.dtype: Final = dtype
        self._folder = folder
        self._stored: dict[str, _Stored] = {}
        self._taken: set[str] = set()
        self._problems: list[str] = []
        for path in _files(folder):
            self._open(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        self._stored.clear()

    @property
    def num_bytes(self) -> int:
        """What all weights take in memory as float32."""
        return sum(math.prod(stored.shape) for stored in self._stored.values()) * torch.float32.itemsize

    def load(self, parts: Mapping[str, tuple[int, ...]]) -> Tensor:
        """The named weights below each other (along the first dimension), float32, in memory of their own.

        `parts` gives the shape that each must have. One that is missing or has another shape is noted for `finish`, and
        its part of the result means nothing.
        """
        num_rows, trailing = sum(shape[0] for shape in parts.values()), next(iter(parts.values()))[1:]
        out = torch.empty(num_rows, *trailing)
        first = 0
        for name, shape in parts.items():
            self._read_into(out[first : first + shape[0]], name)
            first += shape[0]
        return out

    def load_groups(self, parts: Mapping[str, tuple[int, ...]], bits: Bits | None) -> Groups:
        """The weights of `parts`, one below the other, in groups of 32 columns.

        Groups that are stored as such are taken as they are; other numbers are brought into `bits`, or into 8 if it is
        None. Problems are noted as by `load`.
        """
        found = []
        for name, shape in parts.items():
            stored = self._stored.get(name)
            if stored is not None and stored.shape == shape and stored.blocks in STORED_BITS:
                self._taken.add(name)
                found.append(read_blocks(stored.file.get_tensor(name).numpy(), stored.blocks))
            else:
                found.append(self._quantized(name, shape, bits or 8))
        return joined(found)

    def skip_if_equal(self, name: str, other: Tensor) -> None:
        """Pass over a weight that may be in the files although the model uses `other` in its place.

        If it is there and differs, that is noted for `finish`: the configuration and the files contradict each other.
        """
        if name in self._stored and self._stored[name].shape == other.shape:
            copy = self.load({name: tuple(other.shape)})
            if torch.equal(copy, other):
                return
            self._problems.append(f"{name} differs from the weight that it is tied to")

    def _quantized(self, name: str, shape: tuple[int, ...], bits: Bits) -> Groups:
        num_problems = len(self._problems)
        weight = self.load({name: shape})
        if len(self._problems) == num_problems:
            try:
                return quantize(weight.numpy(), bits)
            except ValueError as error:
                self._problems.append(f"{name} {error}")
        return quantize(np.zeros(shape, np.float32), bits)

    def skip_tied(self, name: str, groups: Groups) -> None:
        """As `skip_if_equal`, for a weight that is used in groups."""
        if name in self._stored and self._stored[name].shape == groups.q.shape:
            copy = self.load_groups({name: groups.q.shape}, None)
            if not (np.array_equal(copy.q, groups.q) and np.array_equal(copy.scales, groups.scales)):
                self._problems.append(f"{name} differs from the weight that it is tied to")

    def note(self, problem: str) -> None:
        """Something that is wrong with a weight, for `finish`."""
        self._problems.append(problem)

    def finish(self) -> None:
        """Raise ModelError that lists every weight missing, of the wrong shape or left over, if there is any."""
        extra = sorted(name for name in self._stored.keys() - self._taken if not name.endswith(_HARMLESS_SUFFIXES))
        problems = self._problems + [f"{name} is not part of this architecture" for name in extra]
        if problems:
            raise ModelError(f"the weights in {self._folder} do not fit its config.json: " + "; ".join(problems))

    def _open(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise ModelError(f"{path} is missing") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a safetensors file: {error}") from error
        in_blocks = _block_metadata(path, file.metadata() or {})
        for name in file.keys():  # noqa: SIM118  # safe_open is not a mapping
            header = file.get_slice(name)
            shape, dtype, blocks = tuple(header.get_shape()), header.get_dtype(), None
            if name in in_blocks:
                blocks, shape = _blocks_of(path, name, in_blocks[name], shape, dtype)
            elif dtype not in _FLOATS:
                raise ModelError(f"{path}: {name} holds {dtype}; supported are {', '.join(_FLOATS)} and GGUF blocks")
            if name in self._stored:
                raise ModelError(f"{path}: {name} is in another file too")
            self._stored[name] = _Stored(file, shape, dtype, blocks)

    def _read_into(self, out: Tensor, name: str) -> None:
        stored = self._stored.get(name)
        if stored is None:
            self._problems.append(f"{name} is missing")
            return
        self._taken.add(name)
        if stored.shape != out.shape:
            self._problems.append(f"{name} has shape {list(stored.shape)}, expected {list(out.shape)}")
        elif stored.blocks is None:
            out.copy_(stored.file.get_tensor(name))
        else:
            try:
                dequantize_into(out.numpy(), stored.file.get_tensor(name).numpy(), stored.blocks)
            except ValueError as error:
                self._problems.append(f"{name}: {error}")


def _files(folder: Path) -> list[Path]:
    """The model's safetensors files: those of the index if there is one, else the single one."""
    if not (folder / _INDEX).exists():
        return [folder / _SINGLE]
    try:
        names = json.loads((folder / _INDEX).read_bytes())["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder / _INDEX} is not an index of safetensors files: {error!r}") from error


def _block_metadata(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        entries = json.loads(metadata.get("shoal.gguf", "{}"))
    except ValueError as error:
        raise ModelError(f"{path}: its metadata shoal.gguf is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise ModelError(f"{path}: its metadata shoal.gguf is not an object")
    return entries


def _blocks_of(
    path: Path, name: str, entry: Any, stored_shape: tuple[int, ...], dtype: str
) -> tuple[str, tuple[int, ...]]:
    """The GGUF type and the shape in numbers of a weight stored in blocks, checked against its bytes."""
    try:
        kind, rows, columns = str(entry["type"]), int(entry["shape"][0]), int(entry["shape"][1])
        expected = expected_bytes(kind, (rows, columns))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelError(f"{path}: {name}: its entry in shoal.gguf is wrong: {error!r}") from error
    if dtype != "U8" or stored_shape != expected:
        raise ModelError(
            f"{path}: {name} holds {dtype} {list(stored_shape)}, "
            f"but {kind} of {rows} × {columns} takes U8 {list(expected)}"
        )
    return kind, (rows, columns)
