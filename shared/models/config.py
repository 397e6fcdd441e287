"""A model's configuration, read from the `config.json` and `generation_config.json` of its folder.

Owns what the architecture is. Does not own weights, nor the text side (tokenizer and chat template).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ModelError

_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base and, for stretched contexts, how frequencies are scaled."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer of one of the supported families."""

    family: str
    """llama (Llama, SmolLM2, Mistral), qwen2 or qwen3: names a module in the executor's `models`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_model_len: int
    """Tokens of prompt and output; for a sliding-window model the window, within which attention is full."""
    tie_word_embeddings: bool
    attention_bias: bool
    """Whether the q, k and v projections have a bias."""
    output_bias: bool
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool
    end_token_ids: tuple[int, ...]
    """The tokens that end a generation."""
    bos_token_id: int | None


def load_config(folder: Path) -> ModelConfig:
    """The configuration of the model in `folder`. Raises ModelError that names the file and field at fault."""
    raw = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    reader = _Reader(folder / "config.json", raw)
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in _FAMILIES:
        raise ModelError(
            f"{reader.path}: architecture {architecture} is not supported; supported are {', '.join(_FAMILIES)}"
        )
    family = _FAMILIES[architecture]
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{reader.path}: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    num_heads = reader.integer("num_attention_heads")
    hidden_size = reader.integer("hidden_size")
    return ModelConfig(
        family=family,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=reader.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=reader.integer("num_key_value_heads", num_heads),
        head_dim=reader.integer("head_dim", hidden_size // num_heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(reader),
        max_model_len=_max_model_len(reader),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=family == "qwen2" or bool(raw.get("attention_bias", False)),
        output_bias=family != "qwen2" and bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        end_token_ids=_token_ids(generation.get("eos_token_id", raw.get("eos_token_id"))),
        bos_token_id=raw.get("bos_token_id"),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    path: Path
    raw: dict[str, Any]

    def integer(self, field: str, default: int | None = None) -> int:
        value = self.raw.get(field)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"{self.path}: {field} must be a positive whole number, not {value!r}")
        return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: this is not a model folder") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _max_model_len(reader: _Reader) -> int:
    longest = reader.integer("max_position_embeddings")
    window = reader.raw.get("sliding_window") if reader.raw.get("use_sliding_window", True) else None
    return min(longest, window) if isinstance(window, int) else longest


def _rope(reader: _Reader) -> RopeConfig:
    """Older files keep `rope_theta` and `rope_scaling` apart, newer ones have one `rope_parameters`."""
    raw = reader.raw
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise ModelError(f"{reader.path}: rope type {kind!r} is not supported; supported are {', '.join(_ROPE_TYPES)}")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        original_max_position=int(
            scaling.get("original_max_position_embeddings") or reader.integer("max_position_embeddings")
        ),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=scaling.get("attention_factor"),
    )
