"""How queries look at the tokens of a sequence in the cache, tile by tile. The arithmetic is `cached_attention`'s.

Owns the scratch memory of a piece of attention, and which instructions many queries and few ones use.
"""

from typing import Any, Final, NamedTuple

from services.executor.kernels import byte_values, cached_attention, tiles
from services.executor.kernels.byte_values import (
    WIDE,
    add_values_by_tiles,
    copy_vectors,
    finish_scores,
    score_by_tiles,
    weigh_in_bytes,
)
from services.executor.kernels.cached_attention import (
    QUERY_BYTES,
    SCORED_TOGETHER,
    TILE_TOKENS,
    Kind,
    make_score,
    prefetch_line,
    weigh,
)
from services.executor.kernels.decoder_data import Inputs, Shape, long_at
from services.executor.kernels.jit import nested
from services.executor.kernels.memory import store_int64


class Queries(NamedTuple):
    """Some queries on their way through the cache: how many, and the addresses of what belongs to the first of them."""

    rows: int
    taken: int
    """As `take_query` leaves them."""
    facts: int
    states: int
    """As `tile_weights` keeps them."""
    sums: int
    scores: int
    """A tile for each query: scores, in float32 then weights."""
    planes: int
    """Weights in bytes, as `weigh_in_bytes` leaves them."""
    changes: int
    tile: int
    """The steps of a tile's keys, those of its values, and places (see `make_add_values`); then, with tile registers,
    the sums and a copy of its values."""


class Keys(NamedTuple):
    """The tokens from `first` to before `end` of a sequence, in one kv head."""

    sequence: int
    head: int
    first: int
    end: int


MAX_PIECE_ROWS: Final = 24
"""Queries, of all heads that share a kv head, in one piece."""
_ROW_BYTES: Final = 16 + TILE_TOKENS * 4 + byte_values.PLANES_BYTES + byte_values.CHANGE_BYTES
_VALUE_STEPS: Final = TILE_TOKENS * 4
"""Where they begin in a tile's memory; so with the others."""
_PLACES: Final = 2 * TILE_TOKENS * 4
_TILE_SUMS: Final = _PLACES + byte_values.PLACES_BYTES
_TILE_VALUES: Final = _TILE_SUMS + byte_values.TILE_SCRATCH_BYTES


def piece_bytes(rows: int, head_dim: int) -> int:
    """The scratch memory that a piece of so many queries takes."""
    whole = -(-rows // tiles.TOKENS) * tiles.TOKENS
    return whole * (head_dim * 8 + _ROW_BYTES) + TILE_TOKENS * head_dim + _TILE_VALUES


@nested
def place_queries(rows: int, memory: int, head_dim: int) -> Queries:
    """Room for so many queries; as many as fill tile registers may be read and written, but for facts and sums."""
    whole = (rows + 15) // 16 * 16
    scores = memory + whole * head_dim * 4
    planes = scores + whole * 256
    sums = planes + whole * 128
    facts = sums + whole * head_dim * 4
    states = facts + whole * 8
    changes = states + whole * 8
    return Queries(rows, memory, facts, states, sums, scores, planes, changes, changes + whole * 8)


def make_layout(kind: Kind) -> tuple[Any, Any]:
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


def make_look(kind: Kind, values_offset: Any) -> Any:
    """For kernels: `look(queries, keys, following, far, visible, group, layer, shape, inputs)`.

    Some queries look at some tokens, tile by tile; the tile after each is brought near meanwhile: of `keys`, then of
    `following`, and of `far` the first lines. The first `group` queries see `visible` tokens of the sequence, the next
    `group` one more, and so on.
    """
    return _make_look_int8(values_offset) if kind == "int8" else _make_look_float32(values_offset)


def _make_record_at(values_offset: Any) -> Any:
    @nested
    def record_at(keys: Keys, start: int, layer: Any, shape: Shape, inputs: Inputs) -> Any:
        """The record of the tokens from `start` on."""
        of_head = keys.head * (shape.block_size // 16) * 2 * values_offset(shape)
        return (
            layer.cache + long_at(inputs.records, keys.sequence * inputs.records_per_sequence + start // 16) + of_head
        )

    return record_at


@nested
def _later(keys: Keys, following: Keys, tile: int) -> Any:
    """What is looked at after a tile: whose tokens, and from which on."""
    if tile + 64 < keys.end:
        return keys, tile + 64
    return following, following.first


@nested
def _bring_near(record: int, half: int) -> None:
    """The first lines of a record and of its values, and its last."""
    prefetch_line(record)
    prefetch_line(record + half)
    prefetch_line(record + 2 * half - 64)


def _make_score(kind: Kind) -> Any:
    score_few, item, most = make_score(kind), QUERY_BYTES[kind], SCORED_TOGETHER[kind]

    @nested
    def score(taken: int, facts: int, record: int, vectors: int, out: int, rows: int, later: int) -> None:
        """16 scores of any number of queries, those of each in a tile of its own."""
        for row in range(0, rows, most):
            query = taken + row * vectors * 16 * item
            score_few(min(most, rows - row), query, facts + row * 8, record, vectors, out + row * 256, 256, later)

    return score


def _make_look_float32(values_offset: Any) -> Any:
    score, add_values, record_at = _make_score("float32"), _make_add_values_float32(), _make_record_at(values_offset)

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
        vectors, half = shape.head_dim // 16, values_offset(shape)
        for tile in range(keys.first, keys.end, 64):
            end = min(tile + 64, keys.end)
            later_keys, later_tile = _later(keys, following, tile)
            for start in range(tile, end, 16):
                record = record_at(keys, start, layer, shape, inputs)
                later, later_start = record, later_tile + start - tile
                if later_start < later_keys.end:
                    later = record_at(later_keys, later_start, layer, shape, inputs)
                if start < far.end:
                    _bring_near(record_at(far, start, layer, shape, inputs), half)
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
                add_values(at, values, vectors, queries.sums, queries.rows, min(16, end - start), later)

    return look


def _make_add_values_float32() -> Any:
    add_wide, add_narrow = cached_attention.make_add_values(4), cached_attention.make_add_values(1)

    @nested
    def add_values(weights: int, values: int, vectors: int, sums: int, rows: int, num_tokens: int, later: int) -> None:
        """A record's values, weighted, to the sums of any number of queries."""
        for row in range(0, rows, 6):
            count, weight, total = min(6, rows - row), weights + row * 256, sums + row * vectors * 64
            vector = 0
            while vectors - vector >= 4:
                at, to, ahead = values + vector * 64, total + vector * 64, later + vector * 64
                add_wide(count, weight, 256, at, vectors * 64, to, vectors * 64, num_tokens, ahead)
                vector += 4
            while vector < vectors:
                at, to, ahead = values + vector * 64, total + vector * 64, later + vector * 64
                add_narrow(count, weight, 256, at, vectors * 64, to, vectors * 64, num_tokens, ahead)
                vector += 1

    return add_values


def _make_prepare(values_offset: Any) -> Any:
    score, record_at = _make_score("int8"), _make_record_at(values_offset)

    @nested
    def prepare(
        queries: Queries,
        keys: Keys,
        following: Keys,
        far: Keys,
        tile: int,
        by_tiles: bool,
        layer: Any,
        shape: Shape,
        inputs: Inputs,
    ) -> None:
        """The products or scores of a tile, and where its values and steps are."""
        vectors, half, end = shape.head_dim // 16, values_offset(shape), min(tile + 64, keys.end)
        later_keys, later_tile = _later(keys, following, tile)
        places = queries.tile + _PLACES
        for part in range(4):
            start = tile + 16 * part
            record = record_at(keys, start if start < end else tile, layer, shape, inputs)
            later, later_start = record, later_tile + 16 * part
            if later_start < later_keys.end:
                later = record_at(later_keys, later_start, layer, shape, inputs)
            store_int64(places + 8 * part, record + half)
            store_int64(places + 32 + 8 * part, later + half)
            if start < far.end:
                _bring_near(record_at(far, start, layer, shape, inputs), half)
            copy_vectors(record + half - 64, queries.tile + 64 * part, 1, later + half - 64)
            copy_vectors(record + 2 * half - 64, queries.tile + _VALUE_STEPS + 64 * part, 1, later + 2 * half - 64)
            if by_tiles:
                score_by_tiles(queries.rows, queries.taken, record, vectors // 4, queries.scores + 64 * part, later)
                values = queries.tile + _TILE_VALUES + part * vectors * 256
                copy_vectors(record + half, values, vectors * 4, later + half)
            elif start < end:
                at = queries.scores + 64 * part
                score(queries.taken, queries.facts, record, vectors, at, queries.rows, later)

    return prepare


def _make_look_int8(values_offset: Any) -> Any:
    prepare, add_values = _make_prepare(values_offset), _make_add_values_int8()

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
        vectors = shape.head_dim // 16
        by_tiles = shape.has_tiles and 8 <= queries.rows <= 32 and vectors % 4 == 0
        for tile in range(keys.first, keys.end, 64):
            prepare(queries, keys, following, far, tile, by_tiles, layer, shape, inputs)
            if by_tiles:
                finish_scores(queries.rows, queries.scores, queries.facts, queries.tile)
            for row in range(queries.rows):
                scores, state, change = queries.scores + row * 256, queries.states + row * 8, queries.changes + row * 8
                seen = visible + row // group - tile
                weigh_in_bytes(scores, seen, queries.tile + _VALUE_STEPS, state, queries.planes + row * 128, change)
            if by_tiles:
                values, sums = queries.tile + _TILE_VALUES, queries.tile + _TILE_SUMS
                add_values_by_tiles(
                    queries.rows, queries.planes, queries.changes, values, vectors // 2, queries.sums, sums
                )
            else:
                add_values(queries, vectors)

    return look


def _make_add_values_int8() -> Any:
    add_wide, add_narrow = byte_values.make_add_values(WIDE), byte_values.make_add_values(1)

    @nested
    def add_values(queries: Queries, vectors: int) -> None:
        """A tile's values, weighted, to the sums of any number of queries."""
        places = queries.tile + _PLACES
        for row in range(0, queries.rows, byte_values.MAX_ROWS):
            count, total = min(byte_values.MAX_ROWS, queries.rows - row), queries.sums + row * vectors * 64
            planes, changes = queries.planes + row * 128, queries.changes + row * 8
            vector = 0
            while vectors - vector >= WIDE:
                to = total + vector * 64
                add_wide(count, planes, changes, places, vector * 64, vectors * 64, to, vectors * 64)
                vector += WIDE
            while vector < vectors:
                to = total + vector * 64
                add_narrow(count, planes, changes, places, vector * 64, vectors * 64, to, vectors * 64)
                vector += 1

    return add_values
