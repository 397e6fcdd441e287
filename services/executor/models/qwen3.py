"""Qwen3: Llama whose q and k are normalized, each head by itself, before rotary embedding."""

from torch import Tensor

from services.executor.attention.protocol import Attention
from services.executor.layers.rms_norm import RMSNorm
from services.executor.models.llama import Llama, SelfAttention
from services.executor.weights import Weights
from shared.models.config import ModelConfig


class Qwen3SelfAttention(SelfAttention):
    """Self-attention with a norm on q and on k."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, attention: Attention) -> None:
        super().__init__(config, weights, prefix, attention)
        self._q_norm = RMSNorm.load(weights, f"{prefix}.q_norm", config.head_dim, config.rms_norm_eps)
        self._k_norm = RMSNorm.load(weights, f"{prefix}.k_norm", config.head_dim, config.rms_norm_eps)

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Both normalized."""
        return self._q_norm(q), self._k_norm(k)


class Qwen3(Llama):
    """The dense models of the family."""

    self_attention = Qwen3SelfAttention
