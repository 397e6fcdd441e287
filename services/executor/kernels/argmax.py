"""The likeliest token of each row: the lowest id among those with the largest logit.

Layout: logits [S, vocabulary] float32 contiguous, out [S] int64.
"""

import torch
from torch import Tensor

from services.executor.kernels.checks import check

NOT_FINITE = -1
"""Stands for the token of a row that holds a NaN or an infinity."""


def argmax(logits: Tensor) -> Tensor:
    """The ids, or NOT_FINITE for a row whose logits are not all numbers."""
    check("logits", logits, torch.float32, (len(logits), logits.shape[-1]))
    return argmax_naive(logits)


def argmax_naive(logits: Tensor) -> Tensor:
    """The formula, in torch, which promises no particular one among equals: hence the second search."""
    is_largest = logits == logits.amax(-1, keepdim=True)
    ids = torch.where(is_largest, torch.arange(logits.shape[-1]), logits.shape[-1]).amin(-1)
    return torch.where(logits.isfinite().all(-1), ids, NOT_FINITE)
