"""The gate of a gated MLP: `out = gate · sigmoid(gate) · up`.

Layout: gate_up [T, 2 · size] float32, gate in the first half of each row and up in the second; out [T, size] float32.
Source: Shazeer, "GLU Variants Improve Transformer", 2020 (SwiGLU).
"""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from services.executor.kernels.checks import check
from services.executor.kernels.exponential import exponential
from services.executor.kernels.jit import Floats, inlined, kernel

_MIN_PARALLEL = 4096
"""Results from which on threads are worth waking: one thread makes this many in about 5 µs."""


def silu_mul(gate_up: Tensor) -> Tensor:
    """The gated values, [T, size]."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must have an even number of columns, not {gate_up.shape[-1]}")
    check("gate_up", gate_up, torch.float32, (len(gate_up), gate_up.shape[-1]))
    out = torch.empty(len(gate_up), gate_up.shape[-1] // 2)
    _silu_mul(gate_up.numpy(), out.numpy())
    return out


def silu_mul_naive(gate_up: Tensor) -> Tensor:
    """The formula, in torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@inlined
def _gate(gate: Floats, up: Floats, out: Floats) -> None:
    """One row, or a part of one."""
    one = np.float32(1)
    for i in range(len(out)):
        out[i] = gate[i] / (one + exponential(-gate[i])) * up[i]


@kernel
def _silu_mul(gate_up: Floats, out: Floats) -> None:
    num_tokens, size = out.shape
    if out.size < _MIN_PARALLEL:
        for token in range(num_tokens):
            _gate(gate_up[token, :size], gate_up[token, size:], out[token])
    elif num_tokens > 1:
        for token in prange(num_tokens):
            _gate(gate_up[token, :size], gate_up[token, size:], out[token])
    else:
        for part in prange(-(-size // 1024)):
            first, end = part * 1024, min(size, part * 1024 + 1024)
            _gate(gate_up[0, first:end], gate_up[0, size + first : size + end], out[0, first:end])
