"""Activations as bytes: against the formulas, at the edges, and with numbers that are none."""

import pytest
import torch
from torch import Tensor

from services.executor.kernels.jit import single
from services.executor.kernels.quantize import (
    GROUP,
    add_row,
    dequantize_naive,
    normalize_row,
    quantize_naive,
    quantize_row,
    silu_mul_group,
)
from services.executor.kernels.rms_norm import rms_norm_naive

SIZE = 96


@single
def _quantize(x: int, num_groups: int, ints: int, steps: int) -> None:
    quantize_row(x, num_groups, ints, steps)


@single
def _normalize(x: int, weight: int, num_groups: int, facts: int, ints: int, steps: int) -> None:
    normalize_row(x, weight, num_groups, facts, ints, steps)


@single
def _silu_mul(gate: int, up: int, num_groups: int, ints: int, steps: int) -> None:
    for group in range(num_groups):
        silu_mul_group(gate + group * 128, up + group * 128, group, ints, steps)


@single
def _add(x: int, residual: int, num_groups: int) -> None:
    add_row(x, residual, num_groups)


def outputs() -> tuple[Tensor, Tensor]:
    """Bytes and steps that nobody has written yet."""
    return torch.full((1, SIZE), 99, dtype=torch.int8), torch.full((1, SIZE // GROUP, 2), torch.nan)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    ints, steps = outputs()
    _quantize(x.data_ptr(), SIZE // GROUP, ints.data_ptr(), steps.data_ptr())
    return ints, steps


def numbers(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(1, SIZE, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_bytes_and_steps_are_those_of_the_formula(scale: float) -> None:
    x = numbers(1, scale)
    for mine, formula in zip(quantized(x), quantize_naive(x), strict=True):
        assert torch.equal(mine, formula)


def test_no_number_is_off_by_more_than_half_a_step() -> None:
    x = numbers(2, 30)
    ints, steps = quantized(x)
    error = (dequantize_naive(ints, steps) - x).abs().view(1, -1, GROUP)
    assert torch.all(error <= steps[..., :1] * 0.5001)
    assert ints.abs().max() == 127


def test_each_group_has_a_step_of_its_own_and_zeros_are_exact() -> None:
    x = numbers(3)
    x[:, :GROUP] *= 1000
    x[:, GROUP : 2 * GROUP] = 0
    ints, steps = quantized(x)
    assert torch.equal(dequantize_naive(ints, steps)[:, GROUP : 2 * GROUP], torch.zeros(1, GROUP))
    assert steps[0, 0, 0] > 100 * steps[0, 2, 0] > 0 == steps[0, 1, 0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_finite_number_shows_in_its_groups_step_alone(bad: float) -> None:
    x = numbers(4)
    x[0, 40] = bad
    _, steps = quantized(x)
    assert torch.isfinite(steps[0, :, 0]).tolist() == [True, False, True]


def test_normalizing_is_the_norm_and_then_bytes() -> None:
    x, weight, facts = numbers(5, 3), numbers(6), torch.tensor([1 / SIZE, 1e-5])
    ints, steps = outputs()
    _normalize(x.data_ptr(), weight.data_ptr(), SIZE // GROUP, facts.data_ptr(), ints.data_ptr(), steps.data_ptr())
    expected_ints, expected_steps = quantize_naive(rms_norm_naive(x, weight[0], 1e-5))
    assert (ints - expected_ints).abs().max() <= 1  # a number on the edge between two may fall to either
    assert torch.allclose(steps[..., 0], expected_steps[..., 0], rtol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 200.0])
def test_silu_times_up_is_the_formula_and_then_bytes(scale: float) -> None:
    gate, up = numbers(7, scale), numbers(8)
    ints, steps = outputs()
    _silu_mul(gate.data_ptr(), up.data_ptr(), SIZE // GROUP, ints.data_ptr(), steps.data_ptr())
    expected_ints, expected_steps = quantize_naive(torch.nn.functional.silu(gate) * up)
    assert (ints - expected_ints).abs().max() <= 1
    assert torch.allclose(steps[..., 0], expected_steps[..., 0], rtol=1e-6)


def test_adding_is_in_place() -> None:
    x, residual = numbers(9), numbers(10)
    expected = x + residual
    _add(x.data_ptr(), residual.data_ptr(), SIZE // GROUP)
    assert torch.equal(residual, expected)
