"""The decoder's arithmetic for weights in groups of 32: each group of activations has a step of its own."""

from typing import Any

from services.executor.kernels.decoder import Arithmetic, make_take_part
from services.executor.kernels.decoder_data import ATTENDED, MIDDLE, Inputs, Parts, Shape, Work, count_tokens
from services.executor.kernels.grouped_linear import panel_for, panel_product, unpack_row
from services.executor.kernels.jit import nested, single
from services.executor.kernels.quantize import add_row, normalize_row, quantize_row, silu_mul_group
from services.executor.kernels.team import Words, first_step, next_step


@nested
def _embed(parts: Parts, shape: Shape, token: int, place: int) -> None:
    weight = parts.embedding[0]
    unpack_row(weight.address, weight.bits, shape.hidden_groups, token, place)


@nested
def _normalize(residual: int, norm: int, parts: Parts, shape: Shape, work: Work, row: int) -> None:
    groups = shape.hidden_groups
    ints, steps = work.ints + row * groups * 32, work.steps + row * groups * 8
    normalize_row(residual, norm, groups, parts.norm_facts, ints, steps)


@nested
def _quantize(shape: Shape, work: Work, row: int) -> None:
    groups = shape.num_heads * shape.head_dim // 32
    ints, steps = work.ints + row * groups * 32, work.steps + row * groups * 8
    quantize_row(work.attended + row * groups * 128, groups, ints, steps)


@nested
def _multiply(
    weight: Any,
    panels: tuple[int, int],
    out: int,
    width: int,
    num_tokens: int,
    shape: Shape,
    work: Work,
    scratch: int,
) -> None:
    groups, ints, steps = shape.hidden_groups, work.ints, work.steps
    if weight.source == ATTENDED:
        groups = shape.num_heads * shape.head_dim // 32
    elif weight.source == MIDDLE:
        groups, ints, steps = shape.intermediate_groups, work.middle_ints, work.middle_steps
    for panel in range(panels[0], panels[1]):
        at, bits = panel_for(weight.address, weight.bits, groups, panel, num_tokens, scratch)
        panel_product(ints, steps, at, bits, groups, out + panel * 128, width * 4, num_tokens)


@nested
def _num_pieces(shape: Shape) -> Any:
    return shape.intermediate_groups


@nested
def _gate_and_up(group: int, weight: Any, shape: Shape, inputs: Inputs, work: Work, scratch: int) -> None:
    """silu(gate) · up as bytes, a group of them for 48 tokens at a time: their numbers stay in the first cache."""
    hidden_groups, num_tokens = shape.hidden_groups, count_tokens(inputs)
    memory = scratch + 48 * 256, scratch + 48 * 256 + hidden_groups * 1280 + 64
    gate, bits = panel_for(weight.address, weight.bits, hidden_groups, 2 * group, num_tokens, memory[0])
    up, _ = panel_for(weight.address, weight.bits, hidden_groups, 2 * group + 1, num_tokens, memory[1])
    for first in range(0, num_tokens, 48):
        count = min(48, num_tokens - first)
        _gate_and_up_of(first, count, group, (gate, up), bits, scratch, weight.bias, shape, work)


@nested
def _gate_and_up_of(
    first: int, count: int, group: int, panels: Any, bits: int, scratch: int, bias: int, shape: Shape, work: Work
) -> None:
    """One group of 32 numbers, for `count` tokens from `first` on."""
    groups, hidden_groups = shape.intermediate_groups, shape.hidden_groups
    ints = work.ints + first * hidden_groups * 32
    steps = work.steps + first * hidden_groups * 8
    for part in range(2):
        at = scratch + part * 128
        panel_product(ints, steps, panels[part], bits, hidden_groups, at, 256, count)
        if bias:
            for token in range(count):
                add_row(bias + (2 * group + part) * 128, at + token * 256, 1)
    for token in range(count):
        row, gate = first + token, scratch + token * 256
        middle_ints = work.middle_ints + row * groups * 32
        middle_steps = work.middle_steps + row * groups * 8
        silu_mul_group(gate, gate + 128, group, middle_ints, middle_steps)


_ARITHMETIC = Arithmetic(_embed, _normalize, _quantize, _multiply, _num_pieces, _gate_and_up)
_take_part_int8 = make_take_part("int8", _ARITHMETIC)
_take_part_float32 = make_take_part("float32", _ARITHMETIC)


@single
def decode_int8(team: Words, thread: int, parts: Parts, layers: Any, shape: Shape, inputs: Inputs, work: Work) -> None:
    """The kernel of a team, for a cache in int8."""
    step = first_step(team, thread)
    while step >= 0:
        _take_part_int8(team, thread, parts, layers, shape, inputs, work)
        step = next_step(team, thread, step)


@single
def decode_float32(
    team: Words, thread: int, parts: Parts, layers: Any, shape: Shape, inputs: Inputs, work: Work
) -> None:
    """The kernel of a team, for a cache in float32."""
    step = first_step(team, thread)
    while step >= 0:
        _take_part_float32(team, thread, parts, layers, shape, inputs, work)
        step = next_step(team, thread, step)
