"""Causal attention of several sequences over keys and values in blocks.

`out[t, h] = softmax(scale · q[t, h] · K[g]ᵀ) · V[g]` over the keys of t's sequence up to and including t, where
`g = h // (heads / kv_heads)`. Sequence r owns the queries `query_starts[r] … query_starts[r + 1] - 1`, which are the
last of its `context_lens[r]` tokens; its token i is `cache[block_tables[r, i // block_size], :, i % block_size]`.

Layout: q [T, heads, D] float32, each token contiguous; caches [num_blocks, kv_heads, block_size, D] float32 contiguous;
query_starts [R + 1], context_lens [R], block_tables [R, max_blocks] int32; out [T, heads, D] float32 contiguous.
Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023.
"""

import itertools

import torch
from torch import Tensor

from services.executor.kernels.checks import check, check_rows


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
) -> Tensor:
    """The attention's output, [T, heads, D]. Never reads the cache beyond a sequence's length."""
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, block_size = key_cache.shape[:3]
    num_rows = len(context_lens)
    if num_heads % num_kv_heads:
        raise ValueError(f"q has {num_heads} heads, which is no multiple of the cache's {num_kv_heads}")
    check_rows("q", q, torch.float32, (num_tokens, num_heads, head_dim))
    check("key_cache", key_cache, torch.float32, (num_blocks, num_kv_heads, block_size, head_dim))
    check("value_cache", value_cache, torch.float32, key_cache.shape)
    check("query_starts", query_starts, torch.int32, (num_rows + 1,))
    check("context_lens", context_lens, torch.int32, (num_rows,))
    check("block_tables", block_tables, torch.int32, (num_rows, block_tables.shape[-1]))
    return paged_attention_naive(
        q,
        key_cache,
        value_cache,
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=block_tables,
        scale=scale,
    )


def paged_attention_naive(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
) -> Tensor:
    """The formula, in torch and float64: one query at a time, so that each depends on what it sees alone."""
    out = torch.empty(q.shape, dtype=q.dtype)
    num_kv_heads, block_size = key_cache.shape[1:3]
    for row, (first, end) in enumerate(itertools.pairwise(query_starts.tolist())):
        length = int(context_lens[row])
        blocks = block_tables[row, : -(-length // block_size)]
        keys = key_cache[blocks].transpose(0, 1).flatten(1, 2).double()  # [kv_heads, at least length, D]
        values = value_cache[blocks].transpose(0, 1).flatten(1, 2).double()
        for token in range(first, end):
            num_visible = length - (end - 1 - token)
            query = q[token].double().view(num_kv_heads, -1, q.shape[2])  # [kv_heads, group, D]
            scores = query @ keys[:, :num_visible].transpose(1, 2) * scale
            out[token] = (scores.softmax(-1) @ values[:, :num_visible]).flatten(0, 1)
    return out
