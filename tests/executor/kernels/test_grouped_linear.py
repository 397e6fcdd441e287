"""Products of bytes with weights in groups: against exact arithmetic, for odd sizes, the same bits in any company."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from services.executor.kernels.grouped_linear import (
    MAX_TILE,
    PANEL,
    Bits,
    GroupedWeight,
    pack,
    panel_for,
    panel_product,
    unpack_row,
    wide_bytes,
)
from services.executor.kernels.jit import single
from services.executor.kernels.quantize import GROUP, quantize_naive
from services.executor.quantization.groups import Groups, numbers

Floats = npt.NDArray[np.float32]


@single
def _multiply(
    x: int, steps: int, weight: int, bits: int, num_groups: int, num_panels: int, out: int, num_tokens: int, memory: int
) -> None:
    for panel in range(num_panels):
        source, found_bits = panel_for(weight, bits, num_groups, panel, num_tokens, memory)
        panel_product(x, steps, source, found_bits, num_groups, out + panel * 128, num_panels * 128, num_tokens)


@single
def _unpack(weight: int, bits: int, num_groups: int, row: int, out: int) -> None:
    unpack_row(weight, bits, num_groups, row, out)


def random_groups(rows: int, columns: int, bits: Bits, seed: int = 0) -> Groups:
    draw = np.random.default_rng(seed)
    shape = (rows, columns // GROUP)
    return Groups(
        draw.integers(0, 1 << bits, (rows, columns), np.uint8),
        draw.random(shape).astype(np.float16) * np.float16(0.1),
        draw.normal(size=shape).astype(np.float16),
    )


def multiply(x: torch.Tensor, weight: GroupedWeight) -> Floats:
    ints, steps = quantize_naive(x)
    num_panels = weight.data.shape[0]
    out = np.full((len(x), num_panels * PANEL), np.nan, np.float32)
    memory = np.zeros(wide_bytes(weight.columns // GROUP), np.uint8)
    _multiply(
        ints.data_ptr(),
        steps.contiguous().data_ptr(),
        weight.data.data_ptr(),
        weight.bits,
        weight.columns // GROUP,
        num_panels,
        out.ctypes.data,
        len(x),
        memory.ctypes.data,
    )
    return out[:, : weight.rows]


def activations(num_tokens: int, columns: int) -> torch.Tensor:
    return torch.randn(num_tokens, columns, generator=torch.Generator().manual_seed(num_tokens))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (1, 64), (100, 96), (33, 256)])
@pytest.mark.parametrize("num_tokens", [1, 2, MAX_TILE, MAX_TILE + 1, 20])
def test_the_product_is_that_of_the_numbers(bits: Bits, rows: int, columns: int, num_tokens: int) -> None:
    groups, x = random_groups(rows, columns, bits), activations(num_tokens, columns)
    ints, steps = quantize_naive(x)
    exact_x = ints.double().view(num_tokens, -1, GROUP) * steps[..., :1].double()
    exact = exact_x.flatten(1).numpy() @ numbers(groups).astype(np.float64).T
    found = multiply(x, pack(*groups, bits))
    # Each of the float32 sums rounds as often as there are groups, twice.
    size = (exact_x.flatten(1).abs().numpy() @ np.abs(numbers(groups)).T) * 2 * columns // GROUP * 2.0**-23
    assert np.all(np.abs(found - exact) <= size + 1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_token_gets_the_same_bits_in_any_company(bits: Bits) -> None:
    weight, x = pack(*random_groups(70, 128, bits), bits), activations(23, 128)
    together = multiply(x, weight)
    for count in (1, 2, 3, 4, 5, 6, 7, 11):
        apart = np.concatenate([multiply(x[first : first + count], weight) for first in range(0, 23, count)])
        assert np.array_equal(apart, together)


def test_four_bits_and_eight_give_the_same_bits() -> None:
    groups, x = random_groups(64, 64, 4), activations(5, 64)
    assert np.array_equal(multiply(x, pack(*groups, 4)), multiply(x, pack(*groups, 8)))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_is_unpacked_to_its_numbers(bits: Bits) -> None:
    groups = random_groups(70, 96, bits)
    weight, expected = pack(*groups, bits), numbers(groups)
    for row in (0, 15, 16, 31, 32, 69):
        out = np.empty(96, np.float32)
        _unpack(weight.data.data_ptr(), bits, 3, row, out.ctypes.data)
        assert np.allclose(out, expected[row], rtol=1e-6)


def test_what_is_no_number_reaches_the_result() -> None:
    x = activations(3, 64)
    x[1, 50] = torch.nan
    found = multiply(x, pack(*random_groups(40, 64, 4), 4))
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[[0, 2]]).all()


def test_what_cannot_be_packed_is_refused() -> None:
    groups = random_groups(4, 64, 8)
    with pytest.raises(ValueError, match="is no number of 4 bits"):
        pack(groups.q | np.uint8(16), groups.scales, groups.offsets, 4)
    with pytest.raises(ValueError, match="groups of 32"):
        pack(groups.q[:, :40], groups.scales, groups.offsets, 8)
