"""One step's input to the model, as tensors. Owns how rows become a batch; the slots' state is in `slots`."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.executor.rows import Rows
from services.executor.slots import SlotTable


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of R rows (sequences), of which S want logits. Tokens of a row lie together, rows in plan order."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64: each token's place in its sequence, from 0."""
    slot_mapping: Tensor
    """[T] int64: where its key and value go, `block * block_size + offset`."""
    query_starts: Tensor
    """[R + 1] int32: row r computes tokens `query_starts[r] … query_starts[r + 1] - 1`."""
    context_lens: Tensor
    """[R] int32: tokens that the row's last token sees, itself included."""
    block_tables: Tensor
    """[R, max_blocks] int32: the blocks of the row's context in order; what lies beyond them means nothing."""
    logits_rows: Tensor
    """[S] int64: the tokens (indices into T) whose logits are wanted, a row's together."""


def build_batch(slots: SlotTable, rows: Rows, block_size: int) -> ForwardBatch:
    """The batch of a step's rows, of which there must be some. A row that samples has logits after its last known token
    and after each of its guesses."""
    ends = rows.starts + rows.counts
    query_starts = np.zeros(len(ends) + 1, np.int32)
    np.cumsum(rows.counts, out=query_starts[1:])
    token_slots = np.repeat(rows.slots, rows.counts)
    positions = np.arange(query_starts[-1]) + np.repeat(rows.starts - query_starts[:-1], rows.counts)
    blocks = slots.block_ids[token_slots, positions // block_size].astype(np.int64)
    num_table_blocks = -(-int(ends.max()) // block_size)
    return ForwardBatch(
        token_ids=torch.from_numpy(slots.token_ids[token_slots, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(blocks * block_size + positions % block_size),
        query_starts=torch.from_numpy(query_starts),
        context_lens=torch.from_numpy(ends.astype(np.int32)),
        block_tables=torch.from_numpy(slots.block_ids[rows.slots, :num_table_blocks]),
        logits_rows=torch.from_numpy(_logits_rows(query_starts, rows)),
    )


def _logits_rows(query_starts: npt.NDArray[np.int32], rows: Rows) -> npt.NDArray[np.int64]:
    last = query_starts[1:][rows.sampled].astype(np.int64) - 1
    if not rows.num_drafted.any():
        return last
    wanted = rows.num_drafted.astype(np.int64) + 1
    ends = np.cumsum(wanted)
    return np.repeat(last - ends + 1, wanted) + np.arange(ends[-1])
