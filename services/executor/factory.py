"""Puts an executor's parts together. The only place that knows which backend goes with which device and format."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from services.executor.attention.paged import PagedAttention
from services.executor.config import ExecutorConfig
from services.executor.formats import choose_formats
from services.executor.kernels.cached_attention import Kind
from services.executor.kernels.jit import USER_CACHE, use_threads
from services.executor.kernels.vectors import dot_instruction
from services.executor.kv_cache import Cache, KVCache, RecordCache, block_bytes, default_num_blocks, longest_sequence
from services.executor.layers.rotary import rotary_table
from services.executor.memory import free_bytes
from services.executor.model_runner import ModelRunner
from services.executor.models.integer import IntegerModel
from services.executor.models.packing import Array, Arrays, Format, packed_arrays
from services.executor.models.registry import Model, build_model
from services.executor.packed import PackedWeights, in_memory
from services.executor.weights import Weights
from shared.messages import ExecutorCapacity
from shared.models.config import ModelConfig, load_config

log = logging.getLogger(__name__)


class LoadedModel(NamedTuple):
    """A model with its weights, the cache that it reads and writes, and what both have room for."""

    model: Model
    kv_cache: Cache
    capacity: ExecutorCapacity
    config: ModelConfig
    num_threads: int


def load(folder: Path, name: str, config: ExecutorConfig) -> ModelRunner:
    """A runner of the model in `folder`, its weights in memory. Raises as `load_model` does."""
    loaded = load_model(folder, name, config)
    return ModelRunner(
        loaded.model,
        loaded.kv_cache,
        capacity=loaded.capacity,
        vocab_size=loaded.config.vocab_size,
        num_threads=loaded.num_threads,
        device="cpu",
    )


def load_model(folder: Path, name: str, config: ExecutorConfig) -> LoadedModel:
    """The model in `folder` as `config` wants it.

    Raises ModelError for a folder that is not a whole model, ConfigError if the settings leave no room for one or ask
    for a format that it cannot have.
    """
    num_threads = config.threads or _num_usable_cores()
    use_threads(num_threads)
    model_config = load_config(folder)
    formats = choose_formats(config, model_config, dot_instruction())
    num_free_bytes = free_bytes()
    kv_cache: Cache
    model: Model
    if formats.weights == "float32" or formats.weights == "bfloat16":
        with Weights(folder, torch.bfloat16 if formats.weights == "bfloat16" else torch.float32) as weights:
            capacity = plan_capacity(name, model_config, config, num_free_bytes - weights.num_bytes, formats.cache)
            table = rotary_table(model_config.rope, model_config.head_dim, capacity.max_model_len)
            kv_cache = KVCache(model_config, capacity.num_blocks, capacity.block_size)
            model = build_model(model_config, weights, PagedAttention(table, model_config.head_dim**-0.5))
    else:
        arrays = _packed(folder, model_config, formats.weights, num_threads, keep=config.keep_packed)
        num_bytes = sum(array.nbytes for array in arrays.values())
        capacity = plan_capacity(name, model_config, config, num_free_bytes - num_bytes, formats.cache)
        table = rotary_table(model_config.rope, model_config.head_dim, capacity.max_model_len)
        kv_cache = RecordCache(model_config, capacity.num_blocks, capacity.block_size, formats.cache)
        model = IntegerModel(
            model_config,
            arrays,
            table,
            kv_cache,
            weight_format=formats.weights,
            capacity=capacity,
            num_threads=num_threads,
        )
    log.info(
        "number formats",
        extra={"weights": formats.weights, "kv_cache": formats.cache, "reason": formats.reason, "threads": num_threads},
    )
    return LoadedModel(model, kv_cache, capacity, model_config, num_threads)


def _packed(folder: Path, config: ModelConfig, weight_format: Format, num_threads: int, *, keep: bool) -> Arrays:
    """The weights as integer kernels read them: mapped if they are kept from an earlier start, else made now."""
    kept = PackedWeights(folder, weight_format, USER_CACHE)
    if keep and (found := kept.find()) is not None:
        return found

    def pack() -> Iterator[tuple[str, Array]]:
        with Weights(folder) as weights:
            yield from packed_arrays(config, weights, weight_format, num_threads)

    return kept.keep(pack, Weights(folder).num_bytes // 2) if keep else in_memory(pack())


def plan_capacity(
    name: str, model_config: ModelConfig, config: ExecutorConfig, num_free_bytes: int, kind: Kind = "float32"
) -> ExecutorCapacity:
    """What an executor with these settings offers when so much memory is free beside its weights."""
    if config.kv_cache_mb:
        num_blocks = (config.kv_cache_mb << 20) // block_bytes(model_config, config.block_size, kind)
    else:
        num_blocks = default_num_blocks(
            model_config, config.block_size, max_slots=config.max_slots, free_bytes=num_free_bytes, kind=kind
        )
    return ExecutorCapacity(
        model=name,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_slots=config.max_slots,
        max_model_len=longest_sequence(
            model_config, config.block_size, num_blocks=num_blocks, limit=config.max_model_len, kind=kind
        ),
        max_step_tokens=config.max_step_tokens,
        max_draft_tokens=config.max_draft_tokens,
    )


def _num_usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
