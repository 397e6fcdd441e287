"""Matrix product of bytes with weights that have one scale a row, with exact integer sums.

A weight is `w = scale · q`, with a signed byte q and a scale (float32) for each of its rows. An activation is
`x = step · (u - 128)`, with an unsigned byte u and a step (float32) for each block of columns of a token, as
`row_quantize` makes them. So a product is

    out[t, n] = (Σ_b step[t, b] · Σ_k q[n, k] · (u[t, k] - 128)) · scale[n]

where the sums over the columns k of a block b are exact integers, and the sum over blocks is float32, one block after
the other. That is the whole formula, for every number of tokens and for every instruction that can add up products of
bytes, so a token's result has the same bits whatever is computed beside it, and on any machine.

Layout of a packed weight: [panels, bytes]. A panel is 32 rows: their scales; then for each block 32 int32, which are
-128 · Σ_k q and which the sums start from, and runs of 64 columns, each [2 halves of the rows, 16 fours of columns, 16
rows, 4 bytes]: a half is what a tile register holds, and 16 times what a dot instruction takes. Columns that are
missing to 64 are zeros, so the bytes of activations there may be anything.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from services.executor.kernels import tiles
from services.executor.kernels.jit import nested
from services.executor.kernels.vectors import BY_SHORTS, Vectors, dot_instruction, kernel_part

PANEL: Final = 32
"""Rows of a weight that are computed together."""
COLUMNS: Final = tiles.COLUMNS
"""Of a run. A block of columns is so many, or a multiple."""
TOKENS: Final = 2 * tiles.TOKENS
"""Tokens that are computed together by tiles: their bytes are read for whole tiles, so behind the last token of an
array of them there is room for more."""

_MAX_TOKENS: Final = 6
"""Without tiles. A panel's sums and totals for so many fit the 32 registers of AVX-512; half a panel's sums fit 16."""
_TILES_FROM: Final = 4
"""Tokens: fewer are multiplied as fast by dots."""
_FEW: Final = 2
"""So few tokens that more sums should be under way at once, and that a whole panel's fit any processor."""
_AHEAD: Final = 2560
"""How far ahead of the arithmetic the weights are brought near by processors whose own prefetching falls behind."""
_SCALES_BYTES: Final = 4 * PANEL
_RUN_BYTES: Final = PANEL * COLUMNS
_HALF_BYTES: Final = _RUN_BYTES // 2
_FOUR_BYTES: Final = 64
_X_RUN_BYTES: Final = 2 * COLUMNS if BY_SHORTS else COLUMNS

Bytes = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Blocks:
    """How the columns of a weight fall into blocks."""

    num_runs: int
    """Columns by 64, the last ones filled up."""
    runs_per_block: int
    """The last block may have fewer."""

    @property
    def num_blocks(self) -> int:
        """How many steps a token has."""
        return -(-self.num_runs // self.runs_per_block)

    @property
    def panel_bytes(self) -> int:
        """What a panel takes."""
        return _SCALES_BYTES * (1 + self.num_blocks) + _RUN_BYTES * self.num_runs


def scratch_bytes(num_runs: int) -> int:
    """Memory that a thread needs for itself, for so many runs or fewer: sums and totals, or 16-bit integers."""
    return max(2 * TOKENS * PANEL * 4, _MAX_TOKENS * _X_RUN_BYTES * num_runs)


def blocks_of(columns: int, block: int) -> Blocks:
    """So many columns in blocks of `block`, a multiple of COLUMNS; 0 for a single block."""
    num_runs = -(-columns // COLUMNS)
    return Blocks(num_runs, block // COLUMNS if block else num_runs)


def pack_rows(q: Bytes, scales: npt.NDArray[np.float32], blocks: Blocks) -> npt.NDArray[np.uint8]:
    """A weight from its parts, q [rows, columns] and scales [rows]: [ceil(rows / PANEL), panel_bytes].

    Raises ValueError if they do not fit each other, or the blocks.
    """
    rows, columns = q.shape
    if scales.shape != (rows,) or not 0 <= COLUMNS * blocks.num_runs - columns < COLUMNS:
        raise ValueError(f"q {q.shape} does not fit scales {scales.shape} and {blocks}")
    num_panels = -(-rows // PANEL)
    data = np.zeros((num_panels, blocks.panel_bytes), np.uint8)
    padded_scales = np.zeros((num_panels, PANEL), np.float32)
    padded_scales.reshape(-1)[:rows] = scales
    data[:, :_SCALES_BYTES] = padded_scales.view(np.uint8)
    padded = np.zeros((num_panels * PANEL, COLUMNS * blocks.num_runs), np.int8)
    padded[:rows, :columns] = q
    panels = padded.reshape(num_panels, PANEL, -1)
    at = _SCALES_BYTES
    for first in range(0, blocks.num_runs, blocks.runs_per_block):
        block = panels[:, :, COLUMNS * first : COLUMNS * (first + blocks.runs_per_block)]
        starts = block.sum(-1, dtype=np.int32) * np.int32(-128)
        data[:, at : at + _SCALES_BYTES] = starts.view(np.uint8)
        at += _SCALES_BYTES
        # panel, half, row, run, four, column -> panel, run, half, four, row, column
        runs = block.reshape(num_panels, 2, PANEL // 2, -1, COLUMNS // 4, 4).transpose(0, 3, 1, 4, 2, 5)
        size = block.shape[2] * PANEL
        data[:, at : at + size] = np.ascontiguousarray(runs).reshape(num_panels, size).view(np.uint8)
        at += size
    return data


@kernel_part
def _product_of_few(
    v: Vectors,
    num_tokens: Any,
    x: Any,
    x_stride: Any,
    steps: Any,
    steps_stride: Any,
    panel: Any,
    num_runs: Any,
    runs_per_block: Any,
    out: Any,
    out_stride: Any,
) -> None:
    """One panel for 1 to _MAX_TOKENS tokens, as `row_product` says; `x` as `_widen` leaves it where that is needed."""

    def spell(count: int) -> None:
        has_room = count <= _FEW or dot_instruction() == "avx512-vnni"
        for halves in [(0, 1)] if has_room else [(0,), (1,)]:
            spell_halves(count, halves)

    def spell_halves(count: int, halves: tuple[int, ...]) -> None:
        places = list(itertools.product(range(count), halves))
        zeros = [v.zeros() for _ in places]
        with v.loop(_num_blocks(v, num_runs, runs_per_block), v.add(panel, _SCALES_BYTES), *zeros) as blocks:
            block, *totals = blocks.carried
            first = v.mul(blocks.index, runs_per_block)
            size = v.smaller(runs_per_block, v.sub(num_runs, first))
            at = [v.add(x, v.mul(x_stride, token), v.mul(first, _X_RUN_BYTES)) for token in range(count)]
            sums = _exact_sums(v, at, block, size, halves)
            added = []
            for (token, _), total, exact in zip(places, totals, sums, strict=True):
                step = v.load_float(v.add(steps, v.mul(steps_stride, token), v.mul(blocks.index, 4)))
                added.append(v.fma(v.to_floats(exact), step, total))
            blocks.carry(v.add(block, _SCALES_BYTES, v.mul(size, _RUN_BYTES)), *added)
        for (token, half), total in zip(places, blocks.results[1:], strict=True):
            v.store(v.product(total, v.load_floats(panel, 64 * half)), v.add(out, v.mul(out_stride, token)), 64 * half)

    v.choose(num_tokens, range(1, _MAX_TOKENS + 1), spell)


def _exact_sums(v: Vectors, x_at: list[Any], block: Any, num_runs: Any, halves: tuple[int, ...]) -> list[Any]:
    """Of one block: for each token, a vector for each half."""
    if BY_SHORTS:
        return _sums_by_shorts(v, x_at, block, num_runs, halves)
    starts = [v.load_ints(block, 64 * half) for half in halves]
    num_ways = 2 if len(x_at) <= _FEW else 1
    first_way = [start for _ in x_at for start in starts]
    others = [v.int_zeros() for _ in range((num_ways - 1) * len(first_way))]
    with v.loop(num_runs, *first_way, *others) as loop:
        sums = list(loop.carried)
        run = v.add(block, _SCALES_BYTES, v.mul(loop.index, _RUN_BYTES))
        rows = [v.add(at, v.mul(loop.index, COLUMNS)) for at in x_at]
        for four in range(COLUMNS // 4):
            way = four % num_ways * len(first_way)
            weights = [v.load_bytes(run, _FOUR_BYTES * four + _HALF_BYTES * half) for half in halves]
            for token, row in enumerate(rows):
                bytes_of_x = v.load_four_bytes(row, 4 * four)
                for number, weight in enumerate(weights):
                    place = way + token * len(halves) + number
                    sums[place] = v.dot(sums[place], bytes_of_x, weight)
        loop.carry(*sums)
    found = loop.results
    return [functools.reduce(v.int_sum, found[place :: len(first_way)]) for place in range(len(first_way))]


def _sums_by_shorts(v: Vectors, x_at: list[Any], block: Any, num_runs: Any, halves: tuple[int, ...]) -> list[Any]:
    """As `_exact_sums`. Four columns at a time: with more, more is kept under way than there are registers for."""
    with v.loop(num_runs, *(v.int_zeros() for _ in x_at for _ in halves)) as runs:
        run = v.add(block, _SCALES_BYTES, v.mul(runs.index, _RUN_BYTES))
        rows = [v.add(at, v.mul(runs.index, _X_RUN_BYTES)) for at in x_at]
        with v.loop(v.int64(COLUMNS // 4), *runs.carried) as fours:
            sums, four = list(fours.carried), v.add(run, v.mul(fours.index, _FOUR_BYTES))
            for half in halves:
                v.prefetch(four, _FOUR_BYTES, _AHEAD + _HALF_BYTES * half)
            weights = [v.shorts_of_signed(v.load_bytes(four, _HALF_BYTES * half)) for half in halves]
            for odd in range(2):
                for token, row in enumerate(rows):
                    two_of_x = v.load_two_shorts(v.add(row, v.mul(fours.index, 8)), 4 * odd)
                    for number, shorts in enumerate(weights):
                        place = token * len(halves) + number
                        sums[place] = v.dot_shorts(sums[place], shorts[odd], two_of_x)
            fours.carry(*sums)
        runs.carry(*fours.results)
    return list(runs.results)


@kernel_part
def _widen(v: Vectors, num_tokens: Any, x: Any, x_stride: Any, num_runs: Any, out: Any) -> None:
    """Bytes of activations, less 128, as 16-bit integers: of each four columns the even ones, then the odd ones."""
    with v.loop(num_tokens) as tokens:
        source = v.add(x, v.mul(tokens.index, x_stride))
        target = v.add(out, v.mul(tokens.index, v.mul(num_runs, _X_RUN_BYTES)))
        with v.loop(num_runs) as loop:
            even, odd = v.shorts_of_unsigned(v.load_bytes(v.add(source, v.mul(loop.index, COLUMNS))))
            fours = v.in_turn(v.less(even, 128), v.less(odd, 128))
            for half, shorts in enumerate(fours):
                v.store(shorts, v.add(target, v.mul(loop.index, _X_RUN_BYTES)), 64 * half)


def _num_blocks(v: Vectors, num_runs: Any, runs_per_block: Any) -> Any:
    return v.builder.sdiv(v.add(num_runs, runs_per_block, -1), runs_per_block)


@kernel_part
def _product_by_tiles(
    v: Vectors,
    num_tokens: Any,
    x: Any,
    x_stride: Any,
    steps: Any,
    steps_stride: Any,
    panel: Any,
    num_runs: Any,
    runs_per_block: Any,
    out: Any,
    out_stride: Any,
    scratch: Any,
) -> None:
    """One panel for 1 to TOKENS tokens, as `row_product` says."""
    totals = v.add(scratch, 4 * TOKENS * PANEL)
    num_blocks = _num_blocks(v, num_runs, runs_per_block)

    def spell(num_registers: int) -> None:
        with v.loop(num_blocks, v.add(panel, _SCALES_BYTES)) as blocks:
            (block,) = blocks.carried
            first = v.mul(blocks.index, runs_per_block)
            size = v.smaller(runs_per_block, v.sub(num_runs, first))
            _tile_sums(v, num_registers, v.add(x, v.mul(first, COLUMNS)), x_stride, block, size, scratch)
            is_first = v.builder.icmp_signed("==", blocks.index, v.int64(0))
            is_last = v.builder.icmp_signed("==", v.add(blocks.index, 1), num_blocks)
            with v.loop(num_tokens) as tokens:
                step = v.load_float(v.add(steps, v.mul(steps_stride, tokens.index), v.mul(blocks.index, 4)))
                ints, kept = (v.add(at, v.mul(tokens.index, 4 * PANEL)) for at in (scratch, totals))
                target = v.builder.select(is_last, v.add(out, v.mul(out_stride, tokens.index)), kept)
                for half in range(2):
                    before = v.where(is_first, v.zeros(), v.load_floats(kept, 64 * half))
                    total = v.fma(v.to_floats(v.load_ints(ints, 64 * half)), step, before)
                    scaled = v.product(total, v.load_floats(panel, 64 * half))
                    v.store(v.where(is_last, scaled, total), target, 64 * half)
            blocks.carry(v.add(block, _SCALES_BYTES, v.mul(size, _RUN_BYTES)))

    is_short = v.builder.icmp_signed("<=", num_tokens, v.int64(tiles.TOKENS))
    v.choose(v.builder.select(is_short, v.int64(1), v.int64(2)), (1, 2), spell)


def _tile_sums(v: Vectors, num_registers: int, x: Any, x_stride: Any, block: Any, num_runs: Any, out: Any) -> None:
    """The sums of one block for `num_registers` times 16 tokens, as [tokens, PANEL] int32."""
    pairs = [(number, half) for number in range(num_registers) for half in range(2)]
    for number, half in pairs:
        tiles.load(v, tiles.SUMS[2 * number + half], v.add(block, 64 * half), v.int64(0))
    with v.loop(num_runs) as loop:
        run = v.add(block, _SCALES_BYTES, v.mul(loop.index, _RUN_BYTES))
        for half, register in enumerate(tiles.WEIGHTS):
            tiles.load(v, register, v.add(run, _RUN_BYTES // 2 * half), v.int64(64))
        for number, register in enumerate(tiles.ACTIVATIONS[:num_registers]):
            tiles.load(
                v, register, v.add(x, v.mul(x_stride, tiles.TOKENS * number), v.mul(loop.index, COLUMNS)), x_stride
            )
        for number, half in pairs:
            tiles.multiply(v, tiles.SUMS[2 * number + half], tiles.ACTIVATIONS[number], tiles.WEIGHTS[half])
    for number, half in pairs:
        at = v.add(out, 4 * PANEL * tiles.TOKENS * number + 64 * half)
        tiles.store(v, tiles.SUMS[2 * number + half], at, v.int64(4 * PANEL))


@nested
def row_product(
    x: int,
    x_stride: int,
    steps: int,
    steps_stride: int,
    panel: int,
    num_runs: int,
    runs_per_block: int,
    out: int,
    out_stride: int,
    num_tokens: int,
    has_tiles: bool,
    scratch: int,
) -> None:
    """For kernels: one panel for any number of tokens.

    `x` are the bytes of the tokens and `steps` their blocks' steps, rows `…_stride` bytes apart; `panel` is the panel's
    address; `out` gets 32 floats a token. `scratch` is `scratch_bytes` of the thread's own; a thread has begun to use
    tiles where there are any.
    """
    if has_tiles and num_tokens >= _TILES_FROM:
        for first in range(0, num_tokens, 32):
            x_at, steps_at, out_at = x + first * x_stride, steps + first * steps_stride, out + first * out_stride
            count = min(32, num_tokens - first)
            _product_by_tiles(
                count,
                x_at,
                x_stride,
                steps_at,
                steps_stride,
                panel,
                num_runs,
                runs_per_block,
                out_at,
                out_stride,
                scratch,
            )
        return
    num_parts = (num_tokens + _MAX_TOKENS - 1) // _MAX_TOKENS
    done = 0
    for part in range(num_parts):
        count = (num_tokens - done + num_parts - part - 1) // (num_parts - part)  # as even as can be
        x_at, steps_at, out_at = x + done * x_stride, steps + done * steps_stride, out + done * out_stride
        stride = x_stride
        if BY_SHORTS:
            _widen(count, x_at, x_stride, num_runs, scratch)
            x_at, stride = scratch, num_runs * _X_RUN_BYTES
        _product_of_few(
            count, x_at, stride, steps_at, steps_stride, panel, num_runs, runs_per_block, out_at, out_stride
        )
        done += count
