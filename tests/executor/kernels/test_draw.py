"""Weights and draws against their formulas, for vocabularies of any size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.kernels.draw import pick, total_of, weigh, weigh_naive

SIZES = [1, 5, 16, 1000, 1024, 1025, 3000, 49_152]


def logits_of(size: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return (np.random.default_rng(seed).standard_normal(size) * 5).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 3.0])
def test_weights_are_those_of_the_formula(size: int, temperature: float) -> None:
    logits = logits_of(size, 1)
    logits[size // 3] = -np.inf if size > 1 else 0
    weights, sums = weigh(logits, temperature)
    expected = weigh_naive(logits, temperature)
    np.testing.assert_allclose(weights, expected, rtol=2e-5 / temperature)
    assert total_of(sums) == pytest.approx(float(expected.astype(np.float64).sum()), rel=1e-4)
    assert size == 1 or weights[size // 3] == 0
    assert weights.max() == 1


def test_a_tiny_temperature_leaves_the_likeliest_alone() -> None:
    weights, _ = weigh(np.array([1.0, 3.0, 2.9999998], np.float32), 1e-45)
    assert weights.tolist() == [0, 1, 0]


@pytest.mark.parametrize("size", SIZES)
def test_a_pick_is_the_first_token_whose_running_sum_is_larger(size: int) -> None:
    weights, sums = weigh(logits_of(size, 2), 1.0)
    running = weights.astype(np.float64).cumsum()
    for noise in np.linspace(0, 1, 50, endpoint=False):
        token = pick(weights, sums, noise)
        before = running[token - 1] if token else 0.0
        assert before <= noise * running[-1] * (1 + 1e-6)
        assert running[token] >= noise * running[-1] * (1 - 1e-6)


@given(st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=60), st.floats(0, 1, exclude_max=True))
def test_nothing_without_weight_is_ever_picked(logits: list[float], noise: float) -> None:
    weights, sums = weigh(np.array(logits, np.float32), 1.0)
    assert weights[pick(weights, sums, noise)] > 0


def test_rounding_at_the_end_of_a_block_stays_in_it() -> None:
    """A block's sum by lanes may be a little larger than its additions one after the other."""
    weights, sums = weigh(np.zeros(4096, np.float32), 1.0)
    sums = sums * np.float32(1 + 1e-6)
    assert pick(weights, sums, np.nextafter(1.0, 0.0)) == 4095
    assert pick(weights, sums, np.nextafter(0.25, 0.0)) == 1023
