"""A model's weights as the integer kernels read them: a named array each.

Owns which arrays there are, which weights lie in each, and in what order. They depend on the model and the format
alone, so they can be made once and kept (`services.executor.packed`).

    embedding, head                      packed; no head where the embedding is used in its place
    norm                                 float32 [hidden]
    layers.N.qkv, .output, .gate_up, .down   packed, where there is a bias with NAME.bias
    layers.N.input_norm, .post_attention_norm, and for some families .q_norm, .k_norm   float32
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.executor.kernels.grouped_linear import PANEL, Bits, pack
from services.executor.quantization.groups import Groups, joined
from services.executor.weights import Weights
from shared.models.config import ModelConfig

Format = Literal["stored", "int4", "int8"]
"""Groups of 4 or 8 bits as they are stored, all else in 8; layers in 4 bits; everything in 8 bits."""
Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

_PADDING: Final = 64
"""Floats after a bias, since the kernels read it by whole panels."""


def packed_arrays(config: ModelConfig, weights: Weights, weight_format: Format) -> Iterator[tuple[str, Array]]:
    """The arrays one after the other, so that never all of them and all weights are in memory.

    What is wrong with the weights is noted there, for its `finish`: until that is asked the arrays may mean nothing.
    """
    packer = _Packer(weights, weight_format)
    yield from _embeddings(packer, config)
    yield "norm", packer.floats({"model.norm.weight": (config.hidden_size,)}).numpy()
    for number in range(config.num_layers):
        for name, array in _layer(packer, config, f"model.layers.{number}"):
            yield f"layers.{number}.{name}", array


def _embeddings(packer: "_Packer", config: ModelConfig) -> Iterator[tuple[str, Array]]:
    size = (config.vocab_size, config.hidden_size)
    groups = packer.groups({"model.embed_tokens.weight": size})
    yield "embedding", packer.packed(groups)
    if config.tie_word_embeddings:
        packer.skip_if_equal("lm_head.weight", groups)
    else:
        yield "head", packer.packed(packer.groups({"lm_head.weight": size}))


def _layer(packer: "_Packer", config: ModelConfig, prefix: str) -> Iterator[tuple[str, Array]]:
    hidden, middle, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
    sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    yield "qkv", packer.packed(packer.groups({f"{attention}.{n}.weight": (rows, hidden) for n, rows in sizes.items()}))
    if config.attention_bias:
        yield "qkv.bias", packer.bias({f"{attention}.{name}.bias": (rows,) for name, rows in sizes.items()})
    yield "output", packer.packed(packer.groups({f"{attention}.o_proj.weight": (hidden, queries)}))
    if config.output_bias:
        yield "output.bias", packer.bias({f"{attention}.o_proj.bias": (hidden,)})
    gate_up = [packer.groups({f"{mlp}.{name}.weight": (middle, hidden)}) for name in ("gate_proj", "up_proj")]
    yield "gate_up", packer.packed(_in_turn(*gate_up))
    if config.mlp_bias:
        biases = [packer.floats({f"{mlp}.{name}.bias": (middle,)}) for name in ("gate_proj", "up_proj")]
        yield "gate_up.bias", _padded(torch.stack([each.view(-1, PANEL) for each in biases], dim=1).flatten())
    yield "down", packer.packed(packer.groups({f"{mlp}.down_proj.weight": (hidden, middle)}))
    if config.mlp_bias:
        yield "down.bias", packer.bias({f"{mlp}.down_proj.bias": (hidden,)})
    for name in ("input", "post_attention"):
        yield f"{name}_norm", packer.floats({f"{prefix}.{name}_layernorm.weight": (hidden,)}).numpy()
    if config.family == "qwen3":
        for name in ("q_norm", "k_norm"):
            yield name, packer.floats({f"{attention}.{name}.weight": (head_dim,)}).numpy()


class _Packer:
    """Weights in one format."""

    def __init__(self, weights: Weights, weight_format: Format) -> None:
        self._weights = weights
        self._format = weight_format
        self.floats = weights.load
        self.skip_if_equal = weights.skip_tied

    def groups(self, parts: Mapping[str, tuple[int, ...]]) -> Groups:
        return self._weights.load_groups(parts, 4 if self._format == "int4" else None)

    def packed(self, groups: Groups) -> Array:
        fits = self._format != "int8" and int(groups.q.max(initial=0)) < 16
        bits: Bits = 4 if fits else 8
        packed: Array = pack(groups.q, groups.scales, groups.offsets, bits).data.numpy()
        return packed

    def bias(self, parts: Mapping[str, tuple[int, ...]]) -> Array:
        return _padded(self.floats(parts))


def _padded(bias: Tensor) -> Array:
    padded: Array = torch.nn.functional.pad(bias, (0, _PADDING)).numpy()
    return padded


def _in_turn(first: Groups, second: Groups) -> Groups:
    """Two weights' rows, a panel of the one and a panel of the other in turn."""
    order = np.arange(2 * len(first.q)).reshape(2, -1, PANEL).transpose(1, 0, 2).ravel()
    return joined((first, second)).rows(order)
