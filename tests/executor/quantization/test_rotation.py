"""The rotation of hidden states: a rotation it is, mixes what stands out, and is the same everywhere."""

from hashlib import sha256

import numpy as np
import pytest

from services.executor.quantization.rotation import Rotation

SIZES = [32, 64, 96, 576, 896]


@pytest.mark.parametrize("size", [1, 7, *SIZES])
def test_lengths_and_angles_stay_what_they_are(size: int) -> None:
    rotated = Rotation(size)(np.eye(size, dtype=np.float32))
    assert np.allclose(rotated.T @ rotated, np.eye(size), atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_a_number_that_stands_out_is_spread_over_all(size: int) -> None:
    x = np.zeros((size, 1), np.float32)
    x[3] = 1000
    rotated = np.abs(Rotation(size)(x))
    assert rotated.max() < 1.5 * 1000 / np.sqrt(size)


@pytest.mark.parametrize("size", SIZES)
def test_equal_numbers_are_spread_too(size: int) -> None:
    rotated = np.abs(Rotation(size)(np.ones((size, 1), np.float32)))
    assert rotated.max() < 6


def test_rows_are_rotated_as_columns_are() -> None:
    x = np.random.default_rng(0).normal(size=(96, 5)).astype(np.float32)
    assert np.array_equal(Rotation(96).rows(x.T).T, Rotation(96)(x.copy()))


def test_neither_company_nor_threads_change_a_bit() -> None:
    x = np.random.default_rng(0).normal(size=(96, 1500)).astype(np.float32)
    together = Rotation(96, num_threads=3)(x.copy())
    apart = [Rotation(96)(x[:, first : first + 7].copy()) for first in range(0, 1500, 7)]
    assert np.array_equal(together, np.concatenate(apart, axis=1))


def test_it_is_this_rotation_and_no_other() -> None:
    """Executors that packed a model on different machines, or with different versions, must agree to the bit."""
    x = (np.arange(576 * 4, dtype=np.float32).reshape(576, 4) * np.float32(0.37)) % np.float32(5)
    assert sha256(Rotation(576)(x).tobytes()).hexdigest()[:16] == "9ce426ddaead8883"
