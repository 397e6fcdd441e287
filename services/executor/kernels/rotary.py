"""Rotary position embedding of q and k, and the write of k and v into the paged cache.

Each pair `(x[i], x[i + D/2])` of a head turns by the angle of its position and pair:
`(a · cos - b · sin, b · cos + a · sin)`. Source: Su et al., "RoFormer", 2021; halves as in GPT-NeoX.

Layout: q [T, heads, D], k and v [T, kv_heads, D] float32, each token contiguous; positions and slot_mapping [T] int64;
caches [num_blocks, kv_heads, block_size, D] float32, where slot
`block · block_size + offset` is `cache[block, :, offset]`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from services.executor.kernels.checks import check, check_rows


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
) -> None:
    """Turns q in place, and stores k turned and v as it is in the cache; `k` itself may be overwritten."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = key_cache.shape[1]
    check_rows("q", q, torch.float32, (num_tokens, num_heads, head_dim))
    check_rows("k", k, torch.float32, (num_tokens, num_kv_heads, head_dim))
    check_rows("v", v, torch.float32, (num_tokens, num_kv_heads, head_dim))
    check("positions", positions, torch.int64, (num_tokens,))
    check("slot_mapping", slot_mapping, torch.int64, (num_tokens,))
    check("cos", table.cos, torch.float32, (len(table.cos), head_dim // 2))
    check("sin", table.sin, torch.float32, table.cos.shape)
    check("key_cache", key_cache, torch.float32, (*key_cache.shape[:3], head_dim))
    check("value_cache", value_cache, torch.float32, key_cache.shape)
    cos, sin = table.cos[positions], table.sin[positions]
    q.copy_(rotate_naive(q, cos, sin))
    store_naive(rotate_naive(k, cos, sin), slot_mapping, key_cache)
    store_naive(v, slot_mapping, value_cache)


def rotate_naive(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The turned heads of x [T, heads, D], in torch; cos and sin [T, D / 2] are those of the tokens' positions."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def store_naive(x: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
    """Write x [T, kv_heads, D] into the cache's slots, in torch."""
    block_size = cache.shape[2]
    cache[slot_mapping // block_size, :, slot_mapping % block_size] = x
