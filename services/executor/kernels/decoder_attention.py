"""The attention phases of the integer decoder: into the cache, and out of it. The arithmetic is `cached_attention`'s.

A piece of attention is a few queries for one kv head, whose heads share what is read of the cache: of one sequence, or
of several that begin with the same blocks, which are then read once for all of them. Each query's numbers are the same
either way: its scores do not know of one another, and its values are added up in the order of the tokens.
"""

from typing import Any

import numpy as np

from services.executor.kernels.cached_attention import (
    QUERY_BYTES,
    Kind,
    divide_row,
    rotate_head,
    spread_head,
    store_key_float32,
    store_key_int8,
    store_value_float32,
    store_value_int8,
    take_query_float32,
    take_query_int8,
)
from services.executor.kernels.decoder_data import (
    Inputs,
    Parts,
    Shape,
    Work,
    count_pieces,
    count_tokens,
    long_at,
    member_at,
    piece_at,
)
from services.executor.kernels.decoder_look import Keys, Queries, make_layout, make_look, place_queries
from services.executor.kernels.jit import nested
from services.executor.kernels.memory import load_float, store_float
from services.executor.kernels.team import Words, claim, num_threads, run_length


@nested
def _normalize_head(x: int, weight: int, head_dim: int, facts: int) -> None:
    """RMS norm of one head in place: the squares in order."""
    total = np.float32(0)
    for i in range(head_dim):
        number = load_float(x + 4 * i)
        total += number * number
    factor = np.float32(1) / np.sqrt(total * load_float(facts) + load_float(facts + 4))
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
def _turn(x: int, row: int, parts: Parts, layer: Any, shape: Shape, inputs: Inputs, is_spread: bool) -> None:
    """Norms, where the family has them, rotary embedding, and for bytes the spreading, of one token's q and k."""
    half = shape.head_dim // 2
    cos = parts.cos + long_at(inputs.positions, row) * half * 4
    sin = parts.sin + long_at(inputs.positions, row) * half * 4
    for head in range(shape.num_heads + shape.num_kv_heads):
        at = x + head * shape.head_dim * 4
        if layer.q_norm:
            norm = layer.q_norm if head < shape.num_heads else layer.k_norm
            _normalize_head(at, norm, shape.head_dim, parts.head_norm_facts)
        if half % 16 == 0:
            rotate_head(at, cos, sin, half // 16)
        else:
            _rotate_short(at, cos, sin, half)
        if is_spread:
            spread_head(at, shape.head_dim // 16, shape.spread // 16)


def make_attention(kind: Kind) -> tuple[Any, Any]:
    """`rotate_and_store(team, phase, …)` and `attend(team, phase, thread, …)` for one kind of cache."""
    record_of, values_offset = make_layout(kind)
    return _make_rotate_and_store(kind, record_of, values_offset), _make_attend(kind, values_offset)


def _make_rotate_and_store(kind: Kind, record_of: Any, values_offset: Any) -> Any:
    store_key = store_key_int8 if kind == "int8" else store_key_float32
    store_value = store_value_int8 if kind == "int8" else store_value_float32
    is_spread = kind == "int8"

    @nested
    def rotate_and_store(
        team: Words, phase: int, parts: Parts, layer: Any, shape: Shape, inputs: Inputs, work: Work
    ) -> None:
        head_bytes, num_tokens = shape.head_dim * 4, count_tokens(inputs)
        run = run_length(team, num_tokens)
        first = claim(team, phase) * run
        while first < num_tokens:
            for row in range(first, min(first + run, num_tokens)):
                x = work.qkv + row * shape.qkv_width * 4
                _turn(x, row, parts, layer, shape, inputs, is_spread)
                slot = long_at(inputs.slot_mapping, row)
                block, offset = slot // shape.block_size, slot % shape.block_size
                for head in range(shape.num_kv_heads):
                    record = record_of(layer, shape, block, head, offset)
                    key = x + (shape.num_heads + head) * head_bytes
                    value = key + shape.num_kv_heads * head_bytes
                    store_key(key, shape.head_dim // 16, record, offset % 16)
                    store_value(value, shape.head_dim // 16, record + values_offset(shape), offset % 16)
            first = claim(team, phase) * run

    return rotate_and_store


def _make_take_queries(kind: Kind) -> Any:
    take_query, item = take_query_int8 if kind == "int8" else take_query_float32, QUERY_BYTES[kind]

    @nested
    def take_queries(queries: Queries, first: int, head: int, parts: Parts, shape: Shape, work: Work) -> None:
        """The queries of a sequence from row `first` of the batch on, as `score` wants them, that saw nothing yet."""
        group, head_bytes = shape.num_heads // shape.num_kv_heads, shape.head_dim * 4
        for row in range(queries.rows):
            query = work.qkv + (first + row // group) * shape.qkv_width * 4
            query += (head * group + row % group) * head_bytes
            at, facts = queries.taken + row * shape.head_dim * item, queries.facts + row * 8
            take_query(query, shape.head_dim // 16, parts.scale, at, facts)
            store_float(queries.states + row * 8, -np.float32(np.inf))
            store_float(queries.states + row * 8 + 4, np.float32(0))
            for i in range(shape.head_dim):
                store_float(queries.sums + row * head_bytes + 4 * i, np.float32(0))

    return take_queries


@nested
def _rows_of(queries: Queries, first: int, rows: int, head_dim: int, item: int) -> Queries:
    """Some of the queries."""
    return Queries(
        rows,
        queries.taken + first * head_dim * item,
        queries.facts + first * 8,
        queries.states + first * 8,
        queries.sums + first * head_dim * 4,
        queries.scores,
        queries.planes,
        queries.changes,
        queries.tile,
    )


@nested
def _first_keys(number: int, shape: Shape, inputs: Inputs) -> Keys:
    """What piece `number`, counted over all kv heads, looks at first; nothing if there is no such piece."""
    if number >= count_pieces(inputs) * shape.num_kv_heads:
        return Keys(0, 0, 0, 0)
    first_member, _, shared = piece_at(inputs, number // shape.num_kv_heads)
    sequence, _, count, position = member_at(inputs, first_member)
    end = shared if shared > 0 else position + count
    return Keys(sequence, number % shape.num_kv_heads, 0, end)


@nested
def _own_keys(number: int, head: int, shared: int, inputs: Inputs) -> Keys:
    """What a member looks at by itself."""
    sequence, _, count, position = member_at(inputs, number)
    return Keys(sequence, head, shared, position + count)


@nested
def _num_rows(piece: int, group: int, inputs: Inputs) -> int:
    """Queries of a piece, of all heads of a group."""
    rows = 0
    first_member, end_member, _ = piece_at(inputs, piece)
    for number in range(first_member, end_member):
        _, _, count, _ = member_at(inputs, number)
        rows += count * group
    return rows


def _make_attend(kind: Kind, values_offset: Any) -> Any:
    take_queries, look = _make_take_queries(kind), make_look(kind, values_offset)
    item = QUERY_BYTES[kind]

    @nested
    def finish(queries: Queries, first: int, head: int, shape: Shape, work: Work) -> None:
        """The results of a sequence's queries."""
        group, head_bytes = shape.num_heads // shape.num_kv_heads, shape.head_dim * 4
        for row in range(queries.rows):
            out = (first + row // group) * shape.num_heads + head * group + row % group
            out = work.attended + out * head_bytes
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
        first_member, end_member, shared = piece_at(inputs, piece)
        for number in range(first_member, end_member):
            _, first, count, _ = member_at(inputs, number)
            own = _rows_of(queries, row, count * group, shape.head_dim, item)
            take_queries(own, first, head, parts, shape, work)
            row += count * group
        if shared > 0:
            sequence, _, _, _ = member_at(inputs, first_member)
            keys = Keys(sequence, head, 0, shared)
            its_own = _own_keys(first_member, head, shared, inputs)
            look(queries, keys, its_own, following, shared, queries.rows, layer, shape, inputs)
        row = 0
        for number in range(first_member, end_member):
            _, first, count, position = member_at(inputs, number)
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
        group, kv_heads, num_pieces = shape.num_heads // shape.num_kv_heads, shape.num_kv_heads, count_pieces(inputs)
        run = kv_heads if num_pieces >= 4 * num_threads(team) else 1
        number = claim(team, phase) * run
        end = number + run
        while number < num_pieces * kv_heads:
            following = number + 1
            if following == end:
                following = claim(team, phase) * run
                end = following + run
            rows = _num_rows(number // kv_heads, group, inputs)
            memory = work.scratch + thread * work.scratch_bytes
            queries = place_queries(rows, memory, shape.head_dim)
            later = _first_keys(following, shape, inputs)
            attend_piece(queries, number // kv_heads, number % kv_heads, later, parts, layer, shape, inputs, work)
            number = following

    return attend
