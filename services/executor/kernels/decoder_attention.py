"""The attention phases of the integer decoder: into the cache, and out of it. The arithmetic is `cached_attention`'s.

A piece of attention is a few queries for one kv head, whose heads share what is read of the cache: of one sequence, or
of several that begin with the same blocks, which are then read once for all of them. Each query's numbers are the same
either way: its scores do not know of one another, and its values are added up in the order of the tokens.
"""

from typing import Any, Final, NamedTuple

import numpy as np

from services.executor.kernels.cached_attention import (
    TILE_TOKENS,
    Kind,
    divide_row,
    make_add_values,
    make_score,
    prefetch_line,
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
from services.executor.kernels.team import Words, claim, num_threads, run_length


class Queries(NamedTuple):
    """Some queries on their way through the cache: how many, and the addresses of what belongs to the first of them."""

    rows: int
    taken: int
    """As `take_query` leaves them."""
    facts: int
    states: int
    """As `weigh` keeps them."""
    sums: int
    scores: int
    """A tile for each query: scores, then weights."""


class Keys(NamedTuple):
    """The tokens from `first` to before `end` of a sequence, in one kv head."""

    sequence: int
    head: int
    first: int
    end: int


MAX_PIECE_ROWS: Final = 24
"""Queries, of all heads that share a kv head, in one piece."""


def piece_bytes(rows: int, head_dim: int) -> int:
    """The scratch memory that a piece of so many queries takes."""
    return rows * (head_dim * 8 + 16 + TILE_TOKENS * 4)


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
    return _make_rotate_and_store(kind, record_of, values_offset), _make_attend(kind, values_offset)


def _make_layout(kind: Kind) -> tuple[Any, Any]:
    """Where a token's record is, and the values in it: `cached_attention.record_bytes`, for kernels."""
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
        head_bytes, num_tokens = shape.head_dim * 4, inputs.counts[0]
        run = run_length(team, num_tokens)
        first = claim(team, phase) * run
        while first < num_tokens:
            for row in range(first, min(first + run, num_tokens)):
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
            first = claim(team, phase) * run

    return rotate_and_store


def _make_score(kind: Kind) -> Any:
    score_few, item = make_score(kind), 1 if kind == "int8" else 4

    @nested
    def score(taken: int, facts: int, record: int, vectors: int, out: int, rows: int, later: int) -> None:
        """16 scores of any number of queries, those of each in a tile of its own."""
        for row in range(0, rows, 6):
            query = taken + row * vectors * 16 * item
            score_few(min(6, rows - row), query, facts + row * 8, record, vectors, out + row * 256, 256, later)

    return score


def _make_add_values(kind: Kind) -> Any:
    add_wide, add_narrow, item = make_add_values(kind, 4), make_add_values(kind, 1), 1 if kind == "int8" else 4

    @nested
    def add_values(weights: int, values: int, vectors: int, sums: int, rows: int, num_tokens: int, later: int) -> None:
        """A record's values, weighted, to the sums of any number of queries."""
        for row in range(0, rows, 6):
            count, weight, total = min(6, rows - row), weights + row * 256, sums + row * vectors * 64
            vector = 0
            while vectors - vector >= 4:
                offset, to = vector * 16 * item, total + vector * 64
                row_bytes, ahead = vectors * 16 * item, later + offset
                add_wide(count, weight, 256, values + offset, row_bytes, to, vectors * 64, num_tokens, ahead)
                vector += 4
            while vector < vectors:
                offset, to = vector * 16 * item, total + vector * 64
                row_bytes, ahead = vectors * 16 * item, later + offset
                add_narrow(count, weight, 256, values + offset, row_bytes, to, vectors * 64, num_tokens, ahead)
                vector += 1

    return add_values


def _make_take_queries(kind: Kind) -> Any:
    take_query, item = (take_query_int8, 1) if kind == "int8" else (take_query_float32, 4)

    @nested
    def take_queries(queries: Queries, first: int, head: int, parts: Parts, shape: Shape, work: Work) -> None:
        """The queries of a sequence from row `first` of the batch on, as `score` wants them, that saw nothing yet."""
        group, head_bytes = shape.num_heads // shape.num_kv_heads, shape.head_dim * 4
        for row in range(queries.rows):
            query = work.qkv.ctypes.data + (first + row // group) * shape.qkv_width * 4
            query += (head * group + row % group) * head_bytes
            at, facts = queries.taken + row * shape.head_dim * item, queries.facts + row * 8
            take_query(query, shape.head_dim // 16, parts.scale.ctypes.data, at, facts)
            store_float(queries.states + row * 8, -np.float32(np.inf))
            store_float(queries.states + row * 8 + 4, np.float32(0))
            for i in range(shape.head_dim):
                store_float(queries.sums + row * head_bytes + 4 * i, np.float32(0))

    return take_queries


def _make_look(kind: Kind, values_offset: Any) -> Any:
    score, add_values, is_int8 = _make_score(kind), _make_add_values(kind), kind == "int8"

    @nested
    def record_at(keys: Keys, start: int, layer: Any, shape: Shape, inputs: Inputs) -> Any:
        """The record of the tokens from `start` on."""
        of_head = keys.head * (shape.block_size // 16) * 2 * values_offset(shape)
        return layer.cache + inputs.records[keys.sequence, start // 16] + of_head

    @nested
    def look(
        queries: Queries,
        keys: Keys,
        following: Keys,
        far: Keys,
        visible: int,
        group: int,
        layer: Any,
        shape: Shape,
        inputs: Inputs,
    ) -> None:
        """Some queries look at some tokens, tile by tile; the tile after each is brought near meanwhile.

        The first `group` queries see `visible` tokens of the sequence, the next `group` one more, and so on.
        """
        vectors, half = shape.head_dim // 16, values_offset(shape)
        for tile in range(keys.first, keys.end, 64):
            end, later_keys, later_tile = min(tile + 64, keys.end), following, following.first
            if tile + 64 < keys.end:
                later_keys, later_tile = keys, tile + 64
            for start in range(tile, end, 16):
                record = record_at(keys, start, layer, shape, inputs)
                later, later_start = record, later_tile + start - tile
                if later_start < later_keys.end:
                    later = record_at(later_keys, later_start, layer, shape, inputs)
                if start < far.end:
                    distant = record_at(far, start, layer, shape, inputs)
                    prefetch_line(distant)
                    prefetch_line(distant + half)
                    prefetch_line(distant + 2 * half - 64)
                at = queries.scores + (start - tile) * 4
                score(queries.taken, queries.facts, record, vectors, at, queries.rows, later)
            for row in range(queries.rows):
                scores, sums = queries.scores + row * 256, queries.sums + row * vectors * 64
                weigh(scores, visible + row // group - tile, queries.states + row * 8, sums, vectors)
            for start in range(tile, end, 16):
                values = record_at(keys, start, layer, shape, inputs) + half
                later, later_start = values, later_tile + start - tile
                if later_start < later_keys.end:
                    later = record_at(later_keys, later_start, layer, shape, inputs) + half
                at = queries.scores + (start - tile) * 4
                if is_int8:
                    prefetch_line(later + half - 64)
                    prefetch_line(later - 64)
                    scale_weights(at, 256, values + half - 64, queries.rows)
                add_values(at, values, vectors, queries.sums, queries.rows, min(16, end - start), later)

    return look


@nested
def _wide(number: int) -> Any:
    """A number of an array as Python's are: the parts of a tuple must be of one type wherever it is made."""
    return np.int64(number)


@nested
def _rows_of(queries: Queries, first: int, rows: int, head_dim: int, item: int) -> Queries:
    """Some of the queries."""
    return Queries(
        rows,
        queries.taken + first * head_dim * item,
        queries.facts + first * 8,
        queries.states + first * 8,
        queries.sums + first * head_dim * 4,
        queries.scores + first * 256,
    )


@nested
def _first_keys(number: int, shape: Shape, inputs: Inputs) -> Keys:
    """What piece `number`, counted over all kv heads, looks at first; nothing if there is no such piece."""
    if number >= inputs.counts[1] * shape.num_kv_heads:
        return Keys(0, 0, 0, 0)
    first_member, _, shared = inputs.pieces[number // shape.num_kv_heads]
    sequence, _, count, position = inputs.members[first_member]
    end = shared if shared > 0 else position + count
    return Keys(_wide(sequence), number % shape.num_kv_heads, 0, _wide(end))


@nested
def _own_keys(number: int, head: int, shared: int, inputs: Inputs) -> Keys:
    """What a member looks at by itself."""
    sequence, _, count, position = inputs.members[number]
    return Keys(_wide(sequence), head, _wide(shared), _wide(position + count))


@nested
def _num_rows(piece: int, group: int, inputs: Inputs) -> int:
    """Queries of a piece, of all heads of a group."""
    rows = 0
    for number in range(inputs.pieces[piece, 0], inputs.pieces[piece, 1]):
        rows += inputs.members[number, 2] * group
    return rows


def _make_attend(kind: Kind, values_offset: Any) -> Any:
    take_queries, look = _make_take_queries(kind), _make_look(kind, values_offset)
    item = 1 if kind == "int8" else 4

    @nested
    def finish(queries: Queries, first: int, head: int, shape: Shape, work: Work) -> None:
        """The results of a sequence's queries."""
        group, head_bytes = shape.num_heads // shape.num_kv_heads, shape.head_dim * 4
        for row in range(queries.rows):
            out = (first + row // group) * shape.num_heads + head * group + row % group
            out = work.attended.ctypes.data + out * head_bytes
            divide_row(queries.sums + row * head_bytes, shape.head_dim // 16, queries.states + row * 8, out)

    @nested
    def attend_piece(
        queries: Queries,
        piece: int,
        head: int,
        following: Keys,
        parts: Parts,
        layer: Any,
        shape: Shape,
        inputs: Inputs,
        work: Work,
    ) -> None:
        """First what all members begin with, for all at once; then each member's own."""
        group, row = shape.num_heads // shape.num_kv_heads, 0
        first_member, end_member, shared = inputs.pieces[piece]
        for number in range(first_member, end_member):
            _, first, count, _ = inputs.members[number]
            own = _rows_of(queries, row, count * group, shape.head_dim, item)
            take_queries(own, first, head, parts, shape, work)
            row += count * group
        if shared > 0:
            keys = Keys(_wide(inputs.members[first_member, 0]), head, 0, _wide(shared))
            its_own = _own_keys(first_member, head, shared, inputs)
            look(queries, keys, its_own, following, shared, queries.rows, layer, shape, inputs)
        row = 0
        for number in range(first_member, end_member):
            _, first, count, position = inputs.members[number]
            own = _rows_of(queries, row, count * group, shape.head_dim, item)
            later = following
            if number + 1 < end_member:
                later = _own_keys(number + 1, head, shared, inputs)
            keys = _own_keys(number, head, shared, inputs)
            look(own, keys, later, following, position + 1, group, layer, shape, inputs)
            finish(own, first, head, shape, work)
            row += count * group

    @nested
    def attend(
        team: Words, phase: int, thread: int, parts: Parts, layer: Any, shape: Shape, inputs: Inputs, work: Work
    ) -> None:
        """All pieces, each for each kv head. What comes next is claimed before, so that its keys can be brought near.

        A thread takes a piece's kv heads one after the other if there are pieces enough for all, since a block's heads
        lie side by side.
        """
        group, kv_heads, num_pieces = shape.num_heads // shape.num_kv_heads, shape.num_kv_heads, inputs.counts[1]
        run = kv_heads if num_pieces >= 4 * num_threads(team) else 1
        number = claim(team, phase) * run
        end = number + run
        while number < num_pieces * kv_heads:
            following = number + 1
            if following == end:
                following = claim(team, phase) * run
                end = following + run
            rows = _num_rows(number // kv_heads, group, inputs)
            taken = work.scratch.ctypes.data + thread * work.scratch.shape[1]
            facts = taken + rows * shape.head_dim * 4
            sums = facts + rows * 16
            queries = Queries(rows, taken, facts, facts + rows * 8, sums, sums + rows * shape.head_dim * 4)
            later = _first_keys(following, shape, inputs)
            attend_piece(queries, number // kv_heads, number % kv_heads, later, parts, layer, shape, inputs, work)
            number = following

    return attend
