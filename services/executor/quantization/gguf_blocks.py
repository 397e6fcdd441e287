"""Weights in GGUF's block formats (Q4_1, Q8_0, Q4_K, …), kept as the raw bytes of their rows.

Layout: [rows, bytes_per_row] uint8; a row is a whole number of blocks, each with its own scales. The arithmetic is the
`gguf` package's, llama.cpp's own.
"""

from collections.abc import Sequence

import gguf
import numpy as np
import numpy.typing as npt

_BYTES_AT_ONCE = 8 << 20
"""Dequantizing takes several times the memory of its result in between, so it goes by so many bytes of result."""


def expected_bytes(kind: str, shape: Sequence[int]) -> tuple[int, int]:
    """The stored shape of a tensor whose numbers have `shape` (rows, columns). Raises ValueError if it can't exist."""
    rows, columns = shape
    try:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    except KeyError:
        raise ValueError(f"{kind} is not a GGUF type") from None
    if columns % block_size:
        raise ValueError(f"rows of {columns} numbers are not whole {kind} blocks of {block_size}")
    return rows, columns // block_size * block_bytes


def dequantize_into(out: npt.NDArray[np.float32], blocks: npt.NDArray[np.uint8], kind: str) -> None:
    """Write the numbers of `blocks` [rows, bytes_per_row] to `out` [rows, columns].

    Raises ValueError for a type that `gguf` cannot read.
    """
    quantization = gguf.GGMLQuantizationType[kind]
    num_rows = max(1, _BYTES_AT_ONCE // (out.shape[1] * out.itemsize))
    for first in range(0, len(out), num_rows):
        try:
            out[first : first + num_rows] = gguf.quants.dequantize(blocks[first : first + num_rows], quantization)
        except NotImplementedError as error:
            raise ValueError(str(error)) from error
