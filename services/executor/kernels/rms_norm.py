"""Root-mean-square normalization: `out = x / sqrt(mean(x²) + eps) · weight`, over the last dimension.

Layout: x [T, …, size] float32, each row contiguous, weight [size] float32, out like x, contiguous. The squares are
added up in 16 lanes, then the lanes in order.
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019.
"""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from services.executor.kernels.checks import check, check_rows
from services.executor.kernels.jit import Floats, inlined, kernel

_MIN_PARALLEL = 16_384
"""Numbers from which on threads are worth waking: one thread normalizes this many in about 5 µs."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` normalized and scaled, in new memory."""
    check("weight", weight, torch.float32, (x.shape[-1],))
    check_rows("x", x, torch.float32, x.shape)
    out = torch.empty(x.shape)
    _rms_norm(_matrix(x), weight.numpy(), np.float32(eps), _matrix(out))
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds `x` to `residual` in place; the sum normalized and scaled, in new memory. Both are [T, size]."""
    check("weight", weight, torch.float32, (x.shape[-1],))
    check("x", x, torch.float32, (len(x), weight.shape[0]))
    check("residual", residual, torch.float32, (len(x), weight.shape[0]))
    out = torch.empty(x.shape)
    _add_rms_norm(x.numpy(), residual.numpy(), weight.numpy(), np.float32(eps), out.numpy())
    return out


def rms_norm_naive(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula, in torch."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def add_rms_norm_naive(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula with the addition before it, in torch."""
    return rms_norm_naive(residual.add_(x), weight, eps)


def _matrix(x: Tensor) -> Floats:
    """x [T, …, size] as [rows, size], its memory shared if its rows lie evenly."""
    return x.flatten(0, -2).numpy()


@inlined
def _normalize(x: Floats, weight: Floats, eps: np.float32, out: Floats) -> None:
    """One row."""
    size = len(x)
    lanes = np.zeros(16, np.float32)
    num_whole = size - size % 16
    for first in range(0, num_whole, 16):
        for lane in range(16):
            lanes[lane] += x[first + lane] * x[first + lane]
    for lane in range(size - num_whole):
        lanes[lane] += x[num_whole + lane] * x[num_whole + lane]
    total = np.float32(0)
    for lane in range(16):
        total += lanes[lane]
    factor = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        out[i] = x[i] * factor * weight[i]


@kernel
def _rms_norm(x: Floats, weight: Floats, eps: np.float32, out: Floats) -> None:
    if x.size < _MIN_PARALLEL:
        for row in range(len(x)):
            _normalize(x[row], weight, eps, out[row])
    else:
        for row in prange(len(x)):
            _normalize(x[row], weight, eps, out[row])


@inlined
def _add(x: Floats, residual: Floats) -> None:
    """One row."""
    for i in range(len(x)):
        residual[i] += x[i]


@kernel
def _add_rms_norm(x: Floats, residual: Floats, weight: Floats, eps: np.float32, out: Floats) -> None:
    if x.size < _MIN_PARALLEL:
        for row in range(len(x)):
            _add(x[row], residual[row])
            _normalize(residual[row], weight, eps, out[row])
    else:
        for row in prange(len(x)):
            _add(x[row], residual[row])
            _normalize(residual[row], weight, eps, out[row])
