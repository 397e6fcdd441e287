"""Activations as bytes with one step for many numbers: against the formulas, and with numbers that are none."""

import pytest
import torch
from torch import Tensor

from services.executor.kernels.jit import single
from services.executor.kernels.quantize import GROUP, silu_mul_floats
from services.executor.kernels.rms_norm import rms_norm_naive
from services.executor.kernels.row_quantize import (
    dequantize_rows_naive,
    normalize_whole_row,
    quantize_block,
    quantize_rows_naive,
    unpack_embedding,
)

SIZE = 96


@single
def _quantize(x: int, num_groups: int, u: int, step: int) -> None:
    quantize_block(x, num_groups, u, step)


@single
def _normalize(x: int, num_groups: int, facts: int, u: int, step: int) -> None:
    normalize_whole_row(x, num_groups, facts, u, step)


@single
def _unpack(record: int, num_groups: int, out: int) -> None:
    unpack_embedding(record, num_groups, out)


@single
def _silu_mul(gate: int, up: int, out: int) -> None:
    silu_mul_floats(gate, up, out)


def outputs() -> tuple[Tensor, Tensor]:
    """Bytes and a step that nobody has written yet."""
    return torch.full((1, SIZE), 99, dtype=torch.uint8), torch.full((1, 1), torch.nan)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    u, step = outputs()
    _quantize(x.data_ptr(), SIZE // GROUP, u.data_ptr(), step.data_ptr())
    return u, step


def normalized(x: Tensor) -> tuple[Tensor, Tensor]:
    (u, step), facts = outputs(), torch.tensor([1 / SIZE, 1e-5])
    _normalize(x.data_ptr(), SIZE // GROUP, facts.data_ptr(), u.data_ptr(), step.data_ptr())
    return u, step


def numbers(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(1, SIZE, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_bytes_and_step_are_those_of_the_formula(scale: float) -> None:
    x = numbers(1, scale)
    for mine, formula in zip(quantized(x), quantize_rows_naive(x), strict=True):
        assert torch.equal(mine, formula)


def test_no_number_is_off_by_more_than_half_a_step() -> None:
    x = numbers(2, 30)
    u, step = quantized(x)
    assert torch.all((dequantize_rows_naive(u, step) - x).abs() <= step * 0.5001)
    assert (u.int() - 128).abs().max() == 127


def test_blocks_have_steps_of_their_own() -> None:
    x = torch.cat((numbers(3), 1000 * numbers(4)), dim=1)
    u, steps = quantize_rows_naive(x, SIZE)
    assert steps.shape == (1, 2)
    assert torch.equal(steps[:, :1], quantized(x[:, :SIZE].contiguous())[1])
    assert torch.all((dequantize_rows_naive(u, steps, SIZE) - x).abs()[:, :SIZE] <= steps[:, :1] * 0.5001)


def test_zeros_are_exact() -> None:
    u, step = quantized(torch.zeros(1, SIZE))
    assert torch.equal(dequantize_rows_naive(u, step), torch.zeros(1, SIZE))


@pytest.mark.parametrize("place", [0, 40, SIZE - 1])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_finite_number_shows_in_the_step(bad: float, place: int) -> None:
    x = numbers(4)
    x[0, place] = bad
    assert not torch.isfinite(quantized(x)[1]).any()
    assert not torch.isfinite(normalized(x)[1]).any()


@pytest.mark.parametrize("scale", [1e-3, 3.0, 1e4])
def test_normalizing_is_the_norm_and_then_bytes(scale: float) -> None:
    x = numbers(5, scale)
    u, step = normalized(x)
    expected_u, expected_step = quantize_rows_naive(rms_norm_naive(x, torch.ones(SIZE), 1e-5))
    assert (u.int() - expected_u.int()).abs().max() <= 1  # a number on the edge between two may fall to either
    assert torch.allclose(step, expected_step, rtol=1e-6)


def test_an_embedding_is_its_bytes_times_its_scale() -> None:
    record = torch.zeros(64 + SIZE, dtype=torch.int8)
    record[:4] = torch.tensor([0.25]).view(torch.int8)
    record[64:] = torch.arange(-SIZE // 2, SIZE // 2, dtype=torch.int8)
    out = torch.full((SIZE,), torch.nan)
    _unpack(record.data_ptr(), SIZE // GROUP, out.data_ptr())
    assert torch.equal(out, torch.arange(-SIZE // 2, SIZE // 2) * 0.25)


def test_silu_times_up_is_that_of_torch() -> None:
    gate, up, out = numbers(6, 10)[0, :GROUP], numbers(7)[0, :GROUP], torch.full((GROUP,), torch.nan)
    _silu_mul(gate.data_ptr(), up.data_ptr(), out.data_ptr())
    assert torch.allclose(out, torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-7)
