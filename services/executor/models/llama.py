"""Llama and what is built like it: SmolLM2, Mistral. The other families start from here and say what differs.

Weight names are Hugging Face's.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from services.executor.attention.protocol import Attention
from services.executor.batch import ForwardBatch
from services.executor.kv_cache import KVCache, LayerCache
from services.executor.layers.embedding import Embedding
from services.executor.layers.linear import Linear
from services.executor.layers.mlp import GatedMLP
from services.executor.layers.rms_norm import RMSNorm
from services.executor.weights import Weights
from shared.models.config import ModelConfig


class SelfAttention:
    """Projections around the attention backend, q, k and v in one product."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, attention: Attention) -> None:
        self._attention = attention
        self._head_dim = config.head_dim
        self._num_heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {f"{prefix}.q_proj": q_size, f"{prefix}.k_proj": kv_size, f"{prefix}.v_proj": kv_size}
        self._qkv = Linear.load(weights, parts, config.hidden_size, bias=config.attention_bias)
        self._output = Linear.load(weights, {f"{prefix}.o_proj": config.hidden_size}, q_size, bias=config.output_bias)

    def __call__(self, hidden: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        """[T, hidden] from [T, hidden]."""
        heads = self._qkv(hidden).view(len(hidden), sum(self._num_heads), self._head_dim)
        q, k, v = torch.split(heads, self._num_heads, dim=1)
        q, k = self.prepare(q, k)
        return self._output(self._attention(q, k, v, cache, batch).flatten(1))

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What a family does to q and k [T, heads, head_dim] before rotary embedding: here nothing."""
        return q, k


class Layer:
    """One transformer layer. The residual stream is updated in place."""

    def __init__(self, weights: Weights, prefix: str, config: ModelConfig, self_attention: SelfAttention) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self._input_norm = RMSNorm.load(weights, f"{prefix}.input_layernorm", size, eps)
        self._self_attention = self_attention
        self._post_attention_norm = RMSNorm.load(weights, f"{prefix}.post_attention_layernorm", size, eps)
        self._mlp = GatedMLP(config, weights, f"{prefix}.mlp")

    def __call__(self, delta: Tensor | None, residual: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        """What this layer adds to the residual stream [T, hidden]; `delta` is what the layer before adds to it."""
        hidden = self._input_norm(residual) if delta is None else self._input_norm.add(delta, residual)
        hidden = self._post_attention_norm.add(self._self_attention(hidden, cache, batch), residual)
        return self._mlp(hidden)


class Llama:
    """A decoder-only transformer. Reads all of its weights when it is made."""

    self_attention: ClassVar[type[SelfAttention]] = SelfAttention

    def __init__(self, config: ModelConfig, weights: Weights, attention: Attention) -> None:
        """A weight that is missing or misshapen is noted in `weights`, whose `finish` raises."""
        embedding = Embedding.load(weights, "model.embed_tokens", config.vocab_size, config.hidden_size)
        self._layers = [
            self._layer(config, weights, f"model.layers.{number}", attention) for number in range(config.num_layers)
        ]
        self._norm = RMSNorm.load(weights, "model.norm", config.hidden_size, config.rms_norm_eps)
        if config.tie_word_embeddings:
            weights.skip_if_equal("lm_head.weight", embedding.table)
            self._lm_head = Linear(embedding.table, dtype=weights.dtype)
            self._embed: Callable[[Tensor], Tensor] = self._lm_head.rows
        else:
            self._lm_head = Linear.load(weights, {"lm_head": config.vocab_size}, config.hidden_size)
            self._embed = embedding

    def __call__(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """Logits [S, vocabulary] float32 of the batch's `logits_rows`; all tokens' keys and values are stored."""
        residual = self._embed(batch.token_ids)
        delta: Tensor | None = None
        for layer, cache in zip(self._layers, kv_cache.layers, strict=True):
            delta = layer(delta, residual, cache, batch)
        assert delta is not None, "a model has layers"
        wanted = batch.logits_rows
        return self._lm_head(self._norm.add(delta[wanted], residual[wanted]))

    def _layer(self, config: ModelConfig, weights: Weights, prefix: str, attention: Attention) -> Layer:
        return Layer(weights, prefix, config, self.self_attention(config, weights, f"{prefix}.self_attn", attention))
