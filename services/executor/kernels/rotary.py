"""Rotary position embedding of q and k, and the write of k and v into the paged cache.

Each pair `(x[i], x[i + D/2])` of a head turns by the angle of its position and pair:
`(a · cos - b · sin, b · cos + a · sin)`. Source: Su et al., "RoFormer", 2021; halves as in GPT-NeoX.

Layout: q [T, heads, D], k and v [T, kv_heads, D] float32, each token contiguous; positions and slot_mapping [T] int64;
key_cache [num_blocks, kv_heads, D, block_size], value_cache [num_blocks, kv_heads, block_size, D] float32, where slot
`block · block_size + offset` is `key_cache[block, :, :, offset]` and `value_cache[block, :, offset]`.
"""

from typing import NamedTuple

import torch
from numba import prange
from torch import Tensor

from services.executor.kernels.checks import check, check_rows
from services.executor.kernels.jit import Floats, Longs, inlined, kernel

_MIN_PARALLEL = 8
"""Tokens from which on threads are worth waking."""


class RotaryTable(NamedTuple):
    """The angles of every position and pair, [max positions, D / 2] float32 each."""

    cos: Tensor
    sin: Tensor


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    positions: Tensor,
    slot_mapping: Tensor,
    table: RotaryTable,
    key_cache: Tensor,
    value_cache: Tensor,
) -> Tensor:
    """q turned, [T, heads, D] in new memory; k turned and v as it is are in the cache afterwards."""
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, _, block_size = key_cache.shape
    check_rows("q", q, torch.float32, (num_tokens, num_heads, head_dim))
    check_rows("k", k, torch.float32, (num_tokens, num_kv_heads, head_dim))
    check_rows("v", v, torch.float32, (num_tokens, num_kv_heads, head_dim))
    check("positions", positions, torch.int64, (num_tokens,))
    check("slot_mapping", slot_mapping, torch.int64, (num_tokens,))
    check("cos", table.cos, torch.float32, (len(table.cos), head_dim // 2))
    check("sin", table.sin, torch.float32, table.cos.shape)
    check("key_cache", key_cache, torch.float32, (num_blocks, num_kv_heads, head_dim, block_size))
    check("value_cache", value_cache, torch.float32, (num_blocks, num_kv_heads, block_size, head_dim))
    out = torch.empty(q.shape)
    _rotate_and_store(
        q.numpy(),
        k.numpy(),
        v.numpy(),
        positions.numpy(),
        slot_mapping.numpy(),
        table.cos.numpy(),
        table.sin.numpy(),
        key_cache.numpy(),
        value_cache.numpy(),
        out.numpy(),
    )
    return out


def rotate_naive(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The turned heads of x [T, heads, D], in torch; cos and sin [T, D / 2] are those of the tokens' positions."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def store_naive(k: Tensor, v: Tensor, slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Write k and v [T, kv_heads, D] into the caches' slots, in torch."""
    block_size = value_cache.shape[2]
    key_cache[slot_mapping // block_size, :, :, slot_mapping % block_size] = k
    value_cache[slot_mapping // block_size, :, slot_mapping % block_size] = v


@inlined
def _one_token(
    q: Floats, k: Floats, v: Floats, cos: Floats, sin: Floats, keys: Floats, values: Floats, offset: int, out: Floats
) -> None:
    """One token: q, k, v and out [heads or kv_heads, D], its angles, and its block's keys and values."""
    half = len(cos)
    for head in range(len(q)):
        for i in range(half):
            a, b = q[head, i], q[head, half + i]
            out[head, i] = a * cos[i] - b * sin[i]
            out[head, half + i] = b * cos[i] + a * sin[i]
    for head in range(len(k)):
        for i in range(half):
            a, b = k[head, i], k[head, half + i]
            keys[head, i, offset] = a * cos[i] - b * sin[i]
            keys[head, half + i, offset] = b * cos[i] + a * sin[i]
        for i in range(2 * half):
            values[head, offset, i] = v[head, i]


@kernel
def _rotate_and_store(
    q: Floats,
    k: Floats,
    v: Floats,
    positions: Longs,
    slot_mapping: Longs,
    cos: Floats,
    sin: Floats,
    key_cache: Floats,
    value_cache: Floats,
    out: Floats,
) -> None:
    block_size = value_cache.shape[2]
    if len(q) < _MIN_PARALLEL:
        for t in range(len(q)):
            p, block, offset = positions[t], slot_mapping[t] // block_size, slot_mapping[t] % block_size
            _one_token(q[t], k[t], v[t], cos[p], sin[p], key_cache[block], value_cache[block], offset, out[t])
    else:
        for t in prange(len(q)):
            p, block, offset = positions[t], slot_mapping[t] // block_size, slot_mapping[t] % block_size
            _one_token(q[t], k[t], v[t], cos[p], sin[p], key_cache[block], value_cache[block], offset, out[t])
