"""Products of bytes with weights that have a scale a row: against exact arithmetic, with and without tile registers."""

import numpy as np
import numpy.typing as npt
import pytest

from services.executor.kernels import tiles
from services.executor.kernels.jit import single
from services.executor.kernels.row_linear import (
    COLUMNS,
    PANEL,
    TOKENS,
    Blocks,
    blocks_of,
    pack_rows,
    row_product,
    scratch_bytes,
)

Floats = npt.NDArray[np.float32]
WAYS = [False, True] if tiles.can_use_tiles() else [False]
"""Whether tile registers are used."""


@single
def _multiply(
    x: int,
    x_stride: int,
    steps: int,
    steps_stride: int,
    weight: int,
    panel_bytes: int,
    num_panels: int,
    num_runs: int,
    runs_per_block: int,
    out: int,
    num_tokens: int,
    has_tiles: bool,
    shapes: int,
    scratch: int,
) -> None:
    if has_tiles:
        tiles.begin(shapes)
    for panel in range(num_panels):
        row_product(
            x,
            x_stride,
            steps,
            steps_stride,
            weight + panel * panel_bytes,
            num_runs,
            runs_per_block,
            out + panel * 128,
            num_panels * 128,
            num_tokens,
            has_tiles,
            scratch,
        )
    if has_tiles:
        tiles.end(0)


def random_weight(rows: int, columns: int) -> tuple[npt.NDArray[np.int8], Floats]:
    draw = np.random.default_rng(rows + columns)
    return draw.integers(-127, 128, (rows, columns), np.int8), draw.random(rows, np.float32)


def random_activations(num_tokens: int, blocks: Blocks) -> tuple[npt.NDArray[np.uint8], Floats]:
    """Bytes, with room for tokens that are read beyond them, and steps. Bytes beyond the columns are random too."""
    draw = np.random.default_rng(num_tokens)
    u = draw.integers(1, 256, (num_tokens + TOKENS, COLUMNS * blocks.num_runs)).astype(np.uint8)
    return u, draw.random((num_tokens, blocks.num_blocks), np.float32)


def multiply(
    u: npt.NDArray[np.uint8], steps: Floats, weight: npt.NDArray[np.uint8], blocks: Blocks, *, has_tiles: bool
) -> Floats:
    out = np.full((len(steps), len(weight) * PANEL), np.nan, np.float32)
    scratch = np.zeros(scratch_bytes(blocks.num_runs), np.uint8)
    _multiply(
        u.ctypes.data,
        u.shape[1],
        steps.ctypes.data,
        4 * steps.shape[1],
        weight.ctypes.data,
        weight.shape[1],
        len(weight),
        blocks.num_runs,
        blocks.runs_per_block,
        out.ctypes.data,
        len(steps),
        has_tiles,
        tiles.SHAPES.ctypes.data,
        scratch.ctypes.data,
    )
    return out


def by_the_formula(
    u: npt.NDArray[np.uint8], steps: Floats, q: npt.NDArray[np.int8], scales: Floats, blocks: Blocks
) -> Floats:
    """To the bit: exact sums, each block's added with one rounding, then the scale."""
    num_tokens, columns = len(steps), q.shape[1]
    size = COLUMNS * blocks.runs_per_block
    ints = u[:num_tokens, :columns].astype(np.int64) - 128
    total = np.zeros((num_tokens, len(q)), np.float32)
    for number, first in enumerate(range(0, columns, size)):
        sums = ints[:, first : first + size] @ q[:, first : first + size].astype(np.int64).T
        # Both factors have 24 bits, so float64 holds their product exactly.
        product = sums.astype(np.float32).astype(np.float64) * steps[:, number : number + 1]
        total = (product + total).astype(np.float32)
    return total * scales


@pytest.mark.parametrize("has_tiles", WAYS)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 6, 7, 16, 17, 32, 33, 70])
@pytest.mark.parametrize(
    ("rows", "columns", "block"),
    [(32, 64, 0), (1, 32, 0), (100, 96, 0), (33, 256, 128), (64, 320, 128), (40, 160, 64), (96, 576, 0)],
)
def test_the_product_is_that_of_the_formula_to_the_bit(
    rows: int, columns: int, block: int, num_tokens: int, has_tiles: bool
) -> None:
    blocks = blocks_of(columns, block)
    (q, scales), (u, steps) = random_weight(rows, columns), random_activations(num_tokens, blocks)
    found = multiply(u, steps, pack_rows(q, scales, blocks), blocks, has_tiles=has_tiles)
    assert np.array_equal(found[:, :rows], by_the_formula(u, steps, q, scales, blocks))


@pytest.mark.parametrize("has_tiles", WAYS)
def test_sums_as_large_as_they_can_be_are_exact(has_tiles: bool) -> None:
    blocks = blocks_of(8192, 0)
    q, u = np.full((32, 8192), -127, np.int8), np.full((1 + TOKENS, 8192), 255, np.uint8)
    ones = np.ones((1, 1), np.float32)
    found = multiply(u, ones, pack_rows(q, np.ones(32, np.float32), blocks), blocks, has_tiles=has_tiles)
    assert np.all(found == np.float32(-127 * 127 * 8192))


@pytest.mark.parametrize("has_tiles", WAYS)
def test_a_token_gets_the_same_bits_in_any_company(has_tiles: bool) -> None:
    blocks = blocks_of(320, 128)
    q, scales = random_weight(70, 320)
    weight, (u, steps) = pack_rows(q, scales, blocks), random_activations(40, blocks)
    together = multiply(u, steps, weight, blocks, has_tiles=has_tiles)
    for count in (1, 2, 3, 5, 7, 11, 20):
        apart = [
            multiply(u[first:], steps[first : first + count], weight, blocks, has_tiles=has_tiles)
            for first in range(0, 40, count)
        ]
        assert np.array_equal(np.concatenate(apart), together)


@pytest.mark.parametrize("has_tiles", WAYS)
def test_what_is_no_number_reaches_the_result_of_its_token_alone(has_tiles: bool) -> None:
    blocks = blocks_of(256, 128)
    (q, scales), (u, steps) = random_weight(40, 256), random_activations(5, blocks)
    steps[1, 1] = np.nan
    found = multiply(u, steps, pack_rows(q, scales, blocks), blocks, has_tiles=has_tiles)[:, :40]
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[[0, 2, 3, 4]]).all()


def test_parts_that_do_not_fit_are_refused() -> None:
    q, scales = random_weight(4, 64)
    with pytest.raises(ValueError, match="does not fit scales"):
        pack_rows(q, scales[:3], blocks_of(64, 0))
    with pytest.raises(ValueError, match="does not fit scales"):
        pack_rows(q, scales, blocks_of(128, 0))
