"""From GGUF metadata to config.json."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.errors import ModelError
from shared.models.gguf_import.architecture import build_config, llama3_factors
from shared.models.gguf_import.reader import read_gguf
from tests.models.tiny_gguf import write_tiny_gguf
from tests.tiny_models import FAMILIES, VOCAB_SIZE, make_tiny_network


def config_of(folder: Path, family: str = "llama", **options: Any) -> dict[str, Any]:
    """The configuration of a tiny GGUF file."""
    return build_config(read_gguf(write_tiny_gguf(folder / "x.gguf", family, **options)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shape_of_the_model_is_kept(tmp_path: Path, family: str) -> None:
    config = config_of(tmp_path, family, rms_norm_eps=1e-6)
    original = make_tiny_network(family).config.to_dict()
    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert config[field] == original[field], field
    assert config["num_key_value_heads"] == original["num_key_value_heads"]
    assert config["max_position_embeddings"] == original["max_position_embeddings"]
    assert config["architectures"] == [type(make_tiny_network(family)).__name__]
    assert config["head_dim"] == 16
    assert config["rms_norm_eps"] == 1e-6  # and not 9.999999974752427e-07, as float32 has it
    assert config["rope_theta"] == 10_000.0
    assert config["rope_scaling"] is None
    assert config["tie_word_embeddings"] is True


def test_the_output_matrix_unties_the_embeddings(tmp_path: Path) -> None:
    assert config_of(tmp_path, tie_word_embeddings=False)["tie_word_embeddings"] is False


@pytest.mark.parametrize(("family", "has_bias"), [("llama", True), ("llama", False), ("qwen3", True)])
def test_biases_are_noticed(tmp_path: Path, family: str, has_bias: bool) -> None:
    assert config_of(tmp_path, family, attention_bias=has_bias)["attention_bias"] is has_bias


def test_the_biases_that_qwen2_always_has_need_no_mention(tmp_path: Path) -> None:
    assert config_of(tmp_path, "qwen2")["attention_bias"] is False


def test_the_vocabulary_is_as_large_as_the_embedding_even_if_it_was_padded(tmp_path: Path) -> None:
    assert config_of(tmp_path, vocab_size=VOCAB_SIZE + 32)["vocab_size"] == VOCAB_SIZE + 32


def test_one_number_a_layer_is_read_if_it_is_the_same_number(tmp_path: Path) -> None:
    assert config_of(tmp_path, metadata={"llama.attention.head_count_kv": [2, 2, 2]})["num_key_value_heads"] == 2
    with pytest.raises(ModelError, match=r"head_count_kv must be a positive whole number, not \[2, 2, 4\]"):
        config_of(tmp_path, metadata={"llama.attention.head_count_kv": [2, 2, 4]})


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 512,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 512,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
                "llama.rope.scaling.yarn_beta_slow": 2.0,
                "llama.rope.scaling.attn_factor": 0.5,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 0.5 * (1 + 0.1 * math.log(4)),
            },
        ),
    ],
)
def test_rope_scaling_is_kept(tmp_path: Path, metadata: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    assert config_of(tmp_path, metadata=metadata)["rope_scaling"] == scaling


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_recognized_by_its_factors(tmp_path: Path, factor: float) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = llama3_factors(scaling, 500_000.0, 16).astype(np.float32)
    metadata = {"llama.rope.freq_base": 500_000.0}
    assert config_of(tmp_path, metadata=metadata, tensors={"rope_freqs.weight": factors})["rope_scaling"] == scaling
    with pytest.raises(ModelError, match="not the scaling of a Llama 3"):
        config_of(tmp_path, metadata=metadata, tensors={"rope_freqs.weight": factors**2})
    with pytest.raises(ModelError, match="not the scaling of a Llama 3"):
        config_of(tmp_path, metadata=metadata, tensors={"rope_freqs.weight": factors[:-1]})


def test_llama_3_factors_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=scaling | {"rope_theta": 500_000.0},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500_000.0 ** -(np.arange(0, 128, 2) / 128)
    # float32 against float64
    np.testing.assert_allclose(plain / scaled.numpy(), llama3_factors(scaling, 500_000.0, 128), rtol=1e-5)


def test_factors_of_one_are_no_scaling(tmp_path: Path) -> None:
    ones = np.ones(8, np.float32)
    assert config_of(tmp_path, tensors={"rope_freqs.weight": ones})["rope_scaling"] is None


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"metadata": {"split.count": 3}}, "one of 3 parts"),
        ({"metadata": {"llama.expert_count": 8}}, "mixture of experts"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "only a part of each head"),
        ({"metadata": {"llama.attention.value_length": 8}}, "another length than its keys"),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "rope scaling 'longrope'"),
        ({"metadata": {"llama.block_count": None}}, "block_count must be a positive whole number, not None"),
        ({"metadata": {"llama.context_length": "many"}}, "context_length must be a positive whole number"),
        ({"metadata": {"llama.rope.freq_base": -1.0}}, "freq_base must be a positive number"),
        ({"metadata": {"llama.attention.layer_norm_rms_epsilon": math.nan}}, "epsilon must be a positive number"),
        ({"tensors": {"token_embd.weight": None}}, r"no token_embd\.weight"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(tmp_path: Path, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        config_of(tmp_path, **options)


def test_other_architectures_are_refused_with_the_supported_ones(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture mamba is not supported; supported are llama, qwen2, qwen3"):
        build_config(read_gguf(path))
