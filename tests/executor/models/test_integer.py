"""Models in integers: the arithmetic written plainly, the families, and weights that do not fit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.executor.batch import ForwardBatch
from services.executor.factory import LoadedModel, load_model
from services.executor.kernels import tiles
from services.executor.kernels.cached_attention import Kind
from services.executor.kv_cache import RecordCache
from shared.errors import ConfigError, ModelError
from tests.executor.conftest import INTEGER, SMALL, TinyFolder
from tests.executor.models.integer_reference import GroupReference, RowReference

TOKENS = [7, 300, 12, 12, 5, 99, 250, 1, 383, 42] * 4
LONG = [*TOKENS, *TOKENS[3:], *TOKENS[6:], 8, *TOKENS]
"""More than two tiles of attention, the last one not whole."""
BLOCKS = (3, 1, 2, 8, 4, 6, 9, 7, 5, 10)


def logits(
    loaded: LoadedModel, token_ids: list[int], *, start: int = 0, blocks: tuple[int, ...] = BLOCKS
) -> torch.Tensor:
    """Of tokens `start` and after, in one step; those before are in the cache."""
    positions = torch.arange(start, len(token_ids))
    table = torch.tensor(blocks, dtype=torch.int32)
    size = loaded.capacity.block_size
    rows = []
    for first in range(0, len(positions), loaded.capacity.max_slots):
        part = positions[first : first + loaded.capacity.max_slots]
        batch = ForwardBatch(
            token_ids=torch.tensor(token_ids)[part],
            positions=part,
            slot_mapping=table[part // size].long() * size + part % size,
            query_starts=torch.tensor([0, len(part)], dtype=torch.int32),
            context_lens=torch.tensor([int(part[-1]) + 1], dtype=torch.int32),
            block_tables=table.unsqueeze(0),
            logits_rows=torch.arange(len(part)),
        )
        rows.append(loaded.model(batch, loaded.kv_cache).clone())
    return torch.cat(rows)


def reference(folder: Path, weights: str, cache: Kind) -> GroupReference:
    return RowReference(folder, cache) if weights == "int8" else GroupReference(folder, None, cache)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("cache", ["int8", "float32"])
@pytest.mark.parametrize("weights", ["int8", "stored"])
def test_logits_are_those_of_the_arithmetic_written_plainly(
    weights: str, family: str, cache: Kind, tiny_folder: TinyFolder
) -> None:
    folder = tiny_folder(family)
    settings = replace(INTEGER, dtype=weights, kv_dtype=cache)
    found = logits(load_model(folder, "tiny", settings), LONG).double()
    expected = reference(folder, weights, cache).logits(LONG)
    # A number on the edge between two bytes may fall to either, which moves some logits by a little.
    error = (found - expected).abs()
    assert error.median() < 0.01 * expected.std()
    assert error.max() < 0.2 * expected.std()


@pytest.mark.parametrize("weights", ["int8", "stored"])
def test_an_untied_head_and_every_bias_are_used(weights: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("llama", tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    found = logits(load_model(folder, "tiny", replace(INTEGER, dtype=weights)), TOKENS).double()
    expected = reference(folder, weights, "int8").logits(TOKENS)
    assert (found - expected).abs().median() < 0.01 * expected.std()


def test_four_bits_are_four_bits(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("llama")
    found = logits(load_model(folder, "tiny", replace(INTEGER, dtype="int4")), TOKENS).double()
    expected = GroupReference(folder, 4, "int8").logits(TOKENS)
    assert (found - expected).abs().median() < 0.01 * expected.std()
    in_eight = logits(load_model(folder, "tiny", replace(INTEGER, dtype="stored")), TOKENS).double()
    assert (in_eight - expected).abs().median() > 0.05 * expected.std()


@pytest.mark.skipif(not tiles.can_use_tiles(), reason="this processor has no tile registers")
@pytest.mark.parametrize("weights", ["int8", "stored"])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_tile_registers_change_no_bit(
    weights: str, head_dim: int, tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, settings = tiny_folder("qwen3", head_dim=head_dim), replace(INTEGER, dtype=weights)
    by_tiles = load_model(folder, "tiny", settings)
    monkeypatch.setattr(tiles, "can_use_tiles", lambda: False)
    without = load_model(folder, "tiny", settings)
    assert torch.equal(logits(by_tiles, LONG), logits(without, LONG))


SHAPES: list[dict[str, int]] = [
    {"head_dim": 64},
    {"head_dim": 96},
    {"head_dim": 128},
    {"hidden_size": 96, "intermediate_size": 160, "vocab_size": 390},
    {"hidden_size": 160, "intermediate_size": 32, "num_hidden_layers": 1},
    {"hidden_size": 320, "num_attention_heads": 40, "num_key_value_heads": 1, "head_dim": 64, "num_hidden_layers": 1},
]
"""What fills tile registers, what does not, and more heads that share keys than two registers have rows."""


@pytest.mark.parametrize("cache", ["int8", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_models_of_other_shapes_are_computed_too(shape: dict[str, int], cache: Kind, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("llama", **shape)
    found = logits(load_model(folder, "tiny", replace(INTEGER, kv_dtype=cache)), LONG).double()
    expected = RowReference(folder, cache).logits(LONG)
    error = (found - expected).abs()
    assert error[:4].median() < 1e-6 * expected.std()
    # Later a number that lies between two bytes may become either, and then all that follows is a little different: the
    # reference itself gives 0.005 if it is moved by 1e-7.
    assert error.median() < 0.015 * expected.std()
    assert error.max() < 0.2 * expected.std()


@pytest.mark.parametrize("cache", ["int8", "float32"])
def test_what_nobody_has_written_is_never_used(cache: Kind, tiny_folder: TinyFolder) -> None:
    loaded = load_model(tiny_folder("llama"), "tiny", replace(INTEGER, kv_dtype=cache))
    assert isinstance(loaded.kv_cache, RecordCache)
    expected = logits(loaded, LONG)
    for layer in loaded.kv_cache.layers:
        layer.fill_(255)  # as floats: not a number
    assert torch.equal(logits(loaded, LONG), expected)


@pytest.mark.parametrize(("cache", "head_dim"), [("int8", 16), ("int8", 64), ("float32", 16)])
@pytest.mark.parametrize("split", [1, 15, 16, 17, 63, 64, 65, 100, 128, 150])
def test_a_prefix_in_the_cache_gives_the_same_bits(
    cache: Kind, head_dim: int, split: int, tiny_folder: TinyFolder
) -> None:
    loaded = load_model(tiny_folder("llama", head_dim=head_dim), "tiny", replace(INTEGER, kv_dtype=cache))
    expected = logits(loaded, LONG)
    logits(loaded, LONG[:split], blocks=BLOCKS[::-1])
    rest = logits(loaded, LONG, start=split, blocks=BLOCKS[::-1])
    assert torch.equal(rest, expected[split:])


def test_numbers_that_are_none_show_in_the_logits_of_their_row(tiny_folder: TinyFolder) -> None:
    loaded = load_model(tiny_folder("llama"), "tiny", INTEGER)
    expected = logits(loaded, TOKENS)
    loaded.model._memory.residual.fill(np.nan)  # type: ignore[attr-defined]
    loaded.model._memory.delta.fill(np.nan)  # type: ignore[attr-defined]
    assert torch.equal(logits(loaded, TOKENS), expected)


def test_a_weight_that_is_missing_is_named(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("llama", num_hidden_layers=1)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 2'))
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight is missing"):
        load_model(folder, "tiny", INTEGER)


def test_sizes_that_integers_cannot_have_are_named_or_left_to_floats(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("llama", intermediate_size=80)
    with pytest.raises(ConfigError, match="SHOAL_EXECUTOR_DTYPE=int8 cannot be: intermediate_size is 80"):
        load_model(folder, "tiny", INTEGER)
    assert not isinstance(load_model(folder, "tiny", replace(INTEGER, dtype="auto")).kv_cache, RecordCache)
    with pytest.raises(ConfigError, match="SHOAL_EXECUTOR_BLOCK_SIZE is 4"):
        load_model(tiny_folder("llama"), "tiny", replace(SMALL, dtype="int8"))
