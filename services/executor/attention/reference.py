"""Attention as the papers write it: whole sequences, dense scores, a mask. The truth that backends are held to.

Plain torch in float64, no kernels, no care for speed. It gives the numbers of the formula, but a row's last bit may
depend on its neighbours, so it is for comparison only.
"""

import itertools

import torch
from torch import Tensor

from services.executor.batch import ForwardBatch
from services.executor.kernels.rotary import RotaryTable
from services.executor.kv_cache import LayerCache


class ReferenceAttention:
    """Gathers each sequence into one piece and attends to it."""

    def __init__(self, rotary: RotaryTable, scale: float) -> None:
        self._rotary = rotary
        self._scale = scale

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        """What each token gathered, [T, heads, head_dim]."""
        block_size = cache.value.shape[2]
        blocks, offsets = batch.slot_mapping // block_size, batch.slot_mapping % block_size
        cache.key[blocks, :, :, offsets] = self._rotated(k, batch.positions)
        cache.value[blocks, :, offsets] = v
        q = self._rotated(q, batch.positions)
        rows = [
            self._attend(q[first:end], cache, batch.block_tables[row], int(batch.context_lens[row]))
            for row, (first, end) in enumerate(itertools.pairwise(batch.query_starts.tolist()))
        ]
        return torch.cat(rows)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x as complex numbers, times the unit vectors of their angles."""
        pairs = torch.complex(*x.double().chunk(2, dim=-1))
        turns = torch.complex(self._rotary.cos[positions].double(), self._rotary.sin[positions].double())
        turned = pairs * turns.unsqueeze(1)
        return torch.cat((turned.real, turned.imag), dim=-1).float()

    def _attend(self, q: Tensor, cache: LayerCache, block_table: Tensor, length: int) -> Tensor:
        """The last `len(q)` tokens of a sequence look at all of its `length` tokens that are not later."""
        group = q.shape[1] // cache.key.shape[1]
        keys, values = (
            # [heads, length, head_dim]
            part[block_table].transpose(0, 1).flatten(1, 2)[:, :length].double().repeat_interleave(group, dim=0)
            for part in (cache.key.transpose(2, 3), cache.value)
        )
        scores = torch.einsum("qhd,hkd->hqk", q.double(), keys) * self._scale
        is_later = torch.ones(len(q), length, dtype=torch.bool).triu(length - len(q) + 1)
        weights = scores.masked_fill(is_later, -torch.inf).softmax(-1)
        return torch.einsum("hqk,hkd->qhd", weights, values).float()
