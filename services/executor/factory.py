"""Puts an executor's parts together. The only place that knows which backend goes with which device."""

import os
from pathlib import Path

from services.executor.attention.paged import PagedAttention
from services.executor.config import ExecutorConfig
from services.executor.kernels.jit import use_threads
from services.executor.kv_cache import KVCache, block_bytes, default_num_blocks, longest_sequence
from services.executor.layers.rotary import rotary_table
from services.executor.memory import free_bytes
from services.executor.model_runner import ModelRunner
from services.executor.models.registry import build_model
from services.executor.weights import Weights
from shared.messages import ExecutorCapacity
from shared.models.config import ModelConfig, load_config


def load(folder: Path, name: str, config: ExecutorConfig) -> ModelRunner:
    """A runner of the model in `folder`, its weights in memory.

    Raises ModelError for a folder that is not a whole model, ConfigError if the settings leave no room for one.
    """
    num_threads = config.threads or _num_usable_cores()
    use_threads(num_threads)
    model_config = load_config(folder)
    weights = Weights(folder)
    capacity = plan_capacity(name, model_config, config, free_bytes() - weights.num_bytes)
    table = rotary_table(model_config.rope, model_config.head_dim, capacity.max_model_len)
    attention = PagedAttention(table, model_config.head_dim**-0.5)
    with weights:
        model = build_model(model_config, weights, attention)
    kv_cache = KVCache(model_config, capacity.num_blocks, capacity.block_size)
    return ModelRunner(
        model,
        kv_cache,
        capacity=capacity,
        vocab_size=model_config.vocab_size,
        num_threads=num_threads,
        device="cpu",
    )


def plan_capacity(
    name: str, model_config: ModelConfig, config: ExecutorConfig, num_free_bytes: int
) -> ExecutorCapacity:
    """What an executor with these settings offers when so much memory is free beside its weights."""
    if config.kv_cache_mb:
        num_blocks = (config.kv_cache_mb << 20) // block_bytes(model_config, config.block_size)
    else:
        num_blocks = default_num_blocks(
            model_config, config.block_size, max_slots=config.max_slots, free_bytes=num_free_bytes
        )
    return ExecutorCapacity(
        model=name,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_slots=config.max_slots,
        max_model_len=longest_sequence(
            model_config, config.block_size, num_blocks=num_blocks, limit=config.max_model_len
        ),
        max_step_tokens=config.max_step_tokens,
    )


def _num_usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
