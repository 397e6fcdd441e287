"""A whole step of a decoder-only transformer in integers, carried out by a team of threads in one call.

Owns the order of the phases and what does not depend on how numbers become bytes. `Arithmetic` is the rest:
`grouped_decoder` and `row_decoder` each bring theirs, and the kernels.

The phases of a layer, each ended by a barrier:

    rows     residual += what the layer before adds; norm; bytes
    panels   q, k, v = weight · bytes
    rows     (norms of q and k;) rotary embedding; k and v into the cache
    pieces   attention of a few queries of one kv head
    rows     bytes
    panels   output = weight · bytes
    rows     residual += output; norm; bytes
    panels   gate and up = weight · bytes; silu(gate) · up; bytes
    panels   down = weight · bytes

A row is a token, a panel 32 rows of a weight. Every number is computed by one thread from its own token's numbers in an
order that is fixed, so neither the batch nor the number of threads can change a bit.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from services.executor.kernels import tiles
from services.executor.kernels.cached_attention import Kind
from services.executor.kernels.decoder_attention import make_attention
from services.executor.kernels.decoder_data import Inputs, Parts, Shape, Work, count_logits, count_tokens, long_at
from services.executor.kernels.jit import nested
from services.executor.kernels.memory import cycles, load_int64, plain, store_int64
from services.executor.kernels.quantize import add_row
from services.executor.kernels.team import Words, barrier, claim, run_length

NUM_PHASES_PER_LAYER: Final = 9
_ROWS: Final = 0
_QKV: Final = 1
_CACHE: Final = 2
_ATTENTION: Final = 3
_OUTPUT: Final = 4
_GATE_AND_UP: Final = 5
_DOWN: Final = 6
_HEAD: Final = 7
"""Places in PHASES."""


class Arithmetic(NamedTuple):
    """What there is to compute, as functions for kernels. A place is an address; a row's bytes are `work`'s own."""

    embed: Any
    """`embed(parts, shape, token, place)`: a token's embedding as float32."""
    normalize: Any
    """`normalize(residual, norm, parts, shape, work, row)`: a row of the residual, normalized, as bytes."""
    quantize: Any
    """`quantize(shape, work, row)`: a row of what attention gave, as bytes."""
    multiply: Any
    """`multiply(weight, panels, out, width, num_tokens, shape, work, scratch)`: panels from `panels[0]` up to
    `panels[1]` of a product; `out` has rows of `width` floats."""
    num_pieces: Any
    """`num_pieces(shape)`: into how many the phase of gate and up falls."""
    gate_and_up: Any
    """`gate_and_up(piece, weight, shape, inputs, work, scratch)`: one of them."""


@nested
def _end_phase(team: Words, thread: int, kind: int, work: Work) -> None:
    """Wait for the others, and note how long a phase took, by its place in PHASES."""
    barrier(team)
    if thread == 0:
        now, place = cycles(), work.spent + 8 * kind
        store_int64(place, load_int64(place) + now - load_int64(work.ended))
        store_int64(work.ended, now)


def make_take_part(kind: Kind, arithmetic: Arithmetic) -> Callable[..., None]:
    """What each thread does in a step, for one kind of cache.

    The kernels around it are written out where it is used: Numba keeps compiled code of closures nowhere.
    """
    rotate_and_store, attend = make_attention(kind)
    embed, gather, normalize, quantize = _make_row_phases(arithmetic)
    multiply, gate_and_up = _make_product_phases(arithmetic)

    @nested
    def take_part(
        team: Words, thread: int, parts: Parts, layers: Any, shape: Shape, inputs: Inputs, work: Work
    ) -> None:
        num_tokens, delta = count_tokens(inputs), work.delta
        hidden = shape.hidden_groups * 32
        if thread == 0:
            store_int64(work.ended, cycles())
        if shape.has_tiles:
            tiles.begin(shape.tile_shapes)
        embed(team, 0, parts, shape, inputs, work)
        _end_phase(team, thread, plain(_ROWS), work)
        for number in range(len(layers)):
            layer, phase = layers[number], 1 + 9 * number
            normalize(team, phase, layer.input_norm, number > 0, parts, shape, inputs, work)
            _end_phase(team, thread, plain(_ROWS), work)
            qkv = work.qkv
            multiply(team, phase + 1, thread, layer.qkv, qkv, shape.qkv_width, num_tokens, shape, work)
            _end_phase(team, thread, plain(_QKV), work)
            rotate_and_store(team, phase + 2, parts, layer, shape, inputs, work)
            _end_phase(team, thread, plain(_CACHE), work)
            attend(team, phase + 3, thread, parts, layer, shape, inputs, work)
            _end_phase(team, thread, plain(_ATTENTION), work)
            quantize(team, phase + 4, shape, inputs, work)
            _end_phase(team, thread, plain(_ROWS), work)
            multiply(team, phase + 5, thread, layer.output, delta, hidden, num_tokens, shape, work)
            _end_phase(team, thread, plain(_OUTPUT), work)
            normalize(team, phase + 6, layer.post_attention_norm, number >= 0, parts, shape, inputs, work)
            _end_phase(team, thread, plain(_ROWS), work)
            gate_and_up(team, phase + 7, thread, layer.gate_up, shape, inputs, work)
            _end_phase(team, thread, plain(_GATE_AND_UP), work)
            multiply(team, phase + 8, thread, layer.down, delta, hidden, num_tokens, shape, work)
            _end_phase(team, thread, plain(_DOWN), work)
        phase = 1 + 9 * len(layers)
        gather(team, phase, parts, shape, inputs, work)
        _end_phase(team, thread, plain(_ROWS), work)
        logits, num_logits = work.logits, count_logits(inputs)
        multiply(team, phase + 1, thread, parts.head[0], logits, shape.vocab_size, num_logits, shape, work)
        if shape.has_tiles:
            tiles.end(0)
        _end_phase(team, thread, plain(_HEAD), work)

    return take_part


def _make_row_phases(arithmetic: Arithmetic) -> tuple[Any, Any, Any, Any]:
    """Phases whose pieces are tokens, which each thread claims until none is left."""
    embed_row, normalize_row, quantize_row = arithmetic.embed, arithmetic.normalize, arithmetic.quantize

    @nested
    def embed(team: Words, phase: int, parts: Parts, shape: Shape, inputs: Inputs, work: Work) -> None:
        row = claim(team, phase)
        while row < count_tokens(inputs):
            place = work.residual + row * shape.hidden_groups * 128
            embed_row(parts, shape, long_at(inputs.token_ids, row), place)
            row = claim(team, phase)

    @nested
    def normalize(
        team: Words, phase: int, norm: int, adds: bool, parts: Parts, shape: Shape, inputs: Inputs, work: Work
    ) -> None:
        """Residual plus, if `adds`, what came last; normalized, as bytes."""
        groups, num_tokens = shape.hidden_groups, count_tokens(inputs)
        run = run_length(team, num_tokens)
        first = claim(team, phase) * run
        while first < num_tokens:
            for row in range(first, min(first + run, num_tokens)):
                residual = work.residual + row * groups * 128
                if adds:
                    add_row(work.delta + row * groups * 128, residual, groups)
                normalize_row(residual, norm, parts, shape, work, row)
            first = claim(team, phase) * run

    @nested
    def quantize(team: Words, phase: int, shape: Shape, inputs: Inputs, work: Work) -> None:
        num_tokens = count_tokens(inputs)
        run = run_length(team, num_tokens)
        first = claim(team, phase) * run
        while first < num_tokens:
            for row in range(first, min(first + run, num_tokens)):
                quantize_row(shape, work, row)
            first = claim(team, phase) * run

    @nested
    def gather(team: Words, phase: int, parts: Parts, shape: Shape, inputs: Inputs, work: Work) -> None:
        """The rows whose logits are wanted, close together: residual, last addition, final norm, bytes."""
        groups = shape.hidden_groups
        number = claim(team, phase)
        while number < count_logits(inputs):
            row = long_at(inputs.logits_rows, number)
            residual = work.residual + row * groups * 128
            add_row(work.delta + row * groups * 128, residual, groups)
            normalize_row(residual, parts.norm, parts, shape, work, number)
            number = claim(team, phase)

    return embed, gather, normalize, quantize


def _make_product_phases(arithmetic: Arithmetic) -> tuple[Any, Any]:
    """Phases whose pieces are parts of a weight."""
    multiply_panels, num_pieces, gate_and_up_of = arithmetic.multiply, arithmetic.num_pieces, arithmetic.gate_and_up

    @nested
    def multiply(
        team: Words,
        phase: int,
        thread: int,
        weight: Any,
        out: int,
        width: int,
        num_tokens: int,
        shape: Shape,
        work: Work,
    ) -> None:
        """out [tokens, width] = weight · bytes, plus the weight's bias if it has one; `width` is whole panels."""
        scratch = work.scratch + thread * work.scratch_bytes
        num_panels = width // 32
        run = run_length(team, num_panels)
        first = claim(team, phase) * run
        while first < num_panels:
            panels = first, min(first + run, num_panels)
            multiply_panels(weight, panels, out, width, num_tokens, shape, work, scratch)
            if weight.bias:
                for token in range(num_tokens):
                    add_row(weight.bias + first * 128, out + first * 128 + token * width * 4, panels[1] - first)
            first = claim(team, phase) * run

    @nested
    def gate_and_up(
        team: Words, phase: int, thread: int, weight: Any, shape: Shape, inputs: Inputs, work: Work
    ) -> None:
        scratch = work.scratch + thread * work.scratch_bytes
        pieces = num_pieces(shape)
        run = run_length(team, pieces)
        first = claim(team, phase) * run
        while first < pieces:
            for piece in range(first, min(first + run, pieces)):
                gate_and_up_of(piece, weight, shape, inputs, work, scratch)
            first = claim(team, phase) * run

    return multiply, gate_and_up
