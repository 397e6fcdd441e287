"""The likeliest token of each row: the lowest id among those with the largest logit.

Layout: logits [S, vocabulary] float32 contiguous, out [S] int64. Runs on one thread: a parallel loop would leave
threads behind that wait for the next one by spinning, on cores that others compute on (a step of one row took 8 ms with
such a thread, 4 ms without).
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.executor.kernels.checks import check
from services.executor.kernels.jit import Floats, Longs, single
from services.executor.kernels.vectors import Vectors, kernel_part

NOT_FINITE = -1
"""Stands for the token of a row that holds a NaN or an infinity."""


def argmax(logits: Tensor) -> Tensor:
    """The ids, or NOT_FINITE for a row whose logits are not all numbers."""
    check("logits", logits, torch.float32, (len(logits), logits.shape[-1]))
    out = torch.empty(len(logits), dtype=torch.int64)
    _argmax(logits.numpy(), out.numpy())
    return out


def argmax_naive(logits: Tensor) -> Tensor:
    """The formula, in torch, which promises no particular one among equals: hence the second search."""
    is_largest = logits == logits.amax(-1, keepdim=True)
    ids = torch.where(is_largest, torch.arange(logits.shape[-1]), logits.shape[-1]).amin(-1)
    return torch.where(logits.isfinite().all(-1), ids, NOT_FINITE)


@kernel_part
def _largest(v: Vectors, row: Any, num_vectors: Any, largest: Any) -> None:
    """The largest of a row's whole vectors, or what is no number if one of them is none or infinite."""
    with v.loop(num_vectors, v.constant(-np.inf), v.zeros()) as loop:
        part = v.load_floats(v.add(row, v.mul(loop.index, 64)))
        loop.carry(v.larger(loop.carried[0], part), v.fma(part, v.zeros(), loop.carried[1]))
    best, doubt = loop.results
    v.store(v.first_lane(v.sum(v.broadcast(v.largest_lane(best)), v.broadcast(v.lane_sum(doubt)))), largest)


@single
def _argmax(logits: Floats, out: Longs) -> None:
    largest = np.empty(1, np.float32)
    size = logits.shape[1]
    for row in range(len(logits)):
        best = logits[row, 0] * np.float32(0) + logits[row, 0]
        if size >= 16:
            _largest(logits.ctypes.data + row * size * 4, size // 16, largest.ctypes.data)
            best = largest[0]
        for token_id in range(size - size % 16, size):
            x = logits[row, token_id]
            best = max(best, x) + x * np.float32(0)  # NaN if x is no finite number
        out[row] = NOT_FINITE
        if best - best == 0:
            token_id = 0
            while logits[row, token_id] != best:
                token_id += 1
            out[row] = token_id
