"""The matrix product: right numbers, and the same bits for a row whatever is beside it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.kernels.jit import use_threads
from services.executor.kernels.linear import linear, linear_naive, pack, weight_rows

# float32 adds up to 1500 products in another order than the truth; relative to the size of the sums.
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
SHAPES = [(1, 1), (3, 5), (33, 37), (96, 64), (576, 1536)]


def tensors(num_tokens: int, rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_tokens, columns), (rows, columns), (rows,))
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, weight, bias


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_product_is_right(num_tokens: int, rows: int, columns: int) -> None:
    x, weight, bias = tensors(num_tokens, rows, columns)
    expected = torch.from_numpy(x.double().numpy() @ weight.double().numpy().T)
    for found in (linear(x, pack(weight)), linear_naive(x, weight)):
        torch.testing.assert_close(found.double(), expected, **TOLERANCE)
    for found in (linear(x, pack(weight), bias), linear_naive(x, weight, bias)):
        torch.testing.assert_close(found.double(), expected + bias, **TOLERANCE)


@given(
    num_tokens=st.integers(1, 70),
    shape=st.sampled_from(SHAPES),
    cut=st.tuples(st.integers(0, 69), st.integers(1, 70)),
    num_threads=st.sampled_from([1, 2]),
)
@settings(deadline=None, max_examples=60)
def test_a_rows_bits_do_not_depend_on_other_rows(
    num_tokens: int, shape: tuple[int, int], cut: tuple[int, int], num_threads: int
) -> None:
    x, weight, bias = tensors(num_tokens, *shape)
    packed = pack(weight)
    first, last = cut[0] % num_tokens, min(num_tokens, cut[0] % num_tokens + cut[1])
    before = torch.get_num_threads()
    use_threads(num_threads)
    try:
        assert torch.equal(linear(x[first:last], packed, bias), linear(x, packed, bias)[first:last])
    finally:
        use_threads(before)


def test_neighbours_that_are_not_numbers_stay_among_themselves() -> None:
    x, weight, _ = tensors(20, 33, 37)
    packed = pack(weight)
    expected = linear(x, packed)
    poisoned = x.clone()
    poisoned[[3, 18]] = torch.nan
    found = linear(poisoned, packed)
    assert found[[3, 18]].isnan().all()
    assert torch.equal(found[4:18], expected[4:18])


def test_a_packed_weight_stands_on_its_own() -> None:
    weight = torch.ones(70, 3)  # a whole panel and a part of one
    packed = pack(weight)
    weight.fill_(9)
    assert linear(torch.ones(1, 3), packed).tolist() == [[3.0] * 70]
    assert (packed.rows, packed.columns) == (70, 3)


def test_rows_of_a_packed_weight_are_those_that_were_packed() -> None:
    _, weight, _ = tensors(1, 130, 37)
    ids = torch.tensor([129, 0, 64, 63, 128, 0])
    assert torch.equal(weight_rows(pack(weight), ids), weight[ids])
    assert weight_rows(pack(weight), ids[:0]).shape == (0, weight.shape[1])
    for outside in (-1, 130):
        with pytest.raises(IndexError, match="the weight has 130 rows"):
            weight_rows(pack(weight), torch.tensor([5, outside]))


def test_wrong_arguments_are_named() -> None:
    weight = pack(torch.zeros(4, 3))
    for x in (torch.zeros(2, 4), torch.zeros(3), torch.zeros(2, 3).double(), torch.zeros(3, 2).t()):
        with pytest.raises(
            ValueError, match=r"x must be a torch.float32 CPU tensor of shape \(\d, 3\), contiguous; it is"
        ):
            linear(x, weight)
    with pytest.raises(ValueError, match="bias must be"):
        linear(torch.zeros(2, 3), weight, torch.zeros(3))
    for bad in (torch.zeros(4, 3).half(), torch.zeros(3, 4).t(), torch.zeros(4)):
        with pytest.raises(ValueError, match="weight must be"):
            pack(bad)


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_bfloat16_is_the_product_with_rounded_weights(num_tokens: int, rows: int, columns: int) -> None:
    x, weight, bias = tensors(num_tokens, rows, columns)
    rounded = weight.bfloat16().float()
    packed = pack(weight, torch.bfloat16)
    assert torch.equal(linear(x, packed, bias), linear(x, pack(rounded), bias))
    ids = torch.tensor([0, rows - 1, rows // 2])
    assert torch.equal(weight_rows(packed, ids), rounded[ids])
