"""Each kernel against the naive twin that stands beside it, on odd shapes and with poison where nothing may be read."""

from typing import Any

import pytest
import torch

from services.executor.kernels.argmax import argmax, argmax_naive
from services.executor.kernels.embedding import embedding, embedding_naive
from services.executor.kernels.linear import linear, linear_naive, pack
from services.executor.kernels.rms_norm import add_rms_norm, add_rms_norm_naive, rms_norm, rms_norm_naive
from services.executor.kernels.rotary import RotaryTable, rotate_and_store, rotate_naive, store_naive
from services.executor.kernels.silu_mul import silu_mul, silu_mul_naive

ROWS = [1, 2, 7, 33]
SIZES = [2, 16, 34, 576]
# Both round to float32 in places of their own; sums have at most some hundred terms of about 1.
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_elementwise_kernels_do_what_their_twins_do(rows: int, size: int) -> None:
    x, other, weight = noise(rows, size), noise(rows, size, seed=1), noise(size, seed=2)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm_naive(x, weight, 1e-5), **CLOSE)
    torch.testing.assert_close(silu_mul(x * 5), silu_mul_naive(x * 5), **CLOSE)
    residuals = other.clone(), other.clone()
    found, expected = add_rms_norm(x, residuals[0], weight, 1e-5), add_rms_norm_naive(x, residuals[1], weight, 1e-5)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert torch.equal(*residuals)
    assert torch.equal(argmax(x.round()), argmax_naive(x.round()))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_argmax_marks_what_its_twin_marks(value: float) -> None:
    logits = noise(5, 40)
    logits[2, 17] = value
    assert torch.equal(argmax(logits), argmax_naive(logits))


def test_embedding_and_linear_do_what_their_twins_do() -> None:
    table, ids = noise(70, 24), torch.tensor([0, 69, 3, 3])
    assert torch.equal(embedding(ids, table), embedding_naive(ids, table))
    x, bias = noise(9, 24, seed=1), noise(70, seed=2)
    torch.testing.assert_close(linear(x, pack(table), bias), linear_naive(x, table, bias), **CLOSE)


@pytest.mark.parametrize("num_tokens", [1, 5, 20])
def test_rotation_and_storing_do_what_their_twins_do(num_tokens: int) -> None:
    heads, kv_heads, head_dim, block_size = 4, 2, 24, 5
    q, k, v = (noise(num_tokens, n, head_dim, seed=n) for n in (heads, kv_heads, kv_heads))
    positions = torch.arange(num_tokens) + 3
    slots = torch.randperm(8 * block_size, generator=torch.Generator().manual_seed(1))[:num_tokens]
    angles = noise(64, head_dim // 2, seed=9)
    table = RotaryTable(angles.cos(), angles.sin())
    caches = [
        (
            torch.full((8, kv_heads, head_dim, block_size), torch.nan),
            torch.full((8, kv_heads, block_size, head_dim), torch.nan),
        )
        for _ in range(2)
    ]
    turned = rotate_and_store(
        q, k, v, positions=positions, slot_mapping=slots, table=table, key_cache=caches[0][0], value_cache=caches[0][1]
    )
    cos, sin = table.cos[positions], table.sin[positions]
    store_naive(rotate_naive(k, cos, sin), v, slots, *caches[1])
    torch.testing.assert_close(turned, rotate_naive(q, cos, sin), **CLOSE)
    for found, expected in zip(*caches, strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True, **CLOSE)
