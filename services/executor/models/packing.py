"""A model's weights as the integer kernels read them: a named array each.

Owns which arrays there are, and in what order; what lies in each is the format's. They depend on the model and the
format alone, so they can be made once and kept (`services.executor.packed`).

    embedding, head                      packed; no head where the embedding is used in its place
    norm                                 float32 [hidden], in groups only
    layers.N.qkv, .output, .gate_up, .down   packed, where there is a bias with NAME.bias
    layers.N.input_norm, .post_attention_norm   float32, in groups only; for some families .q_norm, .k_norm
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.executor.kernels.grouped_linear import PANEL, Bits, pack
from services.executor.models.row_packing import RowPacker
from services.executor.quantization.groups import Groups
from services.executor.weights import Weights
from shared.models.config import ModelConfig

Format = Literal["stored", "int4", "int8"]
"""Groups of 4 or 8 bits as they are stored, all else in 8; layers in groups of 4 bits; all in 8 with a scale a row."""
Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
Sizes = Mapping[str, tuple[int, ...]]

_PADDING: Final = 64
"""Floats after a bias, since the kernels read it by whole panels."""


class Packer(Protocol):
    """Makes the arrays of one format."""

    def embeddings(self, config: ModelConfig) -> Iterator[tuple[str, Array]]:
        """The embedding, and the head if it is another array."""

    def norms(self, names: Mapping[str, str], size: int) -> Iterator[tuple[str, Array]]:
        """Weights of norms by the names of their arrays, if the format needs any."""

    def reading(self, parts: Sizes, norm: str, order: npt.NDArray[np.intp] | None = None) -> Array:
        """Weights below each other, in this order of rows, of a product that reads what a norm gives."""

    def writing(self, name: str, size: tuple[int, int], *, in_blocks: bool) -> Array:
        """The weight of a product that is added to hidden states; `in_blocks`: its inputs are silu(gate) · up."""

    def written_bias(self, name: str, size: int) -> Tensor:
        """The bias of such a product."""


def packed_arrays(
    config: ModelConfig, weights: Weights, weight_format: Format, num_threads: int = 1
) -> Iterator[tuple[str, Array]]:
    """The arrays one after the other, so that never all of them and all weights are in memory.

    What is wrong with the weights is noted there, for its `finish`: until that is asked the arrays may mean nothing.
    """
    packer: Packer
    if weight_format == "int8":
        packer = RowPacker(config, weights, num_threads)
    else:
        packer = _GroupPacker(weights, 4 if weight_format == "int4" else None)
    yield from packer.embeddings(config)
    yield from packer.norms({"norm": "model.norm.weight"}, config.hidden_size)
    for number in range(config.num_layers):
        for name, array in _layer(packer, weights, config, f"model.layers.{number}"):
            yield f"layers.{number}.{name}", array


def _layer(packer: Packer, weights: Weights, config: ModelConfig, prefix: str) -> Iterator[tuple[str, Array]]:
    hidden, middle, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
    sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    norms = {f"{name}_norm": f"{prefix}.{name}_layernorm.weight" for name in ("input", "post_attention")}
    parts = {f"{attention}.{name}.weight": (rows, hidden) for name, rows in sizes.items()}
    yield "qkv", packer.reading(parts, norms["input_norm"])
    if config.attention_bias:
        yield "qkv.bias", _padded(weights.load({f"{attention}.{name}.bias": (rows,) for name, rows in sizes.items()}))
    yield "output", packer.writing(f"{attention}.o_proj.weight", (hidden, queries), in_blocks=False)
    if config.output_bias:
        yield "output.bias", _padded(packer.written_bias(f"{attention}.o_proj.bias", hidden))
    gate_up = {f"{mlp}.{name}.weight": (middle, hidden) for name in ("gate_proj", "up_proj")}
    yield "gate_up", packer.reading(gate_up, norms["post_attention_norm"], _in_turn(middle))
    if config.mlp_bias:
        bias = weights.load({f"{mlp}.{name}.bias": (middle,) for name in ("gate_proj", "up_proj")})
        yield "gate_up.bias", _padded(bias[torch.from_numpy(_in_turn(middle))])
    yield "down", packer.writing(f"{mlp}.down_proj.weight", (hidden, middle), in_blocks=True)
    if config.mlp_bias:
        yield "down.bias", _padded(packer.written_bias(f"{mlp}.down_proj.bias", hidden))
    yield from packer.norms(norms, hidden)
    if config.family == "qwen3":
        for name in ("q_norm", "k_norm"):
            yield name, weights.load({f"{attention}.{name}.weight": (head_dim,)}).numpy()


class _GroupPacker:
    """Weights in groups of 32 columns."""

    def __init__(self, weights: Weights, bits: Bits | None) -> None:
        """`bits` are those of numbers that are not stored in groups; None: 8."""
        self._weights = weights
        self._bits = bits

    def embeddings(self, config: ModelConfig) -> Iterator[tuple[str, Array]]:
        size = (config.vocab_size, config.hidden_size)
        groups = self._groups({"model.embed_tokens.weight": size})
        yield "embedding", _packed(groups)
        if config.tie_word_embeddings:
            self._weights.skip_tied("lm_head.weight", groups)
        else:
            yield "head", _packed(self._groups({"lm_head.weight": size}))

    def norms(self, names: Mapping[str, str], size: int) -> Iterator[tuple[str, Array]]:
        for name, weight in names.items():
            yield name, self._weights.load({weight: (size,)}).numpy()

    def reading(self, parts: Sizes, norm: str, order: npt.NDArray[np.intp] | None = None) -> Array:
        groups = self._groups(parts)
        return _packed(groups if order is None else groups.rows(order))

    def writing(self, name: str, size: tuple[int, int], *, in_blocks: bool) -> Array:
        return _packed(self._groups({name: size}))

    def written_bias(self, name: str, size: int) -> Tensor:
        return self._weights.load({name: (size,)})

    def _groups(self, parts: Sizes) -> Groups:
        return self._weights.load_groups(parts, self._bits)


def _packed(groups: Groups) -> Array:
    packed: Array = pack(groups.q, groups.scales, groups.offsets, 4 if groups.q.max(initial=0) < 16 else 8).data.numpy()
    return packed


def _padded(bias: Tensor) -> Array:
    padded: Array = torch.nn.functional.pad(bias, (0, _PADDING)).numpy()
    return padded


def _in_turn(rows: int) -> npt.NDArray[np.intp]:
    """The order of two weights' rows: a panel of the one and a panel of the other in turn."""
    return np.arange(2 * rows).reshape(2, -1, PANEL).transpose(1, 0, 2).ravel()
