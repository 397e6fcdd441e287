"""Embedding: `out[t] = table[token_ids[t]]`.

Layout: token_ids [T] int64, table [vocabulary, hidden] float32, out [T, hidden] float32, all contiguous.
"""

import torch
from torch import Tensor

from services.executor.kernels.checks import check


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """The table's rows of these tokens, [T, hidden]. An id outside the vocabulary raises IndexError."""
    check("token_ids", token_ids, torch.int64, (len(token_ids),))
    check("table", table, torch.float32, (table.shape[0], table.shape[-1]))
    return embedding_naive(token_ids, table)


def embedding_naive(token_ids: Tensor, table: Tensor) -> Tensor:
    """The formula, in torch."""
    return table.index_select(0, token_ids)
