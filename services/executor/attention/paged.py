"""The attention backend over the kernels."""

from torch import Tensor

from services.executor.batch import ForwardBatch
from services.executor.kernels.paged_attention import paged_attention
from services.executor.kernels.rotary import RotaryTable, rotate_and_store
from services.executor.kv_cache import LayerCache


class PagedAttention:
    """Rotates and stores, then attends over the blocks where they lie."""

    def __init__(self, rotary: RotaryTable, scale: float) -> None:
        self._rotary = rotary
        self._scale = scale

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        """What each token gathered, [T, heads, head_dim]."""
        turned = rotate_and_store(
            q,
            k,
            v,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            table=self._rotary,
            key_cache=cache.key,
            value_cache=cache.value,
        )
        return paged_attention(
            turned,
            cache.key,
            cache.value,
            query_starts=batch.query_starts,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            scale=self._scale,
        )
