"""Activations as unsigned bytes with one step for many numbers, and the operations that end in them.

    step = max |x| / 127,   u = round(x / step) + 128,   so that  x ≈ step · (u - 128)

over a whole row or a block of it. What is infinite or not a number makes the step that it belongs to one that is not,
so that it shows in every product.

For kernels: all arguments are addresses and counts. `x` is float32 in whole groups of 32, bytes and steps lie as
`row_linear` reads them.
"""

from typing import Any, Final

import torch
from torch import Tensor

from services.executor.kernels.quantize import GROUP
from services.executor.kernels.vectors import Vectors, kernel_part

ZERO: Final = 128
"""The byte that stands for 0."""
MIDDLE_BLOCK: Final = 128
"""Columns of the down projection that have a step together. Its inputs have a few that are much larger than the rest;
one step for all of a token cost the default model 0.007 of its mean loss."""
EMBEDDING_HEAD: Final = 64
"""Bytes before an embedding's, of which the first four are its scale."""


def quantize_rows_naive(x: Tensor, block: int = 0) -> tuple[Tensor, Tensor]:
    """The formula, in torch: bytes [T, size] uint8 and steps [T, blocks] of x [T, size]; 0: the row is one block."""
    parts = torch.split(x, block or x.shape[1], dim=1)
    largest = torch.stack([part.abs().amax(1) for part in parts], dim=1)
    factor = torch.where(largest == 0, 0.0, 127 / largest)
    ints = [torch.round(part * factor[:, number : number + 1]) for number, part in enumerate(parts)]
    return (torch.cat(ints, dim=1) + ZERO).to(torch.uint8), largest * torch.tensor(1 / 127)


def dequantize_rows_naive(u: Tensor, steps: Tensor, block: int = 0) -> Tensor:
    """What the bytes stand for, [T, size] float32."""
    parts = torch.split(u.float() - ZERO, block or u.shape[1], dim=1)
    return torch.cat([part * steps[:, number : number + 1] for number, part in enumerate(parts)], dim=1)


@kernel_part
def quantize_block(v: Vectors, x: Any, num_groups: Any, u: Any, step: Any) -> None:
    """A row, or a block of one, as bytes and its step: `quantize_block(x, num_groups, u, step)`."""
    with v.loop(num_groups, v.zeros(), v.zeros()) as loop:
        largest, poison = loop.carried
        at = v.add(x, v.mul(loop.index, 4 * GROUP))
        for half in (0, 64):
            part = v.load_floats(at, half)
            largest = v.larger(largest, v.absolute(part))
            poison = v.fma(part, v.zeros(), poison)  # 0, but for what is no finite number
        loop.carry(largest, poison)
    most, poison = loop.results
    most = v.broadcast(v.largest_lane(most))
    _write_bytes(v, x, num_groups, most, u)
    v.store(v.first_lane(v.sum(v.product(most, v.constant(1 / 127)), v.broadcast(v.lane_sum(poison)))), step)


@kernel_part
def normalize_whole_row(v: Vectors, x: Any, num_groups: Any, facts: Any, u: Any, step: Any) -> None:
    """`x / sqrt(mean(x²) + eps)` as bytes with one step: `normalize_whole_row(x, num_groups, facts, u, step)`.

    `facts` are two float32: 1 / size and eps. The squares are added up in 32 lanes, then the lanes. The norm's weights
    are part of the product's that comes next; so the bytes are those of x itself.
    """
    with v.loop(num_groups, v.zeros(), v.zeros(), v.zeros()) as loop:
        *totals, largest = loop.carried
        at = v.add(x, v.mul(loop.index, 4 * GROUP))
        parts = [v.load_floats(at), v.load_floats(at, 64)]
        for part in parts:
            largest = v.larger(largest, v.absolute(part))
        loop.carry(*(v.fma(part, part, total) for part, total in zip(parts, totals, strict=True)), largest)
    *squares, most = loop.results
    mean = v.product(v.broadcast(v.lane_sum(v.sum(*squares))), v.load_float(facts))
    factor = v.quotient(v.constant(1.0), v.square_root(v.sum(mean, v.load_float(facts, 4))))
    most = v.broadcast(v.largest_lane(most))
    _write_bytes(v, x, num_groups, most, u)
    v.store(v.first_lane(v.product(v.product(most, v.constant(1 / 127)), factor)), step)


@kernel_part
def unpack_embedding(v: Vectors, record: Any, num_groups: Any, out: Any) -> None:
    """A row of float32 out of a record: its scale, a float32 in EMBEDDING_HEAD bytes, and signed bytes."""
    scale = v.load_float(record)
    with v.loop(num_groups) as loop:
        source, target = (
            v.add(record, EMBEDDING_HEAD, v.mul(loop.index, GROUP)),
            v.add(out, v.mul(loop.index, 4 * GROUP)),
        )
        for half in range(2):
            v.store(v.product(v.load_int8s(source, 16 * half), scale), target, 64 * half)


def _write_bytes(v: Vectors, x: Any, num_groups: Any, most: Any, u: Any) -> None:
    is_zero = v.builder.fcmp_ordered("==", most, v.zeros())
    factor = v.where(is_zero, v.zeros(), v.quotient(v.constant(127.0), most))
    with v.loop(num_groups) as loop:
        source, target = v.add(x, v.mul(loop.index, 4 * GROUP)), v.add(u, v.mul(loop.index, GROUP))
        for half in range(2):
            ints = v.rounded(v.product(v.load_floats(source, 64 * half), factor))
            v.store_int8s(v.int_sum(ints, v.int_constant(ZERO)), target, 16 * half)
