"""The supported families with weights and activations in integers, each step one call of a compiled kernel.

Owns how packed weights and a batch become the kernel's inputs. The arithmetic is `kernels.decoder`'s.
"""

import itertools
import math
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.executor.attention.sharing import Member, shared_pieces
from services.executor.batch import ForwardBatch
from services.executor.kernels import cached_attention, grouped_decoder, row_decoder, tiles
from services.executor.kernels.cached_attention import TOKENS
from services.executor.kernels.decoder import NUM_PHASES_PER_LAYER
from services.executor.kernels.decoder_data import (
    ATTENDED,
    HIDDEN,
    MIDDLE,
    PHASES,
    Inputs,
    Layer,
    Parts,
    Shape,
    Weight,
    Work,
)
from services.executor.kernels.decoder_look import MAX_PIECE_ROWS, piece_bytes
from services.executor.kernels.grouped_linear import PANEL, record_bytes, wide_bytes
from services.executor.kernels.jit import Longs
from services.executor.kernels.quantize import GROUP
from services.executor.kernels.rotary import RotaryTable
from services.executor.kernels.row_linear import COLUMNS, blocks_of
from services.executor.kernels.row_linear import TOKENS as TOKENS_OF_TILES
from services.executor.kernels.row_quantize import MIDDLE_BLOCK
from services.executor.kernels.team import Team
from services.executor.kv_cache import RecordCache
from services.executor.memory import untouched
from services.executor.models.packing import Arrays, Format
from shared.messages import ExecutorCapacity
from shared.models.config import ModelConfig

_KERNELS: Final = {
    (False, "int8"): grouped_decoder.decode_int8,
    (False, "float32"): grouped_decoder.decode_float32,
    (True, "int8"): row_decoder.decode_int8,
    (True, "float32"): row_decoder.decode_float32,
}
"""By whether weights have a scale a row, and by the cache's kind."""
_TOKENS_AT_ONCE: Final = 48
"""In the phase of gate and up."""
_LINE: Final = 64
"""Bytes of a cache line."""


class IntegerModel:
    """A model whose steps a team of threads computes, its weights being `packing.packed_arrays`."""

    def __init__(
        self,
        config: ModelConfig,
        arrays: Arrays,
        table: RotaryTable,
        cache: RecordCache,
        *,
        weight_format: Format,
        capacity: ExecutorCapacity,
        num_threads: int,
    ) -> None:
        in_rows = weight_format == "int8"
        self._arrays: Final = arrays  # what the addresses point into
        self._capacity = capacity
        self._vocab_size = config.vocab_size
        self._group = config.num_heads // config.num_kv_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._block_size = capacity.block_size
        self._num_shares = -(-2 * num_threads // config.num_kv_heads)
        layers = np.zeros(config.num_layers, Layer)
        for number, cached in enumerate(cache.layers):
            _load_layer(layers[number], arrays, number)
            layers[number]["cache"] = cached.data_ptr()
        self._cache = cache
        shape = Shape(
            hidden_groups=config.hidden_size // GROUP,
            intermediate_groups=config.intermediate_size // GROUP,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            spread=cached_attention.spread_together(config.head_dim),
            block_size=capacity.block_size,
            qkv_width=_whole_panels((config.num_heads + 2 * config.num_kv_heads) * config.head_dim),
            vocab_size=_whole_panels(config.vocab_size),
            has_tiles=tiles.can_use_tiles(),
            tile_shapes=tiles.SHAPES.ctypes.data,
        )
        self._batch = _make_batch(capacity)
        self._constants = _make_constants(arrays, config, table, cache.kind)
        self._memory = _make_memory(capacity, shape, num_threads, _row_bytes(shape) if in_rows else _group_bytes(shape))
        work = Work(
            **{name: part.ctypes.data for name, part in self._memory._asdict().items()},
            scratch_bytes=self._memory.scratch.shape[1],
        )
        inputs = Inputs(
            **{name: part.ctypes.data for name, part in self._batch._asdict().items()},
            records_per_sequence=self._batch.records.shape[1],
        )
        arguments = (_make_parts(arrays, self._constants), layers, shape, inputs, work)
        self._team = Team(
            _KERNELS[in_rows, cache.kind],
            arguments,
            num_threads=num_threads,
            num_phases=NUM_PHASES_PER_LAYER * config.num_layers + 3,
        )

    def __call__(self, batch: ForwardBatch, kv_cache: RecordCache) -> Tensor:
        """Logits [S, vocabulary] float32 of the batch's `logits_rows`, to be used before the next call."""
        assert kv_cache is self._cache, "the cache is part of what was compiled"
        inputs = self._batch
        num_tokens, num_logits = len(batch.token_ids), len(batch.logits_rows)
        inputs.token_ids[:num_tokens] = batch.token_ids.numpy()
        inputs.positions[:num_tokens] = batch.positions.numpy()
        inputs.slot_mapping[:num_tokens] = batch.slot_mapping.numpy()
        inputs.logits_rows[:num_logits] = batch.logits_rows.numpy()
        self._find_records(batch.block_tables.numpy())
        num_pieces = self._cut(batch)
        inputs.counts[:] = num_tokens, num_pieces, num_logits
        self._team.run()
        return torch.from_numpy(self._memory.logits[:num_logits, : self._vocab_size])

    @property
    def seconds(self) -> float:
        """What the compiled call of the last step took."""
        return self._team.seconds

    def take_shares(self) -> dict[str, float]:
        """What share of the time of steps each kind of phase took since this was asked last."""
        spent = self._memory.spent
        shares = dict(zip(PHASES, (spent / max(1, spent.sum())).tolist(), strict=True))
        spent[:] = 0
        return shares

    def close(self) -> None:
        """End the threads."""
        self._team.close()

    def _find_records(self, tables: npt.NDArray[np.int32]) -> None:
        """Say where the records of each sequence's blocks are."""
        each, per_block = cached_attention.record_bytes(self._cache.kind, self._head_dim), self._block_size // TOKENS
        blocks = tables.astype(np.int64) * (self._num_kv_heads * per_block * each)
        records = blocks[:, :, np.newaxis] + np.arange(per_block) * each
        self._batch.records[: len(tables), : tables.shape[1] * per_block] = records.reshape(len(tables), -1)

    def _cut(self, batch: ForwardBatch) -> int:
        """Cut the attention of a batch into pieces; how many."""
        most = max(1, MAX_PIECE_ROWS // self._group)
        tables = batch.block_tables.numpy()
        members: list[Member] = []
        alone: list[Member] = []
        lengths = batch.context_lens.tolist()
        for sequence, (start, end) in enumerate(itertools.pairwise(batch.query_starts.tolist())):
            for first in range(start, end, most):
                member = Member(sequence, first, min(most, end - first), lengths[sequence] - (end - first))
                (members if end - start < most else alone).append(member)
        pieces = shared_pieces(members, tables, self._block_size, most, self._num_shares)
        number = 0
        for place, (of_piece, num_shared) in enumerate([*pieces, *(([member], 0) for member in alone)]):
            self._batch.pieces[place] = number, number + len(of_piece), num_shared
            self._batch.members[number : number + len(of_piece)] = np.array(of_piece)
            number += len(of_piece)
        return len(pieces) + len(alone)


def _load_layer(layer: Any, arrays: Arrays, number: int) -> None:
    for name, source in (("qkv", HIDDEN), ("output", ATTENDED), ("gate_up", HIDDEN), ("down", MIDDLE)):
        _place(layer[name], arrays, f"layers.{number}.{name}", source)
    for name in ("input_norm", "post_attention_norm", "q_norm", "k_norm"):
        if (norm := arrays.get(f"layers.{number}.{name}")) is not None:
            layer[name] = norm.ctypes.data


def _make_constants(
    arrays: Arrays, config: ModelConfig, table: RotaryTable, kind: cached_attention.Kind
) -> dict[str, npt.NDArray[Any]]:
    """What `Parts` has the addresses of."""
    # Heads that are spread have products that are as many times as large.
    spread = cached_attention.spread_together(config.head_dim) if kind == "int8" else 1
    return {
        "norm": np.array(arrays.get("norm", ()), np.float32),
        "norm_facts": np.array([1 / config.hidden_size, config.rms_norm_eps], np.float32),
        "head_norm_facts": np.array([1 / config.head_dim, config.rms_norm_eps], np.float32),
        "scale": np.array([config.head_dim**-0.5 / spread], np.float32),
        "cos": table.cos.numpy(),
        "sin": table.sin.numpy(),
    }


def _make_parts(arrays: Arrays, constants: dict[str, npt.NDArray[Any]]) -> Parts:
    embedding, head = np.zeros(1, Weight), np.zeros(1, Weight)
    _place(embedding[0], arrays, "embedding", HIDDEN)
    _place(head[0], arrays, "head" if "head" in arrays else "embedding", HIDDEN)
    return Parts(embedding, head, **{name: constant.ctypes.data for name, constant in constants.items()})


def _place(place: Any, arrays: Arrays, name: str, source: int) -> None:
    """Say in `place` where a weight and its bias are, and what it reads."""
    weight, bias = arrays[name], arrays.get(f"{name}.bias")
    place["address"], place["bits"] = weight.ctypes.data, 4 if weight.shape[-1] == record_bytes(4) else 8
    place["source"] = source
    place["bias"] = 0 if bias is None else bias.ctypes.data


def _whole_panels(rows: int) -> int:
    return -(-rows // PANEL) * PANEL


class _Batch(NamedTuple):
    """What `Inputs` has the addresses of."""

    counts: Longs
    token_ids: Longs
    positions: Longs
    slot_mapping: Longs
    members: Longs
    pieces: Longs
    records: Longs
    logits_rows: Longs


def _make_batch(capacity: ExecutorCapacity) -> _Batch:
    tokens, sequences = capacity.max_step_tokens, capacity.max_slots
    num_blocks = -(-(capacity.max_model_len + 1) // capacity.block_size)
    return _Batch(
        counts=np.zeros(3, np.int64),
        token_ids=np.zeros(tokens, np.int64),
        positions=np.zeros(tokens, np.int64),
        slot_mapping=np.zeros(tokens, np.int64),
        members=np.zeros((tokens, 4), np.int64),
        pieces=np.zeros((tokens, 3), np.int64),
        records=np.zeros((sequences, num_blocks * (capacity.block_size // TOKENS)), np.int64),
        logits_rows=np.zeros(tokens, np.int64),
    )


class _Bytes(NamedTuple):
    """What activations take as bytes, and a thread while it multiplies."""

    row: int
    """Bytes of a token's hidden numbers, or of those that attention gives, whichever are more."""
    steps: int
    """Floats beside them."""
    middle_row: int
    middle_steps: int
    beyond: int
    """Rows behind the last token that may be read."""
    scratch: int


class _Memory(NamedTuple):
    """What `Work` has the addresses of."""

    residual: npt.NDArray[np.float32]
    delta: npt.NDArray[np.float32]
    qkv: npt.NDArray[np.float32]
    attended: npt.NDArray[np.float32]
    ints: npt.NDArray[np.int8]
    steps: npt.NDArray[np.float32]
    middle_ints: npt.NDArray[np.int8]
    middle_steps: npt.NDArray[np.float32]
    logits: npt.NDArray[np.float32]
    scratch: npt.NDArray[np.uint8]
    """[threads, bytes]."""
    spent: Longs
    ended: Longs


def _group_bytes(shape: Shape) -> _Bytes:
    groups, middle = max(shape.hidden_groups, shape.num_heads * shape.head_dim // GROUP), shape.intermediate_groups
    scratch = max(
        _TOKENS_AT_ONCE * 2 * PANEL * 4 + 2 * wide_bytes(shape.hidden_groups), wide_bytes(max(groups, middle))
    )
    return _Bytes(groups * GROUP, 2 * groups, middle * GROUP, 2 * middle, 0, scratch)


def _row_bytes(shape: Shape) -> _Bytes:
    widest = blocks_of(max(shape.hidden_groups * GROUP, shape.num_heads * shape.head_dim), 0)
    middle = blocks_of(shape.intermediate_groups * GROUP, MIDDLE_BLOCK)
    return _Bytes(
        widest.num_runs * COLUMNS,
        widest.num_blocks,
        middle.num_runs * COLUMNS,
        middle.num_blocks,
        TOKENS_OF_TILES,
        row_decoder.scratch_bytes(COLUMNS * max(widest.num_runs, middle.num_runs)),
    )


def _make_memory(capacity: ExecutorCapacity, shape: Shape, num_threads: int, of_format: _Bytes) -> _Memory:
    tokens, hidden = capacity.max_step_tokens, shape.hidden_groups * GROUP
    read = tokens + of_format.beyond
    attention_rows = max(MAX_PIECE_ROWS, shape.num_heads // shape.num_kv_heads)
    scratch = max(of_format.scratch, piece_bytes(attention_rows, shape.head_dim))
    return _Memory(
        residual=_lines((tokens, hidden), np.float32),
        delta=_lines((tokens, hidden), np.float32),
        qkv=_lines((tokens, shape.qkv_width), np.float32),
        attended=_lines((tokens, shape.num_heads * shape.head_dim), np.float32),
        ints=_lines((read, of_format.row), np.int8),
        steps=_lines((tokens, of_format.steps), np.float32),
        middle_ints=_lines((read, of_format.middle_row), np.int8),
        middle_steps=_lines((tokens, of_format.middle_steps), np.float32),
        logits=_lines((min(tokens, capacity.max_slots + capacity.max_step_drafts), shape.vocab_size), np.float32),
        scratch=_lines((num_threads, -(-scratch // _LINE) * _LINE + _LINE), np.uint8),
        spent=np.zeros(len(PHASES), np.int64),
        ended=np.zeros(1, np.int64),
    )


def _lines(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros that begin on a cache line, so that threads which write vectors side by side write no line together."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(untouched(size), dtype, math.prod(shape)).reshape(shape)
