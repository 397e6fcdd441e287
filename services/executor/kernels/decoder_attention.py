"""The attention phases of the integer decoder: into the cache, and out of it. The arithmetic is `cached_attention`'s.

A piece of attention is a few queries of one sequence for one kv head, whose heads share what is read of the cache.
"""

from typing import Any, Final

import numpy as np

from services.executor.kernels.cached_attention import (
    Kind,
    divide_row,
    make_add_values,
    make_score,
    prefetch_record,
    rotate_head,
    scale_weights,
    store_key_float32,
    store_key_int8,
    store_value_float32,
    store_value_int8,
    take_query_float32,
    take_query_int8,
    weigh,
)
from services.executor.kernels.decoder_data import Inputs, Parts, Shape, Work
from services.executor.kernels.jit import Floats, nested
from services.executor.kernels.memory import load_float, store_float
from services.executor.kernels.team import Words, claim

MAX_PIECE_ROWS: Final = 24
"""Queries, of all heads that share a kv head, in one piece."""


def piece_bytes(rows: int, head_dim: int, max_tokens: int) -> int:
    """The scratch memory that a piece of so many queries takes."""
    return rows * (head_dim * 8 + 16 + 4 * (max_tokens + 16))


@nested
def _normalize_head(x: int, weight: int, head_dim: int, facts: Floats) -> None:
    """RMS norm of one head in place: the squares in order."""
    total = np.float32(0)
    for i in range(head_dim):
        number = load_float(x + 4 * i)
        total += number * number
    factor = np.float32(1) / np.sqrt(total * facts[0] + facts[1])
    for i in range(head_dim):
        store_float(x + 4 * i, load_float(x + 4 * i) * factor * load_float(weight + 4 * i))


@nested
def _rotate_short(x: int, cos: int, sin: int, half: int) -> None:
    """`rotate_head` for heads whose halves are no whole vectors."""
    for i in range(half):
        a, b = load_float(x + 4 * i), load_float(x + 4 * (half + i))
        c, s = load_float(cos + 4 * i), load_float(sin + 4 * i)
        store_float(x + 4 * i, a * c - b * s)
        store_float(x + 4 * (half + i), b * c + a * s)


@nested
def _turn(x: int, row: int, parts: Parts, layer: Any, shape: Shape, inputs: Inputs) -> None:
    """Norms, where the family has them, and rotary embedding of one token's q and k."""
    half = shape.head_dim // 2
    cos = parts.cos.ctypes.data + inputs.positions[row] * half * 4
    sin = parts.sin.ctypes.data + inputs.positions[row] * half * 4
    for head in range(shape.num_heads + shape.num_kv_heads):
        at = x + head * shape.head_dim * 4
        if layer.q_norm:
            norm = layer.q_norm if head < shape.num_heads else layer.k_norm
            _normalize_head(at, norm, shape.head_dim, parts.head_norm_facts)
        if half % 16 == 0:
            rotate_head(at, cos, sin, half // 16)
        else:
            _rotate_short(at, cos, sin, half)


def make_attention(kind: Kind) -> tuple[Any, Any]:
    """`rotate_and_store(team, phase, …)` and `attend(team, phase, thread, …)` for one kind of cache."""
    record_of, values_offset = _make_layout(kind)
    return _make_rotate_and_store(kind, record_of, values_offset), _make_attend(kind, record_of, values_offset)


def _make_layout(kind: Kind) -> tuple[Any, Any]:
    """Where records are, and the values in them: `cached_attention.record_bytes`, for kernels."""
    item, steps = (1, 64) if kind == "int8" else (4, 0)

    @nested
    def values_offset(shape: Shape) -> int:
        return 16 * shape.head_dim * item + steps

    @nested
    def record_of(layer: Any, shape: Shape, block: int, head: int, offset: int) -> Any:
        number = (block * shape.num_kv_heads + head) * (shape.block_size // 16) + offset // 16
        return layer.cache + number * 2 * values_offset(shape)

    return record_of, values_offset


def _make_rotate_and_store(kind: Kind, record_of: Any, values_offset: Any) -> Any:
    store_key = store_key_int8 if kind == "int8" else store_key_float32
    store_value = store_value_int8 if kind == "int8" else store_value_float32

    @nested
    def rotate_and_store(
        team: Words, phase: int, parts: Parts, layer: Any, shape: Shape, inputs: Inputs, work: Work
    ) -> None:
        head_bytes = shape.head_dim * 4
        row = claim(team, phase)
        while row < inputs.counts[0]:
            x = work.qkv.ctypes.data + row * shape.qkv_width * 4
            _turn(x, row, parts, layer, shape, inputs)
            slot = inputs.slot_mapping[row]
            block, offset = slot // shape.block_size, slot % shape.block_size
            for head in range(shape.num_kv_heads):
                record = record_of(layer, shape, block, head, offset)
                key = x + (shape.num_heads + head) * head_bytes
                value = key + shape.num_kv_heads * head_bytes
                store_key(key, shape.head_dim // 16, record, offset % 16)
                store_value(value, shape.head_dim // 16, record + values_offset(shape), offset % 16)
            row = claim(team, phase)

    return rotate_and_store


def _make_score(kind: Kind) -> Any:
    score_few, item = make_score(kind), 1 if kind == "int8" else 4

    @nested
    def score(taken: int, facts: int, record: int, vectors: int, out: int, stride: int, rows: int) -> None:
        """16 scores of any number of queries."""
        for row in range(0, rows, 6):
            query = taken + row * vectors * 16 * item
            score_few(min(6, rows - row), query, facts + row * 8, record, vectors, out + row * stride, stride)

    return score


def _make_add_values(kind: Kind) -> Any:
    add_wide, add_narrow, item = make_add_values(kind, 4), make_add_values(kind, 1), 1 if kind == "int8" else 4

    @nested
    def add_values(weights: int, stride: int, values: int, vectors: int, sums: int, rows: int, num_tokens: int) -> None:
        """A record's values, weighted, to the sums of any number of queries."""
        for row in range(0, rows, 6):
            count, weight, total = min(6, rows - row), weights + row * stride, sums + row * vectors * 64
            vector = 0
            while vectors - vector >= 4:
                at, to = values + vector * 16 * item, total + vector * 64
                add_wide(count, weight, stride, at, vectors * 16 * item, to, vectors * 64, num_tokens)
                vector += 4
            while vector < vectors:
                at, to = values + vector * 16 * item, total + vector * 64
                add_narrow(count, weight, stride, at, vectors * 16 * item, to, vectors * 64, num_tokens)
                vector += 1

    return add_values


def _make_take_queries(kind: Kind) -> Any:
    take_query, item = (take_query_int8, 1) if kind == "int8" else (take_query_float32, 4)

    @nested
    def take_queries(
        taken: int, facts: int, sums: int, first: int, rows: int, head: int, parts: Parts, shape: Shape, work: Work
    ) -> None:
        """The queries of a piece as `score` wants them, and sums of zero."""
        group, head_bytes = shape.num_heads // shape.num_kv_heads, shape.head_dim * 4
        for row in range(rows):
            query = work.qkv.ctypes.data + (first + row // group) * shape.qkv_width * 4
            query += (head * group + row % group) * head_bytes
            at = taken + row * shape.head_dim * item
            take_query(query, shape.head_dim // 16, parts.scale.ctypes.data, at, facts + row * 8)
            for i in range(shape.head_dim):
                store_float(sums + row * head_bytes + 4 * i, np.float32(0))

    return take_queries


def _make_attend(kind: Kind, record_of: Any, values_offset: Any) -> Any:
    take_queries, score, add_values = _make_take_queries(kind), _make_score(kind), _make_add_values(kind)
    is_int8 = kind == "int8"

    @nested
    def attend(
        team: Words, phase: int, thread: int, parts: Parts, layer: Any, shape: Shape, inputs: Inputs, work: Work
    ) -> None:
        vectors, head_bytes = shape.head_dim // 16, shape.head_dim * 4
        group = shape.num_heads // shape.num_kv_heads
        piece = claim(team, phase)
        while piece < inputs.counts[1] * shape.num_kv_heads:
            head = piece % shape.num_kv_heads
            sequence, first, count, position = inputs.pieces[piece // shape.num_kv_heads]
            rows, seen = count * group, position + count
            stride = (seen + 15) // 16 * 64
            taken = work.scratch.ctypes.data + thread * work.scratch.shape[1]
            facts = taken + rows * head_bytes
            totals = facts + rows * 8
            sums = totals + rows * 8
            scores = sums + rows * head_bytes
            take_queries(taken, facts, sums, first, rows, head, parts, shape, work)
            for start in range(0, seen, 16):
                block = inputs.block_tables[sequence, start // shape.block_size]
                record = record_of(layer, shape, block, head, start % shape.block_size)
                ahead = start + 64
                if ahead < seen:
                    block = inputs.block_tables[sequence, ahead // shape.block_size]
                    prefetch_record(record_of(layer, shape, block, head, ahead % shape.block_size), vectors)
                score(taken, facts, record, vectors, scores + start * 4, stride, rows)
            for row in range(rows):
                weigh(scores + row * stride, (seen + 15) // 16, position + row // group + 1, totals + row * 4)
            for start in range(0, seen, 16):
                block = inputs.block_tables[sequence, start // shape.block_size]
                values = record_of(layer, shape, block, head, start % shape.block_size) + values_offset(shape)
                if is_int8:
                    scale_weights(scores + start * 4, stride, values + 16 * shape.head_dim, rows)
                add_values(scores + start * 4, stride, values, vectors, sums, rows, min(16, seen - start))
            for row in range(rows):
                out = (first + row // group) * shape.num_heads + head * group + row % group
                out = work.attended.ctypes.data + out * head_bytes
                divide_row(sums + row * head_bytes, vectors, totals + row * 4, out)
            piece = claim(team, phase)

    return attend
