"""What an executor offers: blocks from bytes, the longest sequence, and how much memory there is."""

import dataclasses
from pathlib import Path

import pytest
import torch

from services.executor.config import ExecutorConfig
from services.executor.factory import plan_capacity
from services.executor.kv_cache import KVCache, block_bytes
from services.executor.memory import free_bytes
from shared.errors import ConfigError
from shared.models.config import ModelConfig, load_config
from tests.executor.conftest import TinyFolder

GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture
def smollm2(tiny_folder: TinyFolder) -> ModelConfig:
    """The shape of SmolLM2-135M: 46,080 bytes of float32 keys and values a token."""
    tiny = load_config(tiny_folder())
    return dataclasses.replace(tiny, num_layers=30, num_kv_heads=3, head_dim=64, max_model_len=8192)


def test_a_block_takes_what_its_tensors_take(tiny_folder: TinyFolder) -> None:
    config = load_config(tiny_folder())
    cache = KVCache(config, num_blocks=5, block_size=4)
    assert sum(part.nbytes for layer in cache.layers for part in layer) == 5 * block_bytes(config, 4)
    assert len(cache.layers) == config.num_layers
    assert cache.layers[0].key.shape == (5, config.num_kv_heads, config.head_dim, 4)
    assert cache.layers[0].value.shape == (5, config.num_kv_heads, 4, config.head_dim)


def test_copying_blocks_touches_every_layer_and_nothing_else(tiny_folder: TinyFolder) -> None:
    cache = KVCache(load_config(tiny_folder()), num_blocks=5, block_size=4)
    for layer in cache.layers:
        for part in layer:
            part.copy_(torch.randn(part.shape))
    before = [[part.clone() for part in layer] for layer in cache.layers]
    cache.copy_blocks([3, 0, 0, 4])
    for layer, old in zip(cache.layers, before, strict=True):
        for part, old_part in zip(layer, old, strict=True):
            assert torch.equal(part, old_part[[3, 1, 2, 3, 3]])


def test_given_memory_is_filled_with_blocks(smollm2: ModelConfig) -> None:
    capacity = plan_capacity("m", smollm2, ExecutorConfig(kv_cache_mb=512, block_size=16), 0)
    assert capacity.num_blocks == 512 * MIB // (16 * 46_080)
    assert (capacity.model, capacity.block_size, capacity.max_model_len) == ("m", 16, 8192)
    assert (capacity.max_slots, capacity.max_step_tokens) == (64, 512)


@pytest.mark.parametrize(
    ("num_free_bytes", "expected_mb"),
    [(8 * GIB, 2048), (100 * GIB, 4096), (0, 64), (-GIB, 64)],
    ids=["a quarter", "at most 4 GiB", "at least 64 MiB", "even if the weights alone are too much"],
)
def test_by_default_a_share_of_free_memory_is_taken(
    smollm2: ModelConfig, num_free_bytes: int, expected_mb: int
) -> None:
    capacity = plan_capacity("m", smollm2, ExecutorConfig(), num_free_bytes)
    assert capacity.num_blocks == expected_mb * MIB // (16 * 46_080)


def test_by_default_no_block_is_taken_that_could_not_be_used(smollm2: ModelConfig) -> None:
    short = dataclasses.replace(smollm2, max_model_len=100)
    capacity = plan_capacity("m", short, ExecutorConfig(max_slots=2), 100 * GIB)
    assert capacity.num_blocks == 2 * 2 * 7  # twice two slots of seven blocks


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (ExecutorConfig(kv_cache_mb=4096), 8192),
        (ExecutorConfig(kv_cache_mb=4096, max_model_len=1000), 1000),
        (ExecutorConfig(kv_cache_mb=4096, max_model_len=9000), 8192),
        (ExecutorConfig(kv_cache_mb=9, block_size=16), 192),  # 12 blocks and a bit
    ],
    ids=["the model's", "the operator's", "not beyond the model's", "what the blocks hold"],
)
def test_the_longest_sequence_is_the_smallest_limit(
    smollm2: ModelConfig, settings: ExecutorConfig, expected: int
) -> None:
    assert plan_capacity("m", smollm2, settings, 0).max_model_len == expected


def test_memory_for_less_than_a_block_is_refused_with_its_size(smollm2: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"KV_CACHE_MB is too small: one block of this model takes 2\.8 MiB"):
        plan_capacity("m", smollm2, ExecutorConfig(kv_cache_mb=2, block_size=64), 0)


def test_room_for_a_single_token_is_refused(smollm2: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"MAX_MODEL_LEN=1 and .* leave room for 1 token"):
        plan_capacity("m", smollm2, ExecutorConfig(max_model_len=1), 0)


def machine(folder: Path, available_kb: int) -> Path:
    path = folder / "meminfo"
    path.write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available_kb} kB\nSwapFree: 5 kB\n")
    return path


def container(folder: Path, limit: str, used: int, inactive_file: int) -> Path:
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")
    return folder


def test_free_memory_is_the_machines(tmp_path: Path) -> None:
    assert free_bytes(machine(tmp_path, 3000), tmp_path / "none") == 3000 * 1024
    assert free_bytes(machine(tmp_path, 3000), container(tmp_path, "max", 10, 0)) == 3000 * 1024


def test_free_memory_is_the_containers_if_that_has_less(tmp_path: Path) -> None:
    assert free_bytes(machine(tmp_path, 3000), container(tmp_path, "1000000", 700_000, 50_000)) == 350_000
    assert free_bytes(machine(tmp_path, 100), container(tmp_path, "1000000", 700_000, 0)) == 100 * 1024
    assert free_bytes(machine(tmp_path, 3000), container(tmp_path, "1000", 2000, 0)) == 0


def test_a_system_that_says_nothing_has_half_of_its_memory_free(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "none", tmp_path / "none") > 0
