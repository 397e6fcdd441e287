"""The memory for keys and values: its tensors, and how many blocks fit into how many bytes.

Owns no block's meaning: who uses which block is the scheduler's. Layout of each layer's keys:
[num_blocks, kv_heads, head_dim, block_size], and of its values: [num_blocks, kv_heads, block_size, head_dim], so that
both are the right-hand side of a product as they lie: queries · keys, and weights · values. One head's part of a block
is one run of memory (4 KiB for 16 tokens of 64 float32 numbers), what a thread of a decode step reads; a whole block is
one too, what a copy moves.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from services.executor.kernels.cached_attention import TOKENS, Kind, record_bytes
from services.executor.memory import untouched
from shared.errors import ConfigError
from shared.models.config import ModelConfig

_DEFAULT_SHARE: Final = 0.25
_MAX_DEFAULT_BYTES: Final = 4096 << 20
_MIN_DEFAULT_BYTES: Final = 64 << 20
_MAX_DEFAULT_FILLINGS: Final = 2
"""By default no more blocks than all slots could fill twice: once for what runs, once for reusable prefixes."""


class LayerCache(NamedTuple):
    """One layer's part, float32."""

    key: Tensor
    """[num_blocks, kv_heads, head_dim, block_size]."""
    value: Tensor
    """[num_blocks, kv_heads, block_size, head_dim]."""


class Cache(Protocol):
    """What a step does to any cache by itself; the rest is between a model and its own kind."""

    @property
    def num_bytes(self) -> int:
        """The memory that it takes when every block has been written."""
        ...

    def copy_blocks(self, pairs: Sequence[int]) -> None:
        """Copy whole blocks in all layers, one pair after the other: source, destination, source, destination, …"""
        ...


class KVCache:
    """The KV tensors of all layers. Memory is touched only where blocks are written."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int) -> None:
        key = (num_blocks, config.num_kv_heads, config.head_dim, block_size)
        value = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self.layers: Final = tuple(LayerCache(torch.empty(key), torch.empty(value)) for _ in range(config.num_layers))

    @property
    def num_bytes(self) -> int:
        """The memory that it takes when every block has been written."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)

    def copy_blocks(self, pairs: Sequence[int]) -> None:
        """Copy whole blocks in all layers, one pair after the other: source, destination, source, destination, …"""
        for source, destination in zip(pairs[::2], pairs[1::2], strict=True):
            for layer in self.layers:
                layer.key[destination] = layer.key[source]
                layer.value[destination] = layer.value[source]


class RecordCache:
    """The cache of integer models: records of 16 tokens of a kv head, as `kernels.cached_attention` lays them out."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, kind: Kind) -> None:
        """`block_size` is a multiple of 16."""
        self.kind: Final = kind
        size = (num_blocks, config.num_kv_heads, block_size // TOKENS, record_bytes(kind, config.head_dim))
        self.layers: Final = tuple(
            torch.frombuffer(untouched(math.prod(size)), dtype=torch.uint8).view(size) for _ in range(config.num_layers)
        )

    @property
    def num_bytes(self) -> int:
        """As `KVCache.num_bytes`."""
        return sum(layer.nbytes for layer in self.layers)

    def copy_blocks(self, pairs: Sequence[int]) -> None:
        """As `KVCache.copy_blocks`."""
        for source, destination in zip(pairs[::2], pairs[1::2], strict=True):
            for layer in self.layers:
                layer[destination] = layer[source]


def block_bytes(config: ModelConfig, block_size: int, kind: Kind = "float32") -> int:
    """Bytes that one block takes in all layers together."""
    size = block_size * record_bytes(kind, config.head_dim) // TOKENS
    return config.num_layers * config.num_kv_heads * size


def default_num_blocks(
    config: ModelConfig, block_size: int, *, max_slots: int, free_bytes: int, kind: Kind = "float32"
) -> int:
    """How many blocks to have when nobody said: a share of the free memory, within bounds, none that can't be used."""
    share = min(max(int(free_bytes * _DEFAULT_SHARE), _MIN_DEFAULT_BYTES), _MAX_DEFAULT_BYTES)
    usable = _MAX_DEFAULT_FILLINGS * max_slots * -(-config.max_model_len // block_size)
    return min(share // block_bytes(config, block_size, kind), usable)


def longest_sequence(
    config: ModelConfig, block_size: int, *, num_blocks: int, limit: int, kind: Kind = "float32"
) -> int:
    """Tokens that one sequence can have: the model's limit, the operator's if not 0, and what the blocks hold.

    Raises ConfigError if that leaves no room for a prompt and an answer.
    """
    if num_blocks < 1:
        size_mb = block_bytes(config, block_size, kind) / (1 << 20)
        raise ConfigError(f"SHOAL_EXECUTOR_KV_CACHE_MB is too small: one block of this model takes {size_mb:.1f} MiB")
    longest = min(config.max_model_len, num_blocks * block_size, limit or config.max_model_len)
    if longest < 2:
        raise ConfigError(
            f"SHOAL_EXECUTOR_MAX_MODEL_LEN={limit} and {num_blocks} blocks of {block_size} tokens leave room for "
            f"{longest} token; a prompt and its answer need two at least"
        )
    return longest
