"""From a GGUF file's metadata to the contents of `config.json`.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#llm
"""

import math
from typing import Any, Final

import numpy as np

from shared.errors import ModelError
from shared.models.gguf_import.reader import GGUFFile

_CLASSES: Final = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FACTORS: Final = "rope_freqs.weight"
"""The tensor in which llama.cpp keeps what Llama 3 does to each frequency."""

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
"""The only values in use; GGUF keeps their outcome, not the values themselves."""


def build_config(file: GGUFFile) -> dict[str, Any]:
    """What `config.json` says of this model. Raises ModelError if it cannot be expressed or served."""
    return _Architecture(file).config()


class _Architecture:
    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._kind = str(file.metadata.get("general.architecture"))
        if self._kind not in _CLASSES:
            raise ModelError(
                f"{file.path}: the architecture {self._kind} is not supported; supported are {', '.join(_CLASSES)}"
            )

    def config(self) -> dict[str, Any]:
        hidden_size, num_heads = self._integer("embedding_length"), self._integer("attention.head_count")
        head_dim = self._integer("attention.key_length", hidden_size // num_heads)
        self._refuse_what_differs(head_dim)
        tokens = self._file.metadata
        return {
            "architectures": [_CLASSES[self._kind]],
            "model_type": self._kind,
            "vocab_size": self._file.tensors["token_embd.weight"].shape[0],
            "hidden_size": hidden_size,
            "intermediate_size": self._integer("feed_forward_length"),
            "num_hidden_layers": self._integer("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._integer("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._integer("context_length"),
            "rope_theta": self._number("rope.freq_base", 10_000.0),
            "rope_scaling": self._rope_scaling(head_dim),
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "attention_bias": self._has_bias("attn_q") and self._kind != "qwen2",  # Qwen2 always has these biases
            "mlp_bias": self._has_bias("ffn_up"),
            "bos_token_id": tokens.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": tokens.get("tokenizer.ggml.eos_token_id"),
        }

    def _refuse_what_differs(self, head_dim: int) -> None:
        """Raises ModelError for variants of the architecture that the families do not have."""
        path, metadata = self._file.path, self._file.metadata
        if "token_embd.weight" not in self._file.tensors:
            raise ModelError(f"{path} holds no token_embd.weight: it is not a whole language model")
        if metadata.get("split.count", 1) > 1:
            raise ModelError(
                f"{path} is one of {metadata['split.count']} parts; join them with llama-gguf-split --merge"
            )
        if self._value("expert_count", 0):
            raise ModelError(f"{path} is a mixture of experts, which is not supported")
        if self._integer("rope.dimension_count", head_dim) != head_dim:
            raise ModelError(f"{path} rotates only a part of each head, which is not supported")
        if self._integer("attention.value_length", head_dim) != head_dim:
            raise ModelError(f"{path} has values of another length than its keys, which is not supported")

    def _has_bias(self, name: str) -> bool:
        return f"blk.0.{name}.bias" in self._file.tensors

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        factors = self._file.tensors.get(ROPE_FACTORS)
        if factors is not None:
            return self._llama3_scaling(factors.data.view(np.float32).reshape(-1), head_dim)
        kind = self._value("rope.scaling.type", "none")
        if kind == "none":
            factor = self._number("rope.scale_linear", 1.0)  # how old files say "linear"
            return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        if kind == "linear":
            return {"rope_type": "linear", "factor": self._number("rope.scaling.factor")}
        if kind == "yarn":
            return self._yarn_scaling()
        raise ModelError(f"{self._file.path}: the rope scaling {kind!r} is not supported")

    def _yarn_scaling(self) -> dict[str, Any]:
        factor, attention = self._number("rope.scaling.factor"), self._number("rope.scaling.attn_factor", 1.0)
        scaling: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self._integer("rope.scaling.original_context_length"),
        }
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if (value := self._value(f"rope.scaling.{key}", None)) is not None:
                scaling[name] = float(value)
        if attention != 1.0:  # in the file it comes on top of YaRN's own factor
            scaling["attention_factor"] = attention * (1.0 + 0.1 * math.log(factor))
        return scaling

    def _llama3_scaling(self, factors: np.ndarray, head_dim: int) -> dict[str, Any] | None:
        """The parameters whose outcome the tensor is. Raises ModelError if it is that of no Llama 3."""
        if np.all(factors == 1.0):
            return None
        scaling = {
            "rope_type": "llama3",
            "factor": float(factors.max()),
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": self._integer("rope.scaling.original_context_length", _LLAMA3_CONTEXT),
        }
        expected = llama3_factors(scaling, self._number("rope.freq_base", 10_000.0), head_dim)
        # The file keeps float32; computing them in another order differs in the last bits.
        if factors.shape != (head_dim // 2,) or not np.allclose(factors, expected, rtol=1e-4):
            raise ModelError(f"{self._file.path}: {ROPE_FACTORS} is not the scaling of a Llama 3 model")
        return scaling

    def _value(self, key: str, default: Any) -> Any:
        return self._file.metadata.get(f"{self._kind}.{key}", default)

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]  # one number a layer
        if not isinstance(value, int) or value <= 0:
            raise ModelError(f"{self._file.path}: {self._kind}.{key} must be a positive whole number, not {value!r}")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ModelError(f"{self._file.path}: {self._kind}.{key} must be a positive number, not {value!r}")
        return _shortest(value)


def llama3_factors(scaling: dict[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """By how much Llama 3 slows each rotary frequency, float64 [head_dim / 2].

    Long waves are divided by `factor`, short ones kept, and those between are blended.
    Source: Llama 3.1's reference code, `apply_scaling`.
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    kept = (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    kept = np.clip(kept, 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - kept) / scaling["factor"] + kept))


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06 (GGUF keeps float32)."""
    return float(str(np.float32(value)))
