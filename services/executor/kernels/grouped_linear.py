"""Matrix product of int8 activations with 4-bit or 8-bit weights in groups of 32, with exact integer sums.

A weight is `w = scale · q + offset`, with an unsigned q, and a scale and an offset (float16) for each group of 32
columns of a row. An activation is `x = step · i`, with a signed byte i, and a step (float32) for each group of 32
columns of a token (`quantize`). So a product is

    out[t, n] = Σ_g  (step[t, g] · Σ_k q[n, k] · i[t, k]) · scale[n, g]  +  (step[t, g] · Σ_k i[t, k]) · offset[n, g]

where the sums over the 32 columns k of a group g are exact integers, and the sum over groups is float32, one group
after the other. That is the whole formula, for every number of tokens and for both widths, so a token's result has the
same bits whatever is computed beside it.

Weights of 4 bits are those of GGUF's Q4_0 and Q4_1 as they are; of 8 bits, those of Q8_0, Q5_0 and Q5_1.
Layout of a packed weight: [panels, groups, record] bytes. A panel is 32 rows; a record holds the 32 float16 scales, the
32 offsets, and then q by fours of columns and halves of rows (16 rows × 4 columns, what one dot instruction takes):
each run of 64 bytes holds two of them in 4 bits, or one in 8. For many tokens a panel is first made wide, in memory of
the thread's own: scales and offsets in float32, q in 8 bits, so that nothing is unpacked again for each few tokens.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.executor.kernels.jit import nested
from services.executor.kernels.memory import load_byte, load_half, store_float
from services.executor.kernels.quantize import GROUP, STEP_BYTES
from services.executor.kernels.vectors import Vectors, kernel_part

Bits = Literal[4, 8]

PANEL: Final = 32
"""Rows of a weight that are computed together: two vectors."""
MAX_TILE: Final = 6
"""Tokens that are computed together: 12 sums, 12 totals, 4 vectors of weights and a factor fit 32 registers."""

_FEW: Final = 2
"""So few tokens that reading the weights takes longer than the arithmetic."""
_AHEAD: Final = 2560
"""How far ahead of the arithmetic they are then read: 5.4 ms of a step for one token became 4.3."""
_SCALES_BYTES: Final = 2 * 2 * PANEL
WIDE: Final = 32
"""Stands for the bits of a panel that was made wide."""
_WIDE_SCALES_BYTES: Final = 2 * _SCALES_BYTES
_WIDE_FROM: Final = 13
"""Tokens that make it worth while: more than two tiles."""
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight ready for `grouped_linear`."""

    rows: int
    columns: int
    bits: Bits
    data: Tensor  # [ceil(rows / PANEL), columns / GROUP, record_bytes(bits)] uint8


def record_bytes(bits: Bits) -> int:
    """Bytes of one group of one panel."""
    return _SCALES_BYTES + PANEL * GROUP * bits // 8


def pack(q: Bytes, scales: npt.NDArray[np.float16], offsets: npt.NDArray[np.float16], bits: Bits) -> GroupedWeight:
    """A weight from its parts: q [rows, columns] unsigned, scales and offsets [rows, columns / GROUP].

    Raises ValueError if `columns` is no multiple of GROUP, or a q does not fit into its bits.
    """
    rows, columns = q.shape
    if columns % GROUP or scales.shape != (rows, columns // GROUP) or offsets.shape != scales.shape:
        raise ValueError(
            f"q {q.shape} in groups of {GROUP} does not fit scales {scales.shape}, offsets {offsets.shape}"
        )
    if int(q.max(initial=0)) >= 1 << bits:
        raise ValueError(f"q has a {q.max()}, which is no number of {bits} bits")
    num_panels, num_groups = -(-rows // PANEL), columns // GROUP
    data = np.zeros((num_panels, num_groups, record_bytes(bits)), np.uint8)
    for first, part in ((0, scales), (2 * PANEL, offsets)):
        padded = np.zeros((num_panels * PANEL, num_groups), np.float16)
        padded[:rows] = part
        panels = np.ascontiguousarray(padded.reshape(num_panels, PANEL, num_groups).transpose(0, 2, 1))
        data[:, :, first : first + 2 * PANEL] = panels.view(np.uint8)
    padded = np.zeros((num_panels * PANEL, columns), np.uint8)
    padded[:rows] = q
    # panel, half, row, group, four, column -> panel, group, four, half, row, column
    fours = padded.reshape(num_panels, 2, PANEL // 2, num_groups, GROUP // 4, 4).transpose(0, 3, 4, 1, 2, 5)
    if bits == 4:
        fours = fours[:, :, 0::2] | fours[:, :, 1::2] << 4
    data[:, :, _SCALES_BYTES:] = fours.reshape(num_panels, num_groups, -1)
    return GroupedWeight(rows, columns, bits, torch.from_numpy(data))


def wide_bytes(num_groups: int) -> int:
    """Memory for a wide panel, with what it takes to begin on a cache line."""
    return num_groups * _record_bytes(WIDE) + 64


def _record_bytes(bits: int) -> int:
    return _WIDE_SCALES_BYTES + PANEL * GROUP if bits == WIDE else record_bytes(4 if bits == 4 else 8)


def _make_tile(bits: int) -> Any:
    """For kernels: `tile(num_tokens, x, steps, panel, num_groups, out, out_stride)`: one panel for a few tokens.

    `x` are the bytes of 1 to MAX_TILE tokens, `steps` their groups' steps, each row behind the other; `out` gets 32
    floats a token, `out_stride` bytes apart.
    """

    @kernel_part
    def tile(
        v: Vectors, num_tokens: Any, x: Any, steps: Any, panel: Any, num_groups: Any, out: Any, out_stride: Any
    ) -> None:
        def spell(count: int) -> None:
            x_rows = [v.add(x, v.mul(num_groups, GROUP * token)) for token in range(count)]
            step_rows = [v.add(steps, v.mul(num_groups, STEP_BYTES * token)) for token in range(count)]
            totals = _totals(v, x_rows, step_rows, panel, num_groups, bits)
            for token, halves in enumerate(totals):
                for half, total in enumerate(halves):
                    v.store(total, v.add(out, v.mul(out_stride, token)), 64 * half)

        v.choose(num_tokens, range(1, MAX_TILE + 1), spell)

    return tile


def _totals(
    v: Vectors, x_rows: list[Any], step_rows: list[Any], panel: Any, num_groups: Any, bits: int
) -> list[list[Any]]:
    """What each token's numbers come to, for each half of the panel."""
    tokens, halves = range(len(x_rows)), range(2)
    with v.loop(num_groups, *(v.zeros() for _ in tokens for _ in halves)) as loop:
        record = v.add(panel, v.mul(loop.index, _record_bytes(bits)))
        if len(x_rows) <= _FEW and bits != WIDE:
            v.prefetch(record, _record_bytes(bits), _AHEAD)
        sums = _sums(v, [v.add(row, v.mul(loop.index, GROUP)) for row in x_rows], record, bits)
        steps_at = [v.add(row, v.mul(loop.index, STEP_BYTES)) for row in step_rows]
        totals = [loop.carried[2 * token : 2 * token + 2] for token in tokens]
        for half in halves:
            scale, offset = _scale_and_offset(v, record, half, bits)
            for token in tokens:
                scaled = v.product(v.to_floats(sums[token][half]), v.load_float(steps_at[token]))
                total = v.fma(scaled, scale, totals[token][half])
                totals[token][half] = v.fma(v.load_float(steps_at[token], 4), offset, total)
        loop.carry(*(totals[token][half] for token in tokens for half in halves))
    return [loop.results[2 * token : 2 * token + 2] for token in tokens]


def _scale_and_offset(v: Vectors, record: Any, half: int, bits: int) -> tuple[Any, Any]:
    """Of 16 rows."""
    if bits == WIDE:
        return v.load_floats(record, 64 * half), v.load_floats(record, 4 * PANEL + 64 * half)
    return v.load_halves(record, 32 * half), v.load_halves(record, 2 * PANEL + 32 * half)


def _sums(v: Vectors, x_at: list[Any], record: Any, bits: int) -> list[list[Any]]:
    """The exact sums of one group."""
    sums = [[v.int_zeros(), v.int_zeros()] for _ in x_at]
    for pair in range(GROUP // 8):
        fours = _weights(v, record, pair, bits)
        for token, at in enumerate(x_at):
            for number in range(2):
                bytes_of_x = v.load_four_bytes(at, 8 * pair + 4 * number)
                for half in range(2):
                    sums[token][half] = v.dot(sums[token][half], fours[half][number], bytes_of_x)
    return sums


def _weights(v: Vectors, record: Any, pair: int, bits: int) -> list[list[Any]]:
    """Two fours of columns, number `2 · pair` and the next, of each half of the rows."""
    fours = []
    scales_bytes = _WIDE_SCALES_BYTES if bits == WIDE else _SCALES_BYTES
    for half in range(2):
        if bits == 4:
            packed = v.load_bytes(record, scales_bytes + 64 * (2 * pair + half))
            fours.append([v.low_nibbles(packed), v.high_nibbles(packed)])
        else:
            first = scales_bytes + 64 * (4 * pair + half)
            fours.append([v.load_bytes(record, first), v.load_bytes(record, first + 128)])
    return fours


def _make_widen(bits: Bits) -> Any:
    """For kernels: `widen(panel, num_groups, out)`."""

    @kernel_part
    def widen(v: Vectors, panel: Any, num_groups: Any, out: Any) -> None:
        with v.loop(num_groups) as loop:
            record = v.add(panel, v.mul(loop.index, record_bytes(bits)))
            wide = v.add(out, v.mul(loop.index, _record_bytes(WIDE)))
            for half in range(2):
                for number, floats in enumerate(_scale_and_offset(v, record, half, bits)):
                    v.store(floats, wide, 4 * PANEL * number + 64 * half)
            for pair in range(GROUP // 8):
                for half, fours in enumerate(_weights(v, record, pair, bits)):
                    for number, four in enumerate(fours):
                        v.store(four, wide, _WIDE_SCALES_BYTES + 64 * (4 * pair + half) + 128 * number)

    return widen


_tile_4, _tile_8, _tile_wide = _make_tile(4), _make_tile(8), _make_tile(WIDE)
_widen_4, _widen_8 = _make_widen(4), _make_widen(8)


@nested
def panel_for(weight: int, bits: int, num_groups: int, panel: int, num_tokens: int, memory: int) -> Any:
    """For kernels: the address of panel number `panel`, and its bits, for products with so many tokens.

    `memory` is `wide_bytes` of the thread's own, to be left alone while the panel is used.
    """
    at = weight + panel * num_groups * (640 if bits == 4 else 1152)
    if num_tokens < _WIDE_FROM:
        return at, bits
    wide = (memory + 63) // 64 * 64
    if bits == 4:
        _widen_4(at, num_groups, wide)
    else:
        _widen_8(at, num_groups, wide)
    return wide, 32


@nested
def panel_product(
    x: int, steps: int, panel: int, bits: int, num_groups: int, out: int, out_stride: int, num_tokens: int
) -> None:
    """For kernels: a panel as `panel_for` gave it, with any number of tokens, as `_make_tile` says."""
    num_tiles = (num_tokens + 5) // 6
    done = 0
    for tile in range(num_tiles):
        count = (num_tokens - done + num_tiles - tile - 1) // (num_tiles - tile)  # as even as can be
        x_at, steps_at, out_at = x + done * num_groups * 32, steps + done * num_groups * 8, out + done * out_stride
        if bits == 4:
            _tile_4(count, x_at, steps_at, panel, num_groups, out_at, out_stride)
        elif bits == 8:
            _tile_8(count, x_at, steps_at, panel, num_groups, out_at, out_stride)
        else:
            _tile_wide(count, x_at, steps_at, panel, num_groups, out_at, out_stride)
        done += count


@nested
def unpack_row(weight: int, bits: int, num_groups: int, row: int, out: int) -> None:
    """For kernels: one row of a weight as float32, such as a token's embedding."""
    lane, half, quarter = row % 32, row % 32 // 16, row % 16 * 4
    for group in range(num_groups):
        record = weight + (row // 32 * num_groups + group) * (640 if bits == 4 else 1152)
        scale, offset = load_half(record + 2 * lane), load_half(record + 64 + 2 * lane)
        for column in range(32):
            four = column // 4
            if bits == 4:
                packed = load_byte(record + 128 + 64 * (four // 2 * 2 + half) + quarter + column % 4)
                q = packed >> 4 if four % 2 else packed & 15
            else:
                q = load_byte(record + 128 + 64 * (2 * four + half) + quarter + column % 4)
            store_float(out + 4 * (group * 32 + column), np.float32(q) * scale + offset)
