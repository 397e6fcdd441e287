"""Activations as signed bytes with a step for each group of 32 numbers, and the operations that end in them.

    step = max |x| / 127,   i = round(x / step),   so that  x ≈ step · i

Beside its step, each group keeps step · Σ i, for weights that have an offset. A group with a number that is infinite or
not a number gets a step that is not one, so that it shows in every product.

For kernels: all arguments are addresses and counts. Rows are float32 and whole groups; bytes and steps (two float32 a
group) lie as `grouped_linear` reads them.
Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; Shazeer, "GLU Variants Improve Transformer",
2020.
"""

from typing import Any, Final

import torch
from torch import Tensor

from services.executor.kernels.vectors import Vectors, kernel_part

GROUP: Final = 32
STEP_BYTES: Final = 8
"""Of the two numbers that a group keeps."""


def quantize_naive(x: Tensor) -> tuple[Tensor, Tensor]:
    """The formula, in torch: bytes [T, size] int8 and steps [T, size / GROUP, 2] of x [T, size]."""
    groups = x.view(len(x), -1, GROUP)
    largest = groups.abs().amax(-1)
    factor = torch.where(largest == 0, 0.0, 127 / largest)
    ints = torch.round(groups * factor.unsqueeze(-1))
    step = largest * torch.tensor(1 / 127)
    return ints.to(torch.int8).flatten(-2), torch.stack((step, step * ints.sum(-1)), -1)


def dequantize_naive(ints: Tensor, steps: Tensor) -> Tensor:
    """What the bytes stand for, [T, size] float32."""
    return (ints.float().view(len(ints), -1, GROUP) * steps[..., :1]).flatten(1)


@kernel_part
def quantize_row(v: Vectors, x: Any, num_groups: Any, ints: Any, steps: Any) -> None:
    """A row as bytes: `quantize_row(x, num_groups, ints, steps)`."""
    with v.loop(num_groups) as loop:
        at = v.add(x, v.mul(loop.index, 4 * GROUP))
        _write_group(v, [v.load_floats(at), v.load_floats(at, 64)], loop.index, ints, steps)


@kernel_part
def add_row(v: Vectors, x: Any, residual: Any, num_groups: Any) -> None:
    """`residual += x`, in place: `add_row(x, residual, num_groups)`."""
    with v.loop(num_groups) as loop:
        offset = v.mul(loop.index, 4 * GROUP)
        for half in (0, 64):
            target = v.add(residual, offset)
            v.store(v.sum(v.load_floats(target, half), v.load_floats(v.add(x, offset), half)), target, half)


@kernel_part
def normalize_row(v: Vectors, x: Any, weight: Any, num_groups: Any, facts: Any, ints: Any, steps: Any) -> None:
    """`x / sqrt(mean(x²) + eps) · weight` as bytes: `normalize_row(x, weight, num_groups, facts, ints, steps)`.

    `facts` are two float32: 1 / size and eps. The squares are added up in 32 lanes, then the lanes.
    """
    with v.loop(num_groups, v.zeros(), v.zeros()) as squares:
        at = v.add(x, v.mul(squares.index, 4 * GROUP))
        parts = [v.load_floats(at), v.load_floats(at, 64)]
        squares.carry(*(v.fma(part, part, total) for part, total in zip(parts, squares.carried, strict=True)))
    mean = v.product(v.broadcast(v.lane_sum(v.sum(*squares.results))), v.load_float(facts))
    factor = v.quotient(v.constant(1.0), v.square_root(v.sum(mean, v.load_float(facts, 4))))
    with v.loop(num_groups) as loop:
        offset = v.mul(loop.index, 4 * GROUP)
        source, scale = v.add(x, offset), v.add(weight, offset)
        parts = [
            v.product(v.product(v.load_floats(source, half), factor), v.load_floats(scale, half)) for half in (0, 64)
        ]
        _write_group(v, parts, loop.index, ints, steps)


@kernel_part
def silu_mul_group(v: Vectors, gate: Any, up: Any, group: Any, ints: Any, steps: Any) -> None:
    """`silu(gate) · up` of 32 numbers as bytes, group number `group` of its row."""
    _write_group(v, _silu_mul(v, gate, up), group, ints, steps)


@kernel_part
def silu_mul_floats(v: Vectors, gate: Any, up: Any, out: Any) -> None:
    """`silu(gate) · up` of 32 numbers: `silu_mul_floats(gate, up, out)`."""
    for half, part in enumerate(_silu_mul(v, gate, up)):
        v.store(part, out, 64 * half)


def _silu_mul(v: Vectors, gate: Any, up: Any) -> list[Any]:
    parts = []
    for half in (0, 64):
        x = v.load_floats(gate, half)
        # x / (1 + exp(-x)), with an exponent that is never above 0: for x < 0 it is exp(x) / (1 + exp(x)).
        small = v.exponential(v.negative(v.absolute(x)))
        is_negative = v.builder.fcmp_ordered("<", x, v.zeros())
        numerator = v.where(is_negative, small, v.constant(1.0))
        sigmoid = v.quotient(numerator, v.sum(v.constant(1.0), small))
        parts.append(v.product(v.product(x, sigmoid), v.load_floats(up, half)))
    return parts


def _write_group(v: Vectors, x: list[Any], group: Any, ints: Any, steps: Any) -> None:
    """Two vectors as 32 bytes and two floats, group number `group` of the row at `ints` and `steps`."""
    ints, steps = v.add(ints, v.mul(group, GROUP)), v.add(steps, v.mul(group, STEP_BYTES))
    largest = v.broadcast(v.largest_lane(v.larger(v.absolute(x[0]), v.absolute(x[1]))))
    is_zero = v.builder.fcmp_ordered("==", largest, v.zeros())
    factor = v.where(is_zero, v.zeros(), v.quotient(v.constant(127.0), largest))
    rounded = [v.rounded(v.product(part, factor)) for part in x]
    for number, part in enumerate(rounded):
        v.store_int8s(part, ints, 16 * number)
    step = v.product(largest, v.constant(1 / 127))
    step = v.builder.select(v.are_numbers(*x), step, v.constant(float("nan")))
    v.store(v.first_lane(step), steps)
    total = v.to_floats(v.broadcast(v.int_lane_sum(v.int_sum(*rounded))))
    v.store(v.first_lane(v.product(step, total)), steps, 4)
