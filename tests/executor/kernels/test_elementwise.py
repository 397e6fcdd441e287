"""The kernels that work on each token by itself: norm, gate, embedding, argmax."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from services.executor.kernels.argmax import NOT_FINITE, argmax
from services.executor.kernels.embedding import embedding
from services.executor.kernels.rms_norm import add_rms_norm, rms_norm
from services.executor.kernels.silu_mul import silu_mul

# Each result is a handful of float32 operations away from the float64 truth.
TOLERANCE: dict[str, Any] = {"rtol": 2e-6, "atol": 2e-6}
SIZES = [1, 2, 33, 96, 576, 1537]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def norm_truth(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    values = x.double().numpy()
    return torch.from_numpy(values / np.sqrt((values**2).mean(-1, keepdims=True) + eps)) * weight.double()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_norm_is_the_formula(size: int, eps: float) -> None:
    x, weight = noise(7, size), noise(size, seed=1)
    torch.testing.assert_close(rms_norm(x, weight, eps).double(), norm_truth(x, weight, eps), **TOLERANCE)


def test_norm_of_heads_that_lie_in_a_larger_row() -> None:
    heads, weight = noise(5, 6, 16), noise(16, seed=1)
    q, k, _ = torch.split(heads, [3, 2, 1], dim=1)
    for part in (q, k):
        found = rms_norm(part, weight, 1e-6)
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), norm_truth(part, weight, 1e-6), **TOLERANCE)


@pytest.mark.parametrize("size", SIZES)
def test_norm_after_an_addition_keeps_the_sum(size: int) -> None:
    x, residual, weight = noise(7, size), noise(7, size, seed=1), noise(size, seed=2)
    expected_sum = x + residual
    found = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected_sum)
    torch.testing.assert_close(found.double(), norm_truth(expected_sum, weight, 1e-5), **TOLERANCE)
    assert torch.equal(found, rms_norm(expected_sum, weight, 1e-5))


@pytest.mark.parametrize("size", SIZES)
def test_gate_is_the_formula(size: int) -> None:
    gate_up = noise(7, 2 * size) * 5
    gate, up = gate_up[:, :size].double().numpy(), gate_up[:, size:].double().numpy()
    expected = torch.from_numpy(gate / (1 + np.exp(-gate)) * up)
    torch.testing.assert_close(silu_mul(gate_up).double(), expected, **TOLERANCE)


def test_gate_of_large_numbers_does_not_overflow() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 3.0, 3.0]])
    assert silu_mul(gate_up).tolist() == [[0.0, 600.0]]


def test_embedding_takes_rows() -> None:
    table = noise(9, 5)
    ids = torch.tensor([3, 0, 3, 8])
    assert torch.equal(embedding(ids, table), torch.stack([table[3], table[0], table[3], table[8]]))
    with pytest.raises(IndexError):
        embedding(torch.tensor([9]), table)


@pytest.mark.parametrize("size", [1, 5, 384, 49152])
def test_argmax_is_the_first_of_the_largest(size: int) -> None:
    logits = noise(6, size).round()  # many ties
    assert argmax(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_argmax_marks_rows_that_are_not_finite(value: float) -> None:
    logits = noise(3, 40)
    logits[1, 39] = value
    found = argmax(logits).tolist()
    assert found[1] == NOT_FINITE
    assert found[0] == logits[0].tolist().index(logits[0].max())
    assert NOT_FINITE not in (found[0], found[2])


KERNELS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rms_norm": lambda x: rms_norm(x, torch.linspace(1, 2, x.shape[1]), 1e-5),
    "add_rms_norm": lambda x: add_rms_norm(x, x * 0.5, torch.linspace(1, 2, x.shape[1]), 1e-5),
    "silu_mul": silu_mul,
    "argmax": argmax,
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("size", [2, 34, 576, 3072, 49152])
def test_a_rows_bits_do_not_depend_on_other_rows(name: str, size: int) -> None:
    kernel, x = KERNELS[name], noise(40, size)
    together = kernel(x)
    for first, last in ((0, 1), (3, 4), (5, 12), (39, 40), (1, 40)):
        assert torch.equal(kernel(x[first:last].clone()), together[first:last])


def test_no_rows_give_no_rows() -> None:
    for name, kernel in KERNELS.items():
        assert len(kernel(torch.empty(0, 8))) == 0, name
    assert embedding(torch.empty(0, dtype=torch.int64), torch.zeros(3, 2)).shape == (0, 2)


WRONG: dict[str, tuple[str, Callable[[], object]]] = {
    "norm weight of another size": ("weight", lambda: rms_norm(torch.zeros(2, 4), torch.zeros(3), 1e-5)),
    "norm of other numbers": ("x", lambda: rms_norm(torch.zeros(2, 4).double(), torch.zeros(4), 1e-5)),
    "norm of scattered rows": ("x", lambda: rms_norm(torch.zeros(4, 2).t(), torch.zeros(4), 1e-5)),
    "residual of another shape": (
        "residual",
        lambda: add_rms_norm(torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(4), 1e-5),
    ),
    "gate without up": ("gate_up", lambda: silu_mul(torch.zeros(2, 3))),
    "gate of other numbers": ("gate_up", lambda: silu_mul(torch.zeros(2, 4).half())),
    "ids of other numbers": ("token_ids", lambda: embedding(torch.zeros(2, dtype=torch.int32), torch.zeros(3, 4))),
    "table of other numbers": ("table", lambda: embedding(torch.zeros(2, dtype=torch.int64), torch.zeros(3, 4).half())),
    "logits of other numbers": ("logits", lambda: argmax(torch.zeros(2, 4).double())),
    "logits of one dimension": ("logits", lambda: argmax(torch.zeros(4))),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_named(what: str) -> None:
    name, call = WRONG[what]
    with pytest.raises(ValueError, match=f"^{name} must"):
        call()
