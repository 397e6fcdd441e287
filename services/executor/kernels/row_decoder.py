"""The decoder's arithmetic for weights with one scale a row: a token has one step, or one for a block of the middle."""

from typing import Any, Final

from services.executor.kernels import row_linear
from services.executor.kernels.decoder import Arithmetic, make_take_part
from services.executor.kernels.decoder_data import ATTENDED, MIDDLE, Inputs, Parts, Shape, Work, count_tokens
from services.executor.kernels.jit import nested, single
from services.executor.kernels.memory import plain
from services.executor.kernels.quantize import add_row, silu_mul_floats
from services.executor.kernels.row_linear import row_product
from services.executor.kernels.row_quantize import (
    EMBEDDING_HEAD,
    MIDDLE_BLOCK,
    normalize_whole_row,
    quantize_block,
    unpack_embedding,
)
from services.executor.kernels.team import Words, first_step, next_step

_OWN_BYTES: Final = row_linear.TOKENS * 4 * (2 * row_linear.PANEL + MIDDLE_BLOCK)


def scratch_bytes(widest: int) -> int:
    """Memory of a thread's own, where the widest product reads so many columns: gate and up, a block of the middle, and
    what the product needs."""
    return _OWN_BYTES + row_linear.scratch_bytes(-(-widest // row_linear.COLUMNS))


@nested
def _embed(parts: Parts, shape: Shape, token: int, place: int) -> None:
    record_bytes = EMBEDDING_HEAD + shape.hidden_groups * 32
    unpack_embedding(parts.embedding[0].address + token * record_bytes, shape.hidden_groups, place)


@nested
def _runs(groups: int) -> Any:
    """Groups of 32 columns as runs of 64."""
    return (groups + 1) // 2


@nested
def _normalize(residual: int, _norm: int, parts: Parts, shape: Shape, work: Work, row: int) -> None:
    u = work.ints + row * _runs(shape.hidden_groups) * 64
    step = work.steps + row * 4
    normalize_whole_row(residual, shape.hidden_groups, parts.norm_facts, u, step)


@nested
def _quantize(shape: Shape, work: Work, row: int) -> None:
    groups = shape.num_heads * shape.head_dim // 32
    u, step = work.ints + row * _runs(groups) * 64, work.steps + row * 4
    quantize_block(work.attended + row * groups * 128, groups, u, step)


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
    runs, u, steps = _runs(shape.hidden_groups), work.ints, work.steps
    if weight.source == ATTENDED:
        runs = _runs(shape.num_heads * shape.head_dim // 32)
    per_block = runs
    if weight.source == MIDDLE:
        runs, u = _runs(shape.intermediate_groups), work.middle_ints
        steps = work.middle_steps
        per_block = 2
    num_blocks = (runs + per_block - 1) // per_block
    panel_bytes = 128 * (1 + num_blocks) + 2048 * runs
    for panel in range(panels[0], panels[1]):
        row_product(
            u,
            runs * 64,
            steps,
            num_blocks * 4,
            weight.address + panel * panel_bytes,
            runs,
            per_block,
            out + panel * 128,
            width * 4,
            num_tokens,
            shape.has_tiles,
            scratch,
        )


@nested
def _num_pieces(shape: Shape) -> Any:
    """Blocks of the middle."""
    return (shape.intermediate_groups + 3) // 4


@nested
def _gate_and_up(block: int, weight: Any, shape: Shape, inputs: Inputs, work: Work, scratch: int) -> None:
    """silu(gate) · up as bytes, a block of them, for as many tokens at a time as tiles take."""
    for first in range(0, count_tokens(inputs), 32):
        _gate_and_up_of(first, min(32, count_tokens(inputs) - first), block, weight, shape, work, scratch)


@nested
def _gate_and_up_of(first: int, count: int, block: int, weight: Any, shape: Shape, work: Work, scratch: int) -> None:
    """For `count` tokens from `first` on."""
    hidden_runs, middle_runs, blocks = _runs(shape.hidden_groups), _runs(shape.intermediate_groups), _num_pieces(shape)
    num_groups = min(4, shape.intermediate_groups - 4 * block)
    u = work.ints + first * hidden_runs * 64
    steps = work.steps + first * 4
    panel_bytes = 256 + 2048 * hidden_runs
    products, middle = scratch, scratch + 32 * 256
    for group in range(num_groups):
        for part in range(2):
            panel, at = 8 * block + 2 * group + part, products + part * 128
            place = weight.address + panel * panel_bytes
            row_product(
                u,
                hidden_runs * 64,
                steps,
                plain(4),
                place,
                hidden_runs,
                hidden_runs,
                at,
                plain(256),
                count,
                shape.has_tiles,
                scratch + _OWN_BYTES,
            )
            if weight.bias:
                for token in range(count):
                    add_row(weight.bias + panel * 128, at + token * 256, 1)
        for token in range(count):
            gate = products + token * 256
            silu_mul_floats(gate, gate + 128, middle + token * 512 + group * 128)
    for token in range(count):
        row = first + token
        at = work.middle_ints + row * middle_runs * 64 + block * 128
        step = work.middle_steps + (row * blocks + block) * 4
        quantize_block(middle + token * 512, num_groups, at, step)


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
