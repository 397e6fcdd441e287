"""What every kernel asks of its arguments. A wrong one is a bug of the caller, so it raises ValueError naming it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def check(name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Raise ValueError unless `tensor` is a contiguous CPU tensor of this dtype and shape."""
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(_explain(name, tensor, dtype, shape, "contiguous"))


def check_rows(name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """As `check`, but rows (first dimension) may lie apart, as in a slice of columns; each is contiguous itself."""
    if (
        tensor.dtype is not dtype
        or tensor.shape != shape
        or not tensor.is_cpu
        or not (tensor.is_contiguous() or tensor[0].is_contiguous())
    ):
        raise ValueError(_explain(name, tensor, dtype, shape, "with contiguous rows"))


def _explain(name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int], layout: str) -> str:
    return (
        f"{name} must be a {dtype} CPU tensor of shape {tuple(shape)}, {layout}; it is {tensor.dtype} on "
        f"{tensor.device}, shape {tuple(tensor.shape)}, strides {tensor.stride()}"
    )
