"""The supported families with weights and activations in integers, each step one call of a compiled kernel.

Owns how a model's weights become the kernel's arrays, and a batch its inputs. The arithmetic is `kernels.decoder`'s.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.executor.attention.sharing import Member, shared_pieces
from services.executor.batch import ForwardBatch
from services.executor.kernels.cached_attention import TOKENS, record_bytes
from services.executor.kernels.decoder import NUM_PHASES_PER_LAYER, decode_float32, decode_int8
from services.executor.kernels.decoder_attention import MAX_PIECE_ROWS, piece_bytes
from services.executor.kernels.decoder_data import PHASES, Inputs, Layer, Parts, Shape, Weight, Work
from services.executor.kernels.grouped_linear import PANEL, Bits, pack, wide_bytes
from services.executor.kernels.quantize import GROUP
from services.executor.kernels.rotary import RotaryTable
from services.executor.kernels.team import Team
from services.executor.kv_cache import RecordCache
from services.executor.memory import untouched
from services.executor.quantization.groups import Groups, joined
from services.executor.weights import Weights
from shared.messages import ExecutorCapacity
from shared.models.config import ModelConfig

Format = Literal["stored", "int4", "int8"]
"""Groups of 4 or 8 bits as they are stored, all else in 8; layers in 4 bits; everything in 8 bits."""

_KERNELS: Final = {"int8": decode_int8, "float32": decode_float32}
_TOKENS_AT_ONCE: Final = 48
"""In the phase of gate and up."""
_PADDED: Final = 64
"""Bytes that vectors are aligned to, and floats after a bias that a whole panel reads."""


class IntegerModel:
    """A model whose steps a team of threads computes. Reads all of its weights when it is made."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        table: RotaryTable,
        cache: RecordCache,
        *,
        weight_format: Format,
        capacity: ExecutorCapacity,
        num_threads: int,
    ) -> None:
        self._owned: list[Any] = []  # what the addresses point into
        self._capacity = capacity
        self._vocab_size = config.vocab_size
        self._group = config.num_heads // config.num_kv_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._block_size = capacity.block_size
        self._num_shares = -(-2 * num_threads // config.num_kv_heads)
        loader = _Loader(weights, weight_format, self._owned)
        layers = np.zeros(config.num_layers, Layer)
        for number, cached in enumerate(cache.layers):
            _load_layer(layers[number], loader, config, f"model.layers.{number}")
            layers[number]["cache"] = cached.data_ptr()
        self._cache = cache
        shape = Shape(
            hidden_groups=config.hidden_size // GROUP,
            intermediate_groups=config.intermediate_size // GROUP,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=capacity.block_size,
            qkv_width=_whole_panels((config.num_heads + 2 * config.num_kv_heads) * config.head_dim),
            vocab_size=_whole_panels(config.vocab_size),
        )
        self._inputs = _make_inputs(capacity)
        self._work = _make_work(capacity, shape, num_threads)
        arguments = (_load_parts(loader, config, table), layers, shape, self._inputs, self._work)
        self._team = Team(
            _KERNELS[cache.kind],
            arguments,
            num_threads=num_threads,
            num_phases=NUM_PHASES_PER_LAYER * config.num_layers + 3,
        )

    def __call__(self, batch: ForwardBatch, kv_cache: RecordCache) -> Tensor:
        """Logits [S, vocabulary] float32 of the batch's `logits_rows`, to be used before the next call."""
        assert kv_cache is self._cache, "the cache is part of what was compiled"
        inputs = self._inputs
        num_tokens, num_logits = len(batch.token_ids), len(batch.logits_rows)
        inputs.token_ids[:num_tokens] = batch.token_ids.numpy()
        inputs.positions[:num_tokens] = batch.positions.numpy()
        inputs.slot_mapping[:num_tokens] = batch.slot_mapping.numpy()
        inputs.logits_rows[:num_logits] = batch.logits_rows.numpy()
        self._find_records(batch.block_tables.numpy())
        num_pieces = self._cut(batch)
        inputs.counts[:] = num_tokens, num_pieces, num_logits
        self._team.run()
        return torch.from_numpy(self._work.logits[:num_logits, : self._vocab_size])

    @property
    def seconds(self) -> float:
        """What the compiled call of the last step took."""
        return self._team.seconds

    def take_shares(self) -> dict[str, float]:
        """What share of the time of steps each kind of phase took since this was asked last."""
        spent = self._work.spent[:-1]
        shares = dict(zip(PHASES, (spent / max(1, spent.sum())).tolist(), strict=True))
        spent[:] = 0
        return shares

    def close(self) -> None:
        """End the threads."""
        self._team.close()

    def _find_records(self, tables: npt.NDArray[np.int32]) -> None:
        """Say where the records of each sequence's blocks are."""
        each, per_block = record_bytes(self._cache.kind, self._head_dim), self._block_size // TOKENS
        blocks = tables.astype(np.int64) * (self._num_kv_heads * per_block * each)
        records = blocks[:, :, np.newaxis] + np.arange(per_block) * each
        self._inputs.records[: len(tables), : tables.shape[1] * per_block] = records.reshape(len(tables), -1)

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
            self._inputs.pieces[place] = number, number + len(of_piece), num_shared
            self._inputs.members[number : number + len(of_piece)] = np.array(of_piece)
            number += len(of_piece)
        return len(pieces) + len(alone)


class _Loader:
    """Loads weights and keeps them alive."""

    def __init__(self, weights: Weights, weight_format: Format, owned: list[Any]) -> None:
        self._weights = weights
        self._format = weight_format
        self._owned = owned

    def groups(self, parts: Mapping[str, tuple[int, ...]]) -> Groups:
        return self._weights.load_groups(parts, 4 if self._format == "int4" else None)

    def matrix(self, place: Any, groups: Groups, bias: Tensor | None = None) -> None:
        """Pack a weight, and say in `place` where it is."""
        fits = self._format != "int8" and int(groups.q.max(initial=0)) < 16
        bits: Bits = 4 if fits else 8
        packed = pack(groups.q, groups.scales, groups.offsets, bits).data
        place["address"], place["bits"] = self._aligned(packed), bits
        place["bias"] = 0 if bias is None else self._aligned(torch.nn.functional.pad(bias, (0, _PADDED)))

    def vector(self, name: str, size: int) -> int:
        """The address of a float32 vector."""
        return self._aligned(self._weights.load({name: (size,)}))

    def floats(self, parts: Mapping[str, tuple[int, ...]]) -> Tensor:
        return self._weights.load(parts)

    def skip_if_equal(self, name: str, groups: Groups) -> None:
        """Pass over a copy of a tied weight."""
        self._weights.skip_tied(name, groups)

    def _aligned(self, tensor: Tensor) -> int:
        """Its address in memory of ours, on a cache line."""
        memory = torch.frombuffer(untouched(tensor.nbytes), dtype=torch.uint8)
        memory[: tensor.nbytes] = tensor.contiguous().view(torch.uint8).flatten()
        self._owned.append(memory)
        return memory.data_ptr()


def _load_layer(layer: Any, loader: _Loader, config: ModelConfig, prefix: str) -> None:
    hidden, middle, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    sizes = {"q_proj": config.num_heads * head_dim} | dict.fromkeys(
        ("k_proj", "v_proj"), config.num_kv_heads * head_dim
    )
    qkv = loader.groups({f"{attention}.{name}.weight": (size, hidden) for name, size in sizes.items()})
    qkv_bias = {f"{attention}.{name}.bias": (size,) for name, size in sizes.items()}
    loader.matrix(layer["qkv"], qkv, loader.floats(qkv_bias) if config.attention_bias else None)
    output = loader.groups({f"{attention}.o_proj.weight": (hidden, sizes["q_proj"])})
    output_bias = {f"{attention}.o_proj.bias": (hidden,)}
    loader.matrix(layer["output"], output, loader.floats(output_bias) if config.output_bias else None)
    gate_up = [loader.groups({f"{mlp}.{name}.weight": (middle, hidden)}) for name in ("gate_proj", "up_proj")]
    bias = None
    if config.mlp_bias:
        biases = [loader.floats({f"{mlp}.{name}.bias": (middle,)}) for name in ("gate_proj", "up_proj")]
        bias = torch.stack([each.view(-1, PANEL) for each in biases], dim=1).flatten()
    loader.matrix(layer["gate_up"], _in_turn(*gate_up), bias)
    down_bias = {f"{mlp}.down_proj.bias": (hidden,)}
    down = loader.groups({f"{mlp}.down_proj.weight": (hidden, middle)})
    loader.matrix(layer["down"], down, loader.floats(down_bias) if config.mlp_bias else None)
    layer["input_norm"] = loader.vector(f"{prefix}.input_layernorm.weight", hidden)
    layer["post_attention_norm"] = loader.vector(f"{prefix}.post_attention_layernorm.weight", hidden)
    if config.family == "qwen3":
        layer["q_norm"] = loader.vector(f"{attention}.q_norm.weight", head_dim)
        layer["k_norm"] = loader.vector(f"{attention}.k_norm.weight", head_dim)


def _load_parts(loader: _Loader, config: ModelConfig, table: RotaryTable) -> Parts:
    size = (config.vocab_size, config.hidden_size)
    embedding, head = np.zeros(1, Weight), np.zeros(1, Weight)
    groups = loader.groups({"model.embed_tokens.weight": size})
    loader.matrix(embedding[0], groups)
    if config.tie_word_embeddings:
        loader.skip_if_equal("lm_head.weight", groups)
        head[:] = embedding
    else:
        loader.matrix(head[0], loader.groups({"lm_head.weight": size}))
    return Parts(
        embedding=embedding,
        head=head,
        norm=loader.floats({"model.norm.weight": (config.hidden_size,)}).numpy(),
        norm_facts=np.array([1 / config.hidden_size, config.rms_norm_eps], np.float32),
        head_norm_facts=np.array([1 / config.head_dim, config.rms_norm_eps], np.float32),
        scale=np.array([config.head_dim**-0.5], np.float32),
        cos=table.cos.numpy(),
        sin=table.sin.numpy(),
    )


def _in_turn(first: Groups, second: Groups) -> Groups:
    """Two weights' rows, a panel of the one and a panel of the other in turn."""
    order = np.arange(2 * len(first.q)).reshape(2, -1, PANEL).transpose(1, 0, 2).ravel()
    return joined((first, second)).rows(order)


def _whole_panels(rows: int) -> int:
    return -(-rows // PANEL) * PANEL


def _make_inputs(capacity: ExecutorCapacity) -> Inputs:
    tokens, sequences = capacity.max_step_tokens, capacity.max_slots
    num_blocks = -(-(capacity.max_model_len + 1) // capacity.block_size)
    return Inputs(
        counts=np.zeros(3, np.int64),
        token_ids=np.zeros(tokens, np.int64),
        positions=np.zeros(tokens, np.int64),
        slot_mapping=np.zeros(tokens, np.int64),
        members=np.zeros((tokens, 4), np.int32),
        pieces=np.zeros((tokens, 3), np.int32),
        records=np.zeros((sequences, num_blocks * (capacity.block_size // TOKENS)), np.int64),
        logits_rows=np.zeros(tokens, np.int64),
    )


def _make_work(capacity: ExecutorCapacity, shape: Shape, num_threads: int) -> Work:
    tokens, hidden = capacity.max_step_tokens, shape.hidden_groups * GROUP
    attended = shape.num_heads * shape.head_dim
    widest = max(hidden, attended)
    middle = shape.intermediate_groups * GROUP
    rows = max(MAX_PIECE_ROWS, shape.num_heads // shape.num_kv_heads)
    scratch = max(
        _TOKENS_AT_ONCE * 2 * PANEL * 4 + 2 * wide_bytes(shape.hidden_groups),
        wide_bytes(max(widest, middle) // GROUP),
        piece_bytes(rows, shape.head_dim),
    )
    return Work(
        residual=_lines((tokens, hidden), np.float32),
        delta=_lines((tokens, hidden), np.float32),
        qkv=_lines((tokens, shape.qkv_width), np.float32),
        attended=_lines((tokens, attended), np.float32),
        ints=_lines((tokens, widest), np.int8),
        steps=_lines((tokens, widest // GROUP * 2), np.float32),
        middle_ints=_lines((tokens, middle), np.int8),
        middle_steps=_lines((tokens, middle // GROUP * 2), np.float32),
        logits=_lines((min(tokens, capacity.max_slots + capacity.max_step_drafts), shape.vocab_size), np.float32),
        scratch=_lines((num_threads, -(-scratch // _PADDED) * _PADDED + _PADDED), np.uint8),
        spent=np.zeros(len(PHASES) + 1, np.int64),
    )


def _lines(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros that begin on a cache line, so that threads which write vectors side by side write no line together."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(untouched(size), dtype, math.prod(shape)).reshape(shape)
