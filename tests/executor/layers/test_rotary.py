"""Rotary frequencies and angles against transformers', bit for bit, from configurations as they are in files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from services.executor.layers.rotary import attention_factor, inverse_frequencies, rotary_table
from shared.models.config import RopeConfig, load_config
from tests.executor.models.test_against_transformers import ROPE_KINDS

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "SmolLM2": {"rope_type": "default", "rope_theta": 100_000.0},
    "Llama 3.2": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "Qwen2.5 stretched": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn whose ramp has no width": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 4,
    },
    **ROPE_KINDS,
}


def configuration(folder: Path, rope: dict[str, Any], head_dim: int) -> tuple[RopeConfig, Any]:
    theirs = transformers.LlamaConfig(
        hidden_size=4 * head_dim, head_dim=head_dim, num_attention_heads=4, rope_parameters=rope,
        max_position_embeddings=4096, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    theirs.save_pretrained(folder)
    return load_config(folder).rope, theirs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_angles_are_those_of_transformers(kind: str, head_dim: int, tmp_path: Path) -> None:
    ours, theirs = configuration(tmp_path, KINDS[kind], head_dim)
    embedding = LlamaRotaryEmbedding(theirs)
    positions = torch.arange(300)
    cos, sin = embedding(torch.zeros(1), positions.unsqueeze(0))
    assert torch.equal(inverse_frequencies(ours, head_dim), embedding.inv_freq)
    assert attention_factor(ours) == embedding.attention_scaling
    table = rotary_table(ours, head_dim, 300)
    half = head_dim // 2
    # Equal angles; their product with the position is a matrix product there, which may round differently.
    torch.testing.assert_close(table.cos, cos[0, :, :half], rtol=0, atol=1e-4)
    torch.testing.assert_close(table.sin, sin[0, :, :half], rtol=0, atol=1e-4)


def test_the_older_form_of_the_configuration_means_the_same(tmp_path: Path) -> None:
    new, _ = configuration(tmp_path, KINDS["Llama 3.2"], 64)
    raw = json.loads((tmp_path / "config.json").read_text())
    parameters = raw.pop("rope_parameters")
    raw |= {"rope_theta": parameters.pop("rope_theta"), "rope_scaling": parameters}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_config(tmp_path).rope == new


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="longrope"):
        inverse_frequencies(RopeConfig(theta=1e4, kind="longrope"), 16)
