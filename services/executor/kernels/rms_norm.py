"""Root-mean-square normalization: `out = x / sqrt(mean(x²) + eps) · weight`, over the last dimension.

Layout: x [T, …, size] float32, each row contiguous, weight [size] float32, out like x, contiguous.
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019.
"""

import torch
from torch import Tensor

from services.executor.kernels.checks import check, check_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` normalized and scaled, in new memory."""
    check("weight", weight, torch.float32, (x.shape[-1],))
    check_rows("x", x, torch.float32, x.shape)
    return rms_norm_naive(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds `x` to `residual` in place; the sum normalized and scaled, in new memory. Both are [T, size]."""
    check("weight", weight, torch.float32, (x.shape[-1],))
    check("x", x, torch.float32, (len(x), weight.shape[0]))
    check("residual", residual, torch.float32, (len(x), weight.shape[0]))
    return add_rms_norm_naive(x, residual, weight, eps)


def rms_norm_naive(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula, in torch."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def add_rms_norm_naive(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula with the addition before it, in torch."""
    return rms_norm_naive(residual.add_(x), weight, eps)
