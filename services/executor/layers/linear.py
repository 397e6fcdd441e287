"""A matrix product whose weight may be several of the model's below each other, so that one product serves them all."""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from services.executor.kernels.linear import linear, pack, weight_rows
from services.executor.weights import Weights


class Linear:
    """`x · weightᵀ + bias` on [T, columns] float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.float32) -> None:
        """The weight is kept in `dtype`, float32 or bfloat16."""
        self._weight = pack(weight, dtype)
        self._bias = bias

    @classmethod
    def load(cls, weights: Weights, parts: Mapping[str, int], columns: int, *, bias: bool = False) -> Self:
        """Of the modules `parts`, each with its number of output rows, in this order."""
        return cls(
            weights.load({f"{name}.weight": (rows, columns) for name, rows in parts.items()}),
            weights.load({f"{name}.bias": (rows,) for name, rows in parts.items()}) if bias else None,
            weights.dtype,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, sum of the parts' rows]."""
        return linear(x, self._weight, self._bias)

    def rows(self, row_ids: Tensor) -> Tensor:
        """These rows of the weight, [T, columns]: what an embedding does that shares its table with this product."""
        return weight_rows(self._weight, row_ids)
