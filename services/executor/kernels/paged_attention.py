"""Causal attention of several sequences over keys and values in blocks.

`out[t, h] = softmax(scale · q[t, h] · K[g]ᵀ) · V[g]` over the keys of t's sequence up to and including t, where
`g = h // (heads / kv_heads)`. Sequence r owns the queries `query_starts[r] … query_starts[r + 1] - 1`, which are the
last of its `context_lens[r]` tokens; its token i is in block `block_tables[r, i // block_size]`, at `i % block_size`.

Layout: q [T, heads, D] float32; key_cache [num_blocks, kv_heads, D, block_size], so that the keys of a block are the
vectors of a product's columns; value_cache [num_blocks, kv_heads, block_size, D] float32; query_starts [R + 1],
context_lens [R], block_tables [R, max_blocks] int32; out [T, heads, D] float32; all contiguous.

A piece of work is one kv head for a few queries, whose heads share the keys read. It goes over the keys in tiles of 64
from position 0 on, with a running maximum and sum (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018), so what a query computes depends on its own position alone and not on the chunk it came in.
Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023.
"""

import itertools
from typing import Final

import numpy as np
import torch
from numba import prange
from torch import Tensor

from services.executor.kernels.checks import check
from services.executor.kernels.exponential import exponential
from services.executor.kernels.jit import Floats, Ints, inlined, kernel
from services.executor.kernels.microkernel import make_product

_QUERIES: Final = 8
"""Queries in a piece of work: with 3 heads a group, 24 rows share each key that is read."""
_TILE: Final = 64
"""Keys between two adjustments of the running maximum."""

_scores = make_product(1, accumulate=False)
_add_values_64 = make_product(4, accumulate=True)
_add_values_16 = make_product(1, accumulate=True)


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
    """The attention's output, [T, heads, D]. Never uses what the cache holds beyond a sequence's length."""
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, _, block_size = key_cache.shape
    num_rows = len(context_lens)
    if num_heads % num_kv_heads:
        raise ValueError(f"q has {num_heads} heads, which is no multiple of the cache's {num_kv_heads}")
    check("q", q, torch.float32, (num_tokens, num_heads, head_dim))
    check("key_cache", key_cache, torch.float32, (num_blocks, num_kv_heads, head_dim, block_size))
    check("value_cache", value_cache, torch.float32, (num_blocks, num_kv_heads, block_size, head_dim))
    check("query_starts", query_starts, torch.int32, (num_rows + 1,))
    check("context_lens", context_lens, torch.int32, (num_rows,))
    check("block_tables", block_tables, torch.int32, (num_rows, block_tables.shape[-1]))
    out = torch.empty(q.shape)
    _paged_attention(
        q.numpy(),
        key_cache.numpy(),
        value_cache.numpy(),
        query_starts.numpy(),
        context_lens.numpy(),
        block_tables.numpy(),
        np.float32(scale),
        out.numpy(),
    )
    return out


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
    num_kv_heads, block_size = value_cache.shape[1:3]
    for row, (first, end) in enumerate(itertools.pairwise(query_starts.tolist())):
        length = int(context_lens[row])
        blocks = block_tables[row, : -(-length // block_size)]
        keys = key_cache[blocks].permute(1, 0, 3, 2).flatten(1, 2).double()  # [kv_heads, at least length, D]
        values = value_cache[blocks].transpose(0, 1).flatten(1, 2).double()
        for token in range(first, end):
            num_visible = length - (end - 1 - token)
            query = q[token].double().view(num_kv_heads, -1, q.shape[2])  # [kv_heads, group, D]
            scores = query @ keys[:, :num_visible].transpose(1, 2) * scale
            out[token] = (scores.softmax(-1) @ values[:, :num_visible]).flatten(0, 1)
    return out


@inlined
def _pieces(query_starts: Ints) -> Ints:
    """The work as (sequence, first query, number of queries), [pieces, 3]."""
    num_pieces = 0
    for sequence in range(len(query_starts) - 1):
        num_pieces += -(-(query_starts[sequence + 1] - query_starts[sequence]) // _QUERIES)
    pieces = np.empty((num_pieces, 3), np.int32)
    piece = 0
    for sequence in range(len(query_starts) - 1):
        end = query_starts[sequence + 1]
        for first in range(query_starts[sequence], end, _QUERIES):
            pieces[piece] = (sequence, first, min(_QUERIES, end - first))
            piece += 1
    return pieces


@inlined
def _score(q: Floats, num_rows: int, keys: Floats, table: Ints, head: int, first: int, count: int, s: Floats) -> None:
    """Scores of the `count` keys from position `first` on, into s [num_rows, _TILE]; reads the cache where it lies."""
    _, num_kv_heads, head_dim, block_size = keys.shape
    flat = keys.reshape(-1)
    for start in range(0, count, block_size):
        offset = (table[(first + start) // block_size] * num_kv_heads + head) * head_dim * block_size
        for lane in range(0, min(block_size, count - start), 16):
            at = start + lane
            _scores(q, 0, head_dim, flat, offset + lane, block_size, head_dim, s, at, _TILE, num_rows)


@inlined
def _score_gathered(
    q: Floats, num_rows: int, keys: Floats, table: Ints, head: int, first: int, count: int, s: Floats
) -> None:
    """The same for blocks that are no whole vectors: their keys are brought together first."""
    _, _, head_dim, block_size = keys.shape
    gathered = np.zeros(head_dim * _TILE, np.float32)
    for key in range(count):
        block, offset = table[(first + key) // block_size], (first + key) % block_size
        for i in range(head_dim):
            gathered[i * _TILE + key] = keys[block, head, i, offset]
    for at in range(0, count, 16):
        _scores(q, 0, head_dim, gathered, at, _TILE, head_dim, s, at, _TILE, num_rows)


@inlined
def _add_values(
    p: Floats, num_rows: int, values: Floats, table: Ints, head: int, first: int, count: int, sums: Floats
) -> None:
    """Adds the `count` values from position `first` on, weighted by p [num_rows, _TILE], to sums [num_rows, D]."""
    _, num_kv_heads, block_size, head_dim = values.shape
    flat = values.reshape(-1)
    num_whole = head_dim - head_dim % 16
    start = 0
    while start < count:  # a run of keys of one block at a time
        at = (first + start) % block_size
        num_keys = min(block_size - at, count - start)
        offset = ((table[(first + start) // block_size] * num_kv_heads + head) * block_size + at) * head_dim
        i = 0
        while num_whole - i >= 64:
            _add_values_64(p, start, _TILE, flat, offset + i, head_dim, num_keys, sums, i, head_dim, num_rows)
            i += 64
        while num_whole - i >= 16:
            _add_values_16(p, start, _TILE, flat, offset + i, head_dim, num_keys, sums, i, head_dim, num_rows)
            i += 16
        for row in range(num_rows):  # what is left of a head dimension that is no whole number of vectors
            for i in range(num_whole, head_dim):
                for key in range(num_keys):
                    sums[row * head_dim + i] += p[row * _TILE + start + key] * flat[offset + key * head_dim + i]
        start += num_keys


@inlined
def _weigh(s: Floats, num_visible: int, largest: Floats, totals: Floats, sums: Floats) -> None:
    """Scores s [_TILE] of one row become weights, those not visible 0; its maximum, total and sums are adjusted."""
    previous = largest[0]
    highest = previous
    for key in range(num_visible):
        highest = s[key] if s[key] > highest else highest
    for key in range(num_visible):
        s[key] = exponential(s[key] - highest)
    for key in range(num_visible, _TILE):
        s[key] = np.float32(0)
    if highest != previous:
        largest[0] = highest
        factor = exponential(previous - highest)
        for i in range(len(sums)):
            sums[i] *= factor
        for lane in range(16):
            totals[lane] *= factor
    for at in range(0, _TILE, 16):
        for lane in range(16):
            totals[lane] += s[at + lane]


@kernel
def _paged_attention(
    q: Floats,
    keys: Floats,
    values: Floats,
    query_starts: Ints,
    context_lens: Ints,
    block_tables: Ints,
    scale: np.float32,
    out: Floats,
) -> None:
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = values.shape[1:3]
    group = num_heads // num_kv_heads
    pieces = _pieces(query_starts)
    for work in prange(len(pieces) * num_kv_heads):
        head = work % num_kv_heads
        sequence, first_query, num_queries = pieces[work // num_kv_heads]
        num_rows = num_queries * group
        first_position = context_lens[sequence] - (query_starts[sequence + 1] - first_query)
        table = block_tables[sequence]
        scaled = np.empty(num_rows * head_dim, np.float32)
        for row in range(num_rows):
            for i in range(head_dim):
                scaled[row * head_dim + i] = q[first_query + row // group, head * group + row % group, i] * scale
        s = np.empty(num_rows * _TILE, np.float32)
        sums = np.zeros(num_rows * head_dim, np.float32)
        totals = np.zeros((num_rows, 16), np.float32)
        largest = np.full((num_rows, 1), -np.inf, np.float32)
        num_seen = first_position + num_queries
        for first in range(0, num_seen, _TILE):
            count = min(_TILE, num_seen - first)
            if block_size in (16, 32, 64):
                _score(scaled, num_rows, keys, table, head, first, count, s)
            else:
                _score_gathered(scaled, num_rows, keys, table, head, first, count, s)
            for row in range(num_rows):
                num_visible = max(0, min(count, first_position + row // group + 1 - first))
                row_sums = sums[row * head_dim : (row + 1) * head_dim]
                _weigh(s[row * _TILE : (row + 1) * _TILE], num_visible, largest[row], totals[row], row_sums)
            _add_values(s, num_rows, values, table, head, first, count, sums)
        for row in range(num_rows):
            total = np.float32(0)
            for lane in range(16):
                total += totals[row, lane]
            for i in range(head_dim):
                out[first_query + row // group, head * group + row % group, i] = sums[row * head_dim + i] / total
