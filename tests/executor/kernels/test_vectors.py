"""The vocabulary of vector instructions, each word against plain arithmetic."""

from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest

from services.executor.kernels import vectors
from services.executor.kernels.jit import single
from services.executor.kernels.vectors import Vectors, kernel_part

FEATURES = {"none": "", "avx2": "avx2", "avx-vnni": "avxvnni", "avx512-vnni": "avx512vnni"}
INSTRUCTIONS = [name for name, feature in FEATURES.items() if not feature or llvm.get_host_cpu_features().get(feature)]


def compile_dot(monkeypatch: pytest.MonkeyPatch, instruction: str) -> Any:
    """A kernel of one dot instruction, compiled for a processor that has just this one."""

    @kernel_part
    def dot(v: Vectors, sums: Any, unsigned: Any, signed: Any) -> None:
        total = v.dot(v.as_ints(v.load_floats(sums)), v.load_bytes(unsigned), v.load_bytes(signed))
        v.store(total, sums)

    def run(sums: int, unsigned: int, signed: int) -> None:
        dot(sums, unsigned, signed)

    import numba

    monkeypatch.setattr(vectors, "dot_instruction", lambda: instruction)
    kernel = numba.njit(run)
    kernel(*(np.zeros(64, np.uint8).ctypes.data for _ in range(3)))
    return kernel


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_dots_are_exact_over_the_whole_range(monkeypatch: pytest.MonkeyPatch, instruction: str) -> None:
    kernel = compile_dot(monkeypatch, instruction)
    draw = np.random.default_rng(0)
    for unsigned, signed in (
        (np.full(64, 255, np.uint8), np.full(64, -128, np.int8)),
        (np.full(64, 255, np.uint8), np.full(64, 127, np.int8)),
        (draw.integers(0, 256, 64, np.uint8), draw.integers(-128, 128, 64, np.int8)),
    ):
        sums = draw.integers(-1000, 1000, 16, np.int32)
        expected = sums + (unsigned.astype(np.int32) * signed).reshape(16, 4).sum(1)
        kernel(sums.ctypes.data, unsigned.ctypes.data, signed.ctypes.data)
        assert sums.tolist() == expected.tolist()


@kernel_part
def _exponential(v: Vectors, x: Any) -> None:
    v.store(v.exponential(v.load_floats(x)), x)


@single
def exponential(x: int) -> None:
    """16 numbers in place."""
    _exponential(x)


def test_the_exponential_is_right_to_two_units_in_the_last_place() -> None:
    x = np.linspace(-87, 0, 16_000, dtype=np.float32)
    y = x.copy()
    for first in range(0, len(y), 16):
        exponential(y.ctypes.data + 4 * first)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(y - exact) / np.spacing(exact.astype(np.float32))) <= 2
    assert y[-1] == 1


def test_the_exponential_of_what_is_no_number_is_none() -> None:
    x = np.array([np.nan] + [-np.inf] + [-1000.0] * 14, np.float32)
    exponential(x.ctypes.data)
    assert np.isnan(x[0])
    assert np.all(x[1:] == np.exp(np.float32(-87)))
