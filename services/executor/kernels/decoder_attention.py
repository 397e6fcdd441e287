"""The attention phases of the integer decoder: into the cache, and out of it. The arithmetic is `cached_attention`'s.

A piece of attention is a few queries for one kv head, whose heads share what is read of the cache: of one sequence, or
of several that begin with the same blocks, which are then read once for all of them. Each query's numbers are the same
either way: its scores do not know of one another, and its values are added up in the order of the tokens.
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


def _make_score_records(kind: Kind, record_of: Any) -> Any:
    score = _make_score(kind)

    @nested
    def score_records(
        first: int,
        end: int,
        sequence: int,
        rows: int,
        taken: int,
        facts: int,
        scores: int,
        stride: int,
        head: int,
        layer: Any,
        shape: Shape,
        inputs: Inputs,
    ) -> None:
        """Scores of some queries with the tokens from `first` to before `end` of a sequence."""
        vectors = shape.head_dim // 16
        for start in range(first, end, 16):
            block = inputs.block_tables[sequence, start // shape.block_size]
            record = record_of(layer, shape, block, head, start % shape.block_size)
            ahead = start + 64
            if ahead < end:
                block = inputs.block_tables[sequence, ahead // shape.block_size]
                prefetch_record(record_of(layer, shape, block, head, ahead % shape.block_size), vectors)
            score(taken, facts, record, vectors, scores + start * 4, stride, rows)

    return score_records


def _make_add_records(kind: Kind, record_of: Any, values_offset: Any) -> Any:
    add_values, is_int8 = _make_add_values(kind), kind == "int8"

    @nested
    def add_records(
        first: int,
        end: int,
        sequence: int,
        rows: int,
        scores: int,
        stride: int,
        sums: int,
        head: int,
        layer: Any,
        shape: Shape,
        inputs: Inputs,
    ) -> None:
        """Values of the same tokens, weighted, to the sums of some queries."""
        for start in range(first, end, 16):
            block = inputs.block_tables[sequence, start // shape.block_size]
            values = record_of(layer, shape, block, head, start % shape.block_size) + values_offset(shape)
            if is_int8:
                scale_weights(scores + start * 4, stride, values + 16 * shape.head_dim, rows)
            add_values(scores + start * 4, stride, values, shape.head_dim // 16, sums, rows, min(16, end - start))

    return add_records


@nested
def _measure(piece: int, shape: Shape, inputs: Inputs) -> Any:
    """How many rows a piece has, queries of all heads of a group, and the most tokens that one of them sees."""
    rows, longest = 0, 0
    for number in range(inputs.pieces[piece, 0], inputs.pieces[piece, 1]):
        rows += inputs.members[number, 2] * (shape.num_heads // shape.num_kv_heads)
        longest = max(longest, inputs.members[number, 2] + inputs.members[number, 3])
    return rows, longest


def _make_attend(kind: Kind, record_of: Any, values_offset: Any) -> Any:
    take_queries = _make_take_queries(kind)
    score_records, add_records = _make_score_records(kind, record_of), _make_add_records(kind, record_of, values_offset)
    item = 1 if kind == "int8" else 4

    @nested
    def score_members(
        piece: int,
        taken: int,
        facts: int,
        totals: int,
        scores: int,
        stride: int,
        head: int,
        layer: Any,
        shape: Shape,
        inputs: Inputs,
    ) -> None:
        """Each sequence's scores with what it does not share, and weights from all of its scores."""
        group, row = shape.num_heads // shape.num_kv_heads, 0
        first_member, end_member, shared = inputs.pieces[piece]
        for number in range(first_member, end_member):
            sequence, _, count, position = inputs.members[number]
            seen, rows, its_scores = position + count, count * group, scores + row * stride
            at, its_facts = taken + row * shape.head_dim * item, facts + row * 8
            score_records(shared, seen, sequence, rows, at, its_facts, its_scores, stride, head, layer, shape, inputs)
            for query in range(rows):
                visible, total = position + query // group + 1, totals + (row + query) * 4
                weigh(its_scores + query * stride, (seen + 15) // 16, visible, total)
            row += rows

    @nested
    def add_members(
        piece: int,
        totals: int,
        sums: int,
        scores: int,
        stride: int,
        head: int,
        layer: Any,
        shape: Shape,
        inputs: Inputs,
        work: Work,
    ) -> None:
        """Each sequence's values that it does not share, and the results."""
        group, head_bytes, row = shape.num_heads // shape.num_kv_heads, shape.head_dim * 4, 0
        first_member, end_member, shared = inputs.pieces[piece]
        for number in range(first_member, end_member):
            sequence, first, count, position = inputs.members[number]
            seen, rows, its_sums = position + count, count * group, sums + row * head_bytes
            its_scores = scores + row * stride
            add_records(shared, seen, sequence, rows, its_scores, stride, its_sums, head, layer, shape, inputs)
            for query in range(rows):
                out = (first + query // group) * shape.num_heads + head * group + query % group
                out = work.attended.ctypes.data + out * head_bytes
                divide_row(its_sums + query * head_bytes, shape.head_dim // 16, totals + (row + query) * 4, out)
            row += rows

    @nested
    def attend(
        team: Words, phase: int, thread: int, parts: Parts, layer: Any, shape: Shape, inputs: Inputs, work: Work
    ) -> None:
        head_bytes, group = shape.head_dim * 4, shape.num_heads // shape.num_kv_heads
        number = claim(team, phase)
        while number < inputs.counts[1] * shape.num_kv_heads:
            piece, head = number // shape.num_kv_heads, number % shape.num_kv_heads
            first_member, end_member, shared = inputs.pieces[piece]
            rows, longest = _measure(piece, shape, inputs)
            stride = (longest + 15) // 16 * 64
            taken = work.scratch.ctypes.data + thread * work.scratch.shape[1]
            facts = taken + rows * head_bytes
            totals = facts + rows * 8
            sums = totals + rows * 8
            scores = sums + rows * head_bytes
            row = 0
            for member in range(first_member, end_member):
                _, first, count, _ = inputs.members[member]
                at, its_facts, its_sums = taken + row * shape.head_dim * item, facts + row * 8, sums + row * head_bytes
                take_queries(at, its_facts, its_sums, first, count * group, head, parts, shape, work)
                row += count * group
            # First what all of them begin with, for all at once; then each sequence's own.
            leader = inputs.members[first_member, 0]
            score_records(0, shared, leader, rows, taken, facts, scores, stride, head, layer, shape, inputs)
            score_members(piece, taken, facts, totals, scores, stride, head, layer, shape, inputs)
            add_records(0, shared, leader, rows, scores, stride, sums, head, layer, shape, inputs)
            add_members(piece, totals, sums, scores, stride, head, layer, shape, inputs, work)
            number = claim(team, phase)

    return attend
