"""A whole step of a decoder-only transformer in integers, carried out by a team of threads in one call.

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

from typing import Any, Final

from services.executor.kernels.cached_attention import Kind
from services.executor.kernels.decoder_attention import make_attention
from services.executor.kernels.decoder_data import Inputs, Parts, Shape, Work
from services.executor.kernels.grouped_linear import panel_for, panel_product, unpack_row
from services.executor.kernels.jit import nested, single
from services.executor.kernels.memory import cycles
from services.executor.kernels.quantize import add_row, normalize_row, quantize_row, silu_mul_group
from services.executor.kernels.team import Words, barrier, claim, first_step, next_step, run_length

NUM_PHASES_PER_LAYER: Final = 9


@nested
def _end_phase(team: Words, thread: int, kind: int, work: Work) -> None:
    """Wait for the others, and note how long a phase took, by its place in PHASES."""
    barrier(team)
    if thread == 0:
        now = cycles()
        work.spent[kind] += now - work.spent[8]
        work.spent[8] = now


@nested
def _embed(team: Words, phase: int, parts: Parts, shape: Shape, inputs: Inputs, work: Work) -> None:
    weight = parts.embedding[0]
    row_bytes = shape.hidden_groups * 128
    row = claim(team, phase)
    while row < inputs.counts[0]:
        token = inputs.token_ids[row]
        unpack_row(weight.address, weight.bits, shape.hidden_groups, token, work.residual.ctypes.data + row * row_bytes)
        row = claim(team, phase)


@nested
def _normalize(
    team: Words, phase: int, parts: Parts, shape: Shape, inputs: Inputs, work: Work, norm: int, adds: bool
) -> None:
    """Residual plus, if `adds`, what came last; normalized, as bytes."""
    groups, num_tokens = shape.hidden_groups, inputs.counts[0]
    run = run_length(team, num_tokens)
    first = claim(team, phase) * run
    while first < num_tokens:
        for row in range(first, min(first + run, num_tokens)):
            residual = work.residual.ctypes.data + row * groups * 128
            if adds:
                add_row(work.delta.ctypes.data + row * groups * 128, residual, groups)
            ints, steps = work.ints.ctypes.data + row * groups * 32, work.steps.ctypes.data + row * groups * 8
            normalize_row(residual, norm, groups, parts.norm_facts.ctypes.data, ints, steps)
        first = claim(team, phase) * run


@nested
def _multiply(
    team: Words,
    phase: int,
    weight: Any,
    ints: int,
    steps: int,
    num_groups: int,
    out: int,
    width: int,
    num_tokens: int,
    scratch: int,
) -> None:
    """out [tokens, width] = weight · bytes, plus the weight's bias if it has one; `width` is whole panels."""
    num_panels = width // 32
    run = run_length(team, num_panels)
    first = claim(team, phase) * run
    while first < num_panels:
        for panel in range(first, min(first + run, num_panels)):
            at = out + panel * 128
            source, bits = panel_for(weight.address, weight.bits, num_groups, panel, num_tokens, scratch)
            panel_product(ints, steps, source, bits, num_groups, at, width * 4, num_tokens)
            if weight.bias:
                for token in range(num_tokens):
                    add_row(weight.bias + panel * 128, at + token * width * 4, 1)
        first = claim(team, phase) * run


@nested
def _gate_and_up(team: Words, phase: int, thread: int, weight: Any, shape: Shape, inputs: Inputs, work: Work) -> None:
    """silu(gate) · up as bytes, a group of them for 48 tokens at a time: their numbers stay in the first cache."""
    groups, hidden_groups, num_tokens = shape.intermediate_groups, shape.hidden_groups, inputs.counts[0]
    scratch = work.scratch.ctypes.data + thread * work.scratch.shape[1]
    memory = scratch + 48 * 256, scratch + 48 * 256 + hidden_groups * 1280 + 64
    run = run_length(team, groups)
    start = claim(team, phase) * run
    while start < groups:
        for group in range(start, min(start + run, groups)):
            gate, bits = panel_for(weight.address, weight.bits, hidden_groups, 2 * group, num_tokens, memory[0])
            up, _ = panel_for(weight.address, weight.bits, hidden_groups, 2 * group + 1, num_tokens, memory[1])
            for first in range(0, num_tokens, 48):
                _gate_and_up_of(
                    first, min(48, num_tokens - first), group, (gate, up), bits, scratch, weight.bias, shape, work
                )
        start = claim(team, phase) * run


@nested
def _gate_and_up_of(
    first: int, count: int, group: int, panels: Any, bits: int, scratch: int, bias: int, shape: Shape, work: Work
) -> None:
    """One group of 32 numbers, for `count` tokens from `first` on."""
    groups, hidden_groups = shape.intermediate_groups, shape.hidden_groups
    ints = work.ints.ctypes.data + first * hidden_groups * 32
    steps = work.steps.ctypes.data + first * hidden_groups * 8
    for part in range(2):
        at = scratch + part * 128
        panel_product(ints, steps, panels[part], bits, hidden_groups, at, 256, count)
        if bias:
            for token in range(count):
                add_row(bias + (2 * group + part) * 128, at + token * 256, 1)
    for token in range(count):
        row, gate = first + token, scratch + token * 256
        middle_ints = work.middle_ints.ctypes.data + row * groups * 32
        middle_steps = work.middle_steps.ctypes.data + row * groups * 8
        silu_mul_group(gate, gate + 128, group, middle_ints, middle_steps)


@nested
def _quantize_attended(team: Words, phase: int, shape: Shape, inputs: Inputs, work: Work) -> None:
    groups, num_tokens = shape.num_heads * shape.head_dim // 32, inputs.counts[0]
    run = run_length(team, num_tokens)
    first = claim(team, phase) * run
    while first < num_tokens:
        for row in range(first, min(first + run, num_tokens)):
            ints, steps = work.ints.ctypes.data + row * groups * 32, work.steps.ctypes.data + row * groups * 8
            quantize_row(work.attended.ctypes.data + row * groups * 128, groups, ints, steps)
        first = claim(team, phase) * run


@nested
def _gather(team: Words, phase: int, parts: Parts, shape: Shape, inputs: Inputs, work: Work) -> None:
    """The rows whose logits are wanted, close together: residual, last addition, final norm, bytes."""
    groups = shape.hidden_groups
    number = claim(team, phase)
    while number < inputs.counts[2]:
        row = inputs.logits_rows[number]
        residual = work.residual.ctypes.data + row * groups * 128
        add_row(work.delta.ctypes.data + row * groups * 128, residual, groups)
        ints, steps = work.ints.ctypes.data + number * groups * 32, work.steps.ctypes.data + number * groups * 8
        normalize_row(residual, parts.norm.ctypes.data, groups, parts.norm_facts.ctypes.data, ints, steps)
        number = claim(team, phase)


@nested
def _feed_forward(
    team: Words, phase: int, thread: int, parts: Parts, layer: Any, shape: Shape, inputs: Inputs, work: Work
) -> None:
    """The second half of a layer."""
    hidden, num_tokens = shape.hidden_groups * 32, inputs.counts[0]
    ints, steps, delta = work.ints.ctypes.data, work.steps.ctypes.data, work.delta.ctypes.data
    middle_ints, middle_steps = work.middle_ints.ctypes.data, work.middle_steps.ctypes.data
    scratch = work.scratch.ctypes.data + thread * work.scratch.shape[1]
    attended_groups, middle_groups = shape.num_heads * shape.head_dim // 32, shape.intermediate_groups
    _quantize_attended(team, phase, shape, inputs, work)
    _end_phase(team, thread, 0, work)
    _multiply(team, phase + 1, layer.output, ints, steps, attended_groups, delta, hidden, num_tokens, scratch)
    _end_phase(team, thread, 4, work)
    _normalize(team, phase + 2, parts, shape, inputs, work, layer.post_attention_norm, True)
    _end_phase(team, thread, 0, work)
    _gate_and_up(team, phase + 3, thread, layer.gate_up, shape, inputs, work)
    _end_phase(team, thread, 5, work)
    _multiply(team, phase + 4, layer.down, middle_ints, middle_steps, middle_groups, delta, hidden, num_tokens, scratch)
    _end_phase(team, thread, 6, work)


def _make_take_part(kind: Kind) -> Any:
    """What each thread does in a step, for one kind of cache."""
    rotate_and_store, attend = make_attention(kind)

    @nested
    def take_part(
        team: Words, thread: int, parts: Parts, layers: Any, shape: Shape, inputs: Inputs, work: Work
    ) -> None:
        ints, steps = work.ints.ctypes.data, work.steps.ctypes.data
        qkv, logits = work.qkv.ctypes.data, work.logits.ctypes.data
        scratch = work.scratch.ctypes.data + thread * work.scratch.shape[1]
        if thread == 0:
            work.spent[8] = cycles()
        _embed(team, 0, parts, shape, inputs, work)
        _end_phase(team, thread, 0, work)
        for number in range(len(layers)):
            layer, phase = layers[number], 1 + 9 * number
            _normalize(team, phase, parts, shape, inputs, work, layer.input_norm, number > 0)
            _end_phase(team, thread, 0, work)
            _multiply(
                team,
                phase + 1,
                layer.qkv,
                ints,
                steps,
                shape.hidden_groups,
                qkv,
                shape.qkv_width,
                inputs.counts[0],
                scratch,
            )
            _end_phase(team, thread, 1, work)
            rotate_and_store(team, phase + 2, parts, layer, shape, inputs, work)
            _end_phase(team, thread, 2, work)
            attend(team, phase + 3, thread, parts, layer, shape, inputs, work)
            _end_phase(team, thread, 3, work)
            _feed_forward(team, phase + 4, thread, parts, layer, shape, inputs, work)
        phase = 1 + 9 * len(layers)
        _gather(team, phase, parts, shape, inputs, work)
        _end_phase(team, thread, 0, work)
        _multiply(
            team,
            phase + 1,
            parts.head[0],
            ints,
            steps,
            shape.hidden_groups,
            logits,
            shape.vocab_size,
            inputs.counts[2],
            scratch,
        )
        _end_phase(team, thread, 7, work)

    return take_part


_take_part_int8 = _make_take_part("int8")
_take_part_float32 = _make_take_part("float32")


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
