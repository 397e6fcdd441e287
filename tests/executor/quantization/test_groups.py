"""Weights in groups: GGUF's formats read as they are, and other numbers brought into groups."""

import gguf
import numpy as np
import pytest

from services.executor.kernels.grouped_linear import Bits
from services.executor.quantization.gguf_blocks import dequantize_into
from services.executor.quantization.groups import STORED_BITS, joined, numbers, quantize, read_blocks


def weights(seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(size=(6, 96)).astype(np.float32)


@pytest.mark.parametrize("kind", STORED_BITS)
def test_stored_groups_are_the_numbers_that_gguf_reads(kind: str) -> None:
    blocks = gguf.quants.quantize(weights(), gguf.GGMLQuantizationType[kind])
    expected = np.empty((6, 96), np.float32)
    dequantize_into(expected, blocks, kind)
    groups = read_blocks(blocks, kind)
    assert int(groups.q.max()) < 1 << STORED_BITS[kind]
    # The formula's product is not rounded before the offset is added, gguf's is.
    assert np.allclose(numbers(groups), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("bits", "num_steps"), [(4, 15), (8, 254)])
def test_numbers_are_off_by_half_a_step_at_most(bits: Bits, num_steps: int) -> None:
    weight = weights()
    groups = quantize(weight, bits)
    span = weight.reshape(6, 3, 32).max(-1) - weight.reshape(6, 3, 32).min(-1)
    largest = 2 * np.abs(weight.reshape(6, 3, 32)).max(-1)
    step = (span if bits == 4 else largest) / num_steps
    error = np.abs(numbers(groups) - weight).reshape(6, 3, 32).max(-1)
    assert np.all(error <= step * 0.5 + np.abs(weight).max() * 2e-3)  # scales are rounded to float16


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_stay_zeros(bits: Bits) -> None:
    assert np.array_equal(numbers(quantize(np.zeros((2, 64), np.float32), bits)), np.zeros((2, 64)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_that_no_scale_holds_are_refused(bits: Bits, bad: float) -> None:
    weight = weights()
    weight[2, 40] = bad
    with pytest.raises(ValueError, match="beyond 4096"):
        quantize(weight, bits)


def test_rows_can_be_joined_and_put_in_order() -> None:
    a, b = quantize(weights(1), 8), quantize(weights(2), 8)
    both = numbers(joined((a, b)).rows(np.array([7, 0, 11])))
    assert np.array_equal(both, np.stack((numbers(b)[1], numbers(a)[0], numbers(b)[5])))
