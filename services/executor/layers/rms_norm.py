"""Root-mean-square normalization with its weight."""

from typing import Self

from torch import Tensor

from services.executor.kernels.rms_norm import add_rms_norm, rms_norm
from services.executor.weights import Weights


class RMSNorm:
    """Normalizes the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    @classmethod
    def load(cls, weights: Weights, name: str, size: int, eps: float) -> Self:
        """Of the module `name`."""
        return cls(weights.load({f"{name}.weight": (size,)}), eps)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [T, …, size] normalized."""
        return rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds `x` to `residual` in place, both [T, size]; the sum normalized."""
        return add_rms_norm(x, residual, self._weight, self._eps)
