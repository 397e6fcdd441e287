"""The gate of a gated MLP: `out = gate · sigmoid(gate) · up`.

Layout: gate_up [T, 2 · size] float32, gate in the first half of each row and up in the second; out [T, size] float32.
Source: Shazeer, "GLU Variants Improve Transformer", 2020 (SwiGLU).
"""

import torch
from torch import Tensor

from services.executor.kernels.checks import check


def silu_mul(gate_up: Tensor) -> Tensor:
    """The gated values, [T, size]."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must have an even number of columns, not {gate_up.shape[-1]}")
    check("gate_up", gate_up, torch.float32, (len(gate_up), gate_up.shape[-1]))
    return silu_mul_naive(gate_up)


def silu_mul_naive(gate_up: Tensor) -> Tensor:
    """The formula, in torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
