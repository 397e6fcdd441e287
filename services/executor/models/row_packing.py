"""A model's weights with one scale a row, hidden states rotated: the arrays of the format `int8`.

Owns what is folded into which weight. A norm's weights are part of the products that read what it gives, and the
rotation is part of all that read or write hidden states (`quantization.rotation`): so the norms that are left have no
weights.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.executor.kernels.row_linear import blocks_of, pack_rows
from services.executor.kernels.row_quantize import EMBEDDING_HEAD, MIDDLE_BLOCK
from services.executor.quantization.groups import LARGEST
from services.executor.quantization.rotation import Floats, Rotation
from services.executor.weights import Weights
from shared.models.config import ModelConfig

Array = npt.NDArray[Any]
Sizes = Mapping[str, tuple[int, ...]]


class RowPacker:
    """Weights with one scale a row, for hidden states that are rotated."""

    def __init__(self, config: ModelConfig, weights: Weights, num_threads: int) -> None:
        self._weights = weights
        self._rotation = Rotation(config.hidden_size, num_threads)

    def embeddings(self, config: ModelConfig) -> Iterator[tuple[str, Array]]:
        """The embedding, [vocabulary, EMBEDDING_HEAD + hidden] bytes, and the head."""
        size = (config.vocab_size, config.hidden_size)
        embedding = self._weights.load({"model.embed_tokens.weight": size})
        if config.tie_word_embeddings:
            self._weights.skip_if_equal("lm_head.weight", embedding)
        q, scales = self._quantized("model.embed_tokens.weight", self._rotation.rows(embedding.numpy()))
        records = np.zeros((config.vocab_size, EMBEDDING_HEAD + config.hidden_size), np.uint8)
        records[:, :4] = scales[:, np.newaxis].view(np.uint8)
        records[:, EMBEDDING_HEAD:] = q.view(np.uint8)
        yield "embedding", records
        name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        head = embedding if config.tie_word_embeddings else self._weights.load({name: size})
        yield "head", self._packed(name, self._reading(head, "model.norm.weight"))

    def norms(self, names: Mapping[str, str], size: int) -> Iterator[tuple[str, Array]]:
        """None are left."""
        return iter(())

    def reading(self, parts: Sizes, norm: str, order: npt.NDArray[np.intp] | None = None) -> Array:
        """Weights below each other, in this order of rows, of a product that reads what a norm gives."""
        rows = self._reading(self._weights.load(parts), norm)
        return self._packed(next(iter(parts)), rows if order is None else rows[order])

    def writing(self, name: str, size: tuple[int, int], *, in_blocks: bool) -> Array:
        """The weight of a product that is added to hidden states; its inputs have one step, or one a block."""
        weight = self._rotation(self._weights.load({name: size}).numpy())
        return self._packed(name, weight, MIDDLE_BLOCK if in_blocks else 0)

    def written_bias(self, name: str, size: int) -> Tensor:
        """The bias of such a product."""
        bias = self._weights.load({name: (size,)})
        self._rotation(bias.numpy()[:, np.newaxis])
        return bias

    def _reading(self, weight: Tensor, norm: str) -> Floats:
        factors = self._weights.load({norm: (weight.shape[1],)})
        return self._rotation.rows((weight * factors).numpy())

    def _packed(self, name: str, rows: Floats, block: int = 0) -> Array:
        q, scales = self._quantized(name, rows)
        return pack_rows(q, scales, blocks_of(rows.shape[1], block))

    def _quantized(self, name: str, rows: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
        largest = np.abs(rows).max(1)
        if not largest.max(initial=0) <= LARGEST:
            self._weights.note(f"{name} holds numbers beyond {LARGEST:.0f}, or that are none")
            rows, largest = np.zeros_like(rows), np.zeros_like(largest)
        scales = largest / np.float32(127)
        inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
        return np.rint(rows * inverse[:, np.newaxis]).clip(-127, 127).astype(np.int8), scales
