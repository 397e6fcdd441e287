"""What a model asks of an attention backend."""

from typing import Protocol

from torch import Tensor

from services.executor.batch import ForwardBatch
from services.executor.kv_cache import LayerCache


class Attention(Protocol):
    """Attention of one batch in one layer. One object serves all layers; it is made with the rotary table and scale.

    q and k arrive before rotary embedding, so that a backend can rotate and store in one pass. All keys and values of
    the batch are stored before any token looks: rows may share blocks.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        """What each token gathered, [T, heads, head_dim] float32 contiguous.

        q [T, heads, head_dim], k and v [T, kv_heads, head_dim] float32, each token contiguous.
        """
        ...
