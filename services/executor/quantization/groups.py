"""Weights in groups of 32 numbers with a scale and an offset: `w = scale · q + offset`, q unsigned in 4 or 8 bits.

Owns how GGUF's formats of that kind are read as they are, and how other numbers are brought into it.
Source of the formats: the `gguf` package; llama.cpp's `ggml-common.h`.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from services.executor.kernels.grouped_linear import Bits
from services.executor.kernels.quantize import GROUP

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]

STORED_BITS: Final[dict[str, Bits]] = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 8, "Q5_1": 8, "Q8_0": 8}
"""GGUF types that are such groups already, and the bits that their q needs here."""


LARGEST: Final = 4096.0
"""No weight of a model that works comes near it."""


class Groups(NamedTuple):
    """A weight's numbers."""

    q: Bytes  # [rows, columns]
    scales: Halves  # [rows, columns / GROUP]
    offsets: Halves  # likewise

    def rows(self, order: npt.NDArray[np.intp]) -> "Groups":
        """These rows, in this order."""
        return Groups(self.q[order], self.scales[order], self.offsets[order])


def joined(parts: Sequence[Groups]) -> Groups:
    """Weights of as many columns, one below the other."""
    return Groups(
        np.concatenate([part.q for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate([part.offsets for part in parts]),
    )


def read_blocks(blocks: Bytes, kind: str) -> Groups:
    """The groups in raw GGUF blocks [rows, bytes_per_row] of one of STORED_BITS, nothing rounded."""
    rows = len(blocks)
    has_offset, has_fifth_bit = kind in ("Q4_1", "Q5_1"), kind in ("Q5_0", "Q5_1")
    size = 34 if kind == "Q8_0" else 18 + 2 * has_offset + 4 * has_fifth_bit
    records = blocks.reshape(rows, -1, size)
    scales = _halves(records, 0)
    if kind == "Q8_0":
        q = records[:, :, 2:] ^ 0x80  # a signed byte plus 128
        return Groups(q.reshape(rows, -1).astype(np.uint8), scales, scales * np.float16(-128))
    offsets = _halves(records, 2) if has_offset else scales * np.float16(-16 if has_fifth_bit else -8)
    packed = records[:, :, -GROUP // 2 :]
    q = np.concatenate((packed & 15, packed >> 4), axis=2)
    if has_fifth_bit:
        at = 2 + 2 * has_offset
        bits = np.unpackbits(np.ascontiguousarray(records[:, :, at : at + 4]), axis=2, bitorder="little")
        q |= bits << 4
    return Groups(q.reshape(rows, -1).astype(np.uint8), scales, offsets)


def quantize(weight: npt.NDArray[np.float32], bits: Bits) -> Groups:
    """The nearest groups to numbers [rows, columns]: symmetric in 8 bits, from the least to the largest in 4.

    Raises ValueError for numbers too large for a float16 scale, infinite ones, and what is no number.
    """
    rows = len(weight)
    groups = weight.reshape(rows, -1, GROUP)
    if not np.abs(groups).max(initial=0) <= LARGEST:
        raise ValueError(f"holds numbers beyond {LARGEST:.0f}, or that are none")
    if bits == 8:
        scales = (np.abs(groups).max(-1) / np.float32(127)).astype(np.float16)
        q = np.rint(groups * _inverse(scales)[..., None]).clip(-127, 127).astype(np.int16) + 128
        return Groups(q.astype(np.uint8).reshape(rows, -1), scales, scales * np.float16(-128))
    lowest = groups.min(-1)
    scales = ((groups.max(-1) - lowest) / np.float32(15)).astype(np.float16)
    offsets = lowest.astype(np.float16)
    q = np.rint((groups - offsets[..., None].astype(np.float32)) * _inverse(scales)[..., None]).clip(0, 15)
    return Groups(q.astype(np.uint8).reshape(rows, -1), scales, offsets)


def numbers(groups: Groups) -> npt.NDArray[np.float32]:
    """What groups stand for, [rows, columns]."""
    q = groups.q.reshape(len(groups.q), -1, GROUP).astype(np.float32)
    return (q * groups.scales[..., None].astype(np.float32) + groups.offsets[..., None]).reshape(len(q), -1)


def _halves(records: Bytes, at: int) -> Halves:
    return np.ascontiguousarray(records[:, :, at : at + 2]).view(np.float16)[..., 0]


def _inverse(scales: Halves) -> npt.NDArray[np.float32]:
    wide = scales.astype(np.float32)
    return np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)
