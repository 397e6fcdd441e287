"""Matrix product with a fixed weight: `out = x · weightᵀ + bias`.

Layout: x [T, columns] float32, weight [rows, columns] float32, bias [rows] float32, out [T, rows] float32.

`pack` turns a weight into whatever form the product likes best; nobody else looks inside a `PackedLinear`.

A BLAS chooses its algorithm, and with it the order of additions, by the shape of the whole product: torch's result
for a row changes with the number of rows beside it. Here every call to the BLAS has the same shape, `_TILE_ROWS` rows,
the last tile padded with zeros. Measured with MKL on 9 shapes, 1 and 2 threads, 36 batches each: plain products gave
a row other bits in 4 to 36 of the batches, tiles in none.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.executor.kernels.checks import check

_TILE_ROWS = 16
"""Milliseconds for [T, 576] · [3072, 576]ᵀ, 2 threads, T = 1 and 64: tiles of 4 rows 0.34 and 4.9, 8 rows 0.46 and 3.5,
16 rows 0.52 and 1.8."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight ready for `linear`."""

    rows: int
    columns: int
    _weight: Tensor  # [rows, columns] float32


def pack(weight: Tensor) -> PackedLinear:
    """`weight` [rows, columns] made ready; shares its memory."""
    check("weight", weight, torch.float32, (weight.shape[0], weight.shape[-1]))
    return PackedLinear(weight.shape[0], weight.shape[1], weight)


def linear(x: Tensor, weight: PackedLinear, bias: Tensor | None = None) -> Tensor:
    """`x · weightᵀ + bias`, [T, rows]."""
    check("x", x, torch.float32, (len(x), weight.columns))
    if bias is not None:
        check("bias", bias, torch.float32, (weight.rows,))
    transposed = weight._weight.t()
    out = torch.empty(len(x), weight.rows)
    num_whole = len(x) - len(x) % _TILE_ROWS
    for first in range(0, num_whole, _TILE_ROWS):
        tile = slice(first, first + _TILE_ROWS)
        torch.mm(x[tile], transposed, out=out[tile])
    if num_whole < len(x):
        padded = x.new_zeros(_TILE_ROWS, weight.columns)
        padded[: len(x) - num_whole] = x[num_whole:]
        out[num_whole:] = torch.mm(padded, transposed)[: len(x) - num_whole]
    return out if bias is None else out.add_(bias)


def linear_naive(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The formula, in torch; `weight` is not packed."""
    return torch.nn.functional.linear(x, weight, bias)
