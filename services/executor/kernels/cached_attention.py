"""Attention of a few queries over keys and values in blocks of the cache, as parts for kernels.

A cache record holds 16 tokens of one kv head. In int8 each token of each head has a step for its key and one for its
value (`x ≈ step · i`, `step = max |x| / 127`), and queries become bytes in the same way, so that a score is an exact
integer times three numbers; in float32 a score is one sum over the head's dimensions in order.

Layout of a record: keys, as columns of a product: int8 [D / 4, 16, 4] plus 128, or float32 [D, 16]; then for int8 their
16 steps, float32; then values: int8 [4, D, 4], by fours of tokens, or float32 [16, D]; then for int8 their 16 steps.

A query's weights are found a tile of records at a time, in one pass over keys and values: weights are relative to the
largest score so far, and what was added up before is scaled down where a larger one comes. What is added to a query's
sums is for float32 here, token by token, and for int8 in `byte_values`. Whatever a query's
neighbours are, its own numbers are computed from position 0 on, tile by tile, record by record, token by token; tokens
beyond what the query sees count with weight 0. D is a multiple of 16.

The cache is far larger than the processor's own caches, so each part that reads a record also has as much of a later
one brought near: all at once, this would hold up what is computed.
"""

import functools
from typing import Any, Final, Literal

from services.executor.kernels.vectors import BY_SHORTS, LANES, Vectors, kernel_part

Kind = Literal["int8", "float32"]

TOKENS: Final = LANES
"""Tokens of a record."""
TILE_TOKENS: Final = 4 * TOKENS
"""Tokens whose weights are found together."""
MAX_ROWS: Final = 6
"""Queries that share each value in float32 that is loaded."""
FACTS_BYTES: Final = 8
QUERY_BYTES: Final[dict[Kind, int]] = {"int8": 2 if BY_SHORTS else 1, "float32": 4}
"""Of each number of a query as `take_query` leaves it."""
SCORED_TOGETHER: Final[dict[Kind, int]] = {"int8": 4 if BY_SHORTS else 6, "float32": 6}
"""The most queries that share each key that is loaded."""

_TOGETHER: Final = (1, 2, 4, 8, 16)


def record_bytes(kind: Kind, head_dim: int) -> int:
    """The size of a record."""
    return 2 * TOKENS * (head_dim + 4) if kind == "int8" else 2 * TOKENS * head_dim * 4


def spread_together(head_dim: int) -> int:
    """How many numbers of a head `spread_head` spreads over each other: the largest power of 2 in it, 256 at most."""
    return min(head_dim & -head_dim, LANES * _TOGETHER[-1])


# Into the cache.


@kernel_part
def rotate_head(v: Vectors, x: Any, cos: Any, sin: Any, num_vectors: Any) -> None:
    """Turn the pairs (x[i], x[i + D/2]) in place: `rotate_head(x, cos, sin, D / 32)`; D is a multiple of 32."""
    with v.loop(num_vectors) as loop:
        offset = v.mul(loop.index, 64)
        first = v.add(x, offset)
        second = v.add(first, v.mul(num_vectors, 64))
        a, b = v.load_floats(first), v.load_floats(second)
        c, s = v.load_floats(v.add(cos, offset)), v.load_floats(v.add(sin, offset))
        v.store(v.fma(a, c, v.negative(v.product(b, s))), first)
        v.store(v.fma(b, c, v.product(a, s)), second)


@kernel_part
def spread_head(v: Vectors, x: Any, num_vectors: Any, num_together: Any) -> None:
    """A Hadamard transform, not scaled, in place: `spread_head(x, D / 16, spread_together(D) / 16)`.

    Keys have a few dimensions with much larger numbers than the rest, and would leave the rest few of a step's levels.
    Spread over all dimensions, or over each `spread_together`, all are about as large. The products of queries and keys
    stay the same, but for a factor of as many.
    """

    def spell(count: int) -> None:
        with v.loop(v.builder.sdiv(num_vectors, num_together)) as loop:
            at = v.add(x, v.mul(loop.index, 64 * count))
            parts = [v.load_floats(at, 64 * part) for part in range(count)]
            for distance in (1, 2, 4, 8):
                parts = [v.sums_and_differences(part, distance) for part in parts]
            distance = 1
            while distance < count:
                pairs = [(parts[part & ~distance], parts[part | distance]) for part in range(count)]
                parts = [v.difference(*pair) if part & distance else v.sum(*pair) for part, pair in enumerate(pairs)]
                distance *= 2
            for part, numbers in enumerate(parts):
                v.store(numbers, at, 64 * part)

    v.choose(num_together, _TOGETHER, spell)


def _largest(v: Vectors, x: Any, num_vectors: Any) -> Any:
    """The largest |number| of a head, in every lane."""
    with v.loop(num_vectors, v.zeros()) as loop:
        part = v.absolute(v.load_floats(v.add(x, v.mul(loop.index, 64))))
        loop.carry(v.larger(part, loop.carried[0]))
    return v.broadcast(v.largest_lane(loop.results[0]))


def _is_whole(v: Vectors, x: Any, num_vectors: Any) -> Any:
    """Whether all numbers of a head are numbers."""
    with v.loop(num_vectors, v.zeros()) as loop:
        part = v.load_floats(v.add(x, v.mul(loop.index, 64)))
        loop.carry(v.fma(part, v.zeros(), loop.carried[0]))
    return v.are_numbers(loop.results[0], loop.results[0])


def _step_and_factor(v: Vectors, x: Any, num_vectors: Any) -> tuple[Any, Any]:
    """A head's step, not a number if one of its numbers is none or infinite, and what makes bytes of them."""
    largest = _largest(v, x, num_vectors)
    is_zero = v.builder.fcmp_ordered("==", largest, v.zeros())
    factor = v.where(is_zero, v.zeros(), v.quotient(v.constant(127.0), largest))
    step = v.product(largest, v.constant(1 / 127))
    return v.builder.select(_is_whole(v, x, num_vectors), step, v.constant(float("nan"))), factor


@kernel_part
def store_key_int8(v: Vectors, key: Any, num_vectors: Any, record: Any, token: Any) -> None:
    """`store_key(key, D / 16, record, token)`: one token's key of one head."""
    step, factor = _step_and_factor(v, key, num_vectors)
    with v.loop(num_vectors) as loop:
        part = v.rounded(v.product(v.load_floats(v.add(key, v.mul(loop.index, 64))), factor))
        fours = v.as_fours(v.int_sum(part, v.int_constant(128)))
        target = v.add(record, v.mul(loop.index, 4 * 64), v.mul(token, 4))
        for number in range(4):
            v.store(v.four(fours, number), target, 64 * number)
    steps = v.add(record, v.mul(num_vectors, LANES * TOKENS))
    v.store(v.first_lane(step), v.add(steps, v.mul(token, 4)))


@kernel_part
def store_value_int8(v: Vectors, value: Any, num_vectors: Any, values: Any, token: Any) -> None:
    """`store_value(value, D / 16, values, token)`: one token's value of one head; `values` is where they begin."""
    step, factor = _step_and_factor(v, value, num_vectors)
    four, place = v.builder.lshr(token, v.int64(2)), v.builder.and_(token, v.int64(3))
    first = v.add(values, v.mul(v.mul(four, num_vectors), 64), place)
    with v.loop(num_vectors) as loop:
        part = v.rounded(v.product(v.load_floats(v.add(value, v.mul(loop.index, 64))), factor))
        target = v.add(first, v.mul(loop.index, 64))
        for lane in range(LANES):  # byte by byte: those between are other tokens', which others may be writing
            v.store(v.byte(part, lane), target, 4 * lane)
    steps = v.add(values, v.mul(num_vectors, LANES * TOKENS))
    v.store(v.first_lane(step), v.add(steps, v.mul(token, 4)))


@kernel_part
def store_key_float32(v: Vectors, key: Any, num_vectors: Any, record: Any, token: Any) -> None:
    """As `store_key_int8`."""
    with v.loop(v.mul(num_vectors, LANES)) as loop:
        number = v.load_one(v.add(key, v.mul(loop.index, 4)))
        v.store(number, v.add(record, v.mul(loop.index, 64), v.mul(token, 4)))


@kernel_part
def store_value_float32(v: Vectors, value: Any, num_vectors: Any, values: Any, token: Any) -> None:
    """As `store_value_int8`."""
    row = v.add(values, v.mul(token, v.mul(num_vectors, 64)))
    with v.loop(num_vectors) as loop:
        offset = v.mul(loop.index, 64)
        v.store(v.load_floats(v.add(value, offset)), v.add(row, offset))


# Queries.


@kernel_part
def take_query_int8(v: Vectors, query: Any, num_vectors: Any, scale: Any, taken: Any, facts: Any) -> None:
    """`take_query(query, D / 16, scale, taken, facts)`: one query as `score` wants it; `scale` is an address.

    Its facts are an int32, -128 · Σ i, which undoes what was added to the keys, and its step times the scale.
    """
    step, factor = _step_and_factor(v, query, num_vectors)
    with v.loop(num_vectors, v.int_zeros()) as loop:
        part = v.rounded(v.product(v.load_floats(v.add(query, v.mul(loop.index, 64))), factor))
        store = v.store_shorts if BY_SHORTS else v.store_int8s
        store(part, v.add(taken, v.mul(loop.index, LANES * QUERY_BYTES["int8"])))
        loop.carry(v.int_sum(loop.carried[0], part))
    total = v.int_lane_sum(loop.results[0])
    v.store(v.builder.mul(total, v.int32(-128)), facts)
    v.store(v.first_lane(v.product(step, v.load_float(scale))), facts, 4)


@kernel_part
def take_query_float32(v: Vectors, query: Any, num_vectors: Any, scale: Any, taken: Any, _facts: Any) -> None:
    """As `take_query_int8`; the query is scaled, and has no facts."""
    with v.loop(num_vectors) as loop:
        offset = v.mul(loop.index, 64)
        v.store(v.product(v.load_floats(v.add(query, offset)), v.load_float(scale)), v.add(taken, offset))


def make_score(kind: Kind) -> Any:
    """For kernels: `score(num_rows, taken, facts, record, D / 16, out, out_stride, later)`: 16 scores of each query.

    1 to SCORED_TOGETHER queries lie one after the other, as `take_query` left them. The keys of the record `later` are
    brought near.
    """
    spell_rows = _score_int8 if kind == "int8" else _score_float32

    @kernel_part
    def score(
        v: Vectors,
        num_rows: Any,
        taken: Any,
        facts: Any,
        record: Any,
        num_vectors: Any,
        out: Any,
        out_stride: Any,
        later: Any,
    ) -> None:
        def spell(count: int) -> None:
            for row, scores in enumerate(spell_rows(v, count, taken, facts, record, num_vectors, later)):
                v.store(scores, v.add(out, v.mul(out_stride, row)))

        v.choose(num_rows, range(1, SCORED_TOGETHER[kind] + 1), spell)

    return score


def _score_int8(
    v: Vectors, num_rows: int, taken: Any, facts: Any, record: Any, num_vectors: Any, later: Any
) -> list[Any]:
    rows, size = range(num_rows), v.mul(num_vectors, LANES)
    starts = [v.broadcast(v.load_int(facts, FACTS_BYTES * row)) for row in rows]
    queries = [v.add(taken, v.mul(size, QUERY_BYTES["int8"] * row)) for row in rows]
    totals = (_totals_by_shorts if BY_SHORTS else _totals_by_dots)(v, starts, queries, record, num_vectors, later)
    steps = v.load_floats(v.add(record, v.mul(size, TOKENS)))
    return [
        v.product(v.product(v.to_floats(total), v.load_float(facts, FACTS_BYTES * row + 4)), steps)
        for row, total in enumerate(totals)
    ]


def _totals_by_dots(
    v: Vectors, starts: list[Any], queries: list[Any], record: Any, num_vectors: Any, later: Any
) -> list[Any]:
    rows = range(len(queries))
    # Two sums for each query, since a dot takes five cycles and few queries leave the processor waiting for the last.
    with v.loop(v.mul(num_vectors, 2), *starts, *(v.int_zeros() for _ in rows)) as loop:
        keys = v.add(record, v.mul(loop.index, 128))
        v.prefetch(v.add(later, v.mul(loop.index, 128)), 128)
        fours = [v.add(query, v.mul(loop.index, 8)) for query in queries]
        parts = [
            v.dot(
                loop.carried[part * len(rows) + row],
                v.load_bytes(keys, 64 * part),
                v.load_four_bytes(fours[row], 4 * part),
            )
            for part in range(2)
            for row in rows
        ]
        loop.carry(*parts)
    return [v.int_sum(loop.results[row], loop.results[len(rows) + row]) for row in rows]


def _totals_by_shorts(
    v: Vectors, starts: list[Any], queries: list[Any], record: Any, num_vectors: Any, later: Any
) -> list[Any]:
    with v.loop(v.mul(num_vectors, 4), *starts) as loop:
        offset = v.mul(loop.index, 64)
        v.prefetch(v.add(later, offset), 64)
        keys = v.shorts_of_unsigned(v.load_bytes(v.add(record, offset)))
        totals = list(loop.carried)
        for odd, shorts in enumerate(keys):
            for row, query in enumerate(queries):
                two = v.load_two_shorts(v.add(query, v.mul(loop.index, 8)), 4 * odd)
                totals[row] = v.dot_shorts(totals[row], shorts, two)
        loop.carry(*totals)
    return list(loop.results)


def _score_float32(
    v: Vectors, num_rows: int, taken: Any, _facts: Any, record: Any, num_vectors: Any, later: Any
) -> list[Any]:
    rows = range(num_rows)
    queries = [v.add(taken, v.mul(num_vectors, 4 * LANES * row)) for row in rows]
    with v.loop(v.mul(num_vectors, LANES), *(v.zeros() for _ in rows)) as loop:
        keys = v.load_floats(v.add(record, v.mul(loop.index, 64)))
        v.prefetch(v.add(later, v.mul(loop.index, 64)), 64)
        at = v.mul(loop.index, 4)
        loop.carry(*(v.fma(v.load_float(v.add(queries[row], at)), keys, loop.carried[row]) for row in rows))
    return loop.results


@kernel_part
def weigh(v: Vectors, scores: Any, num_visible: Any, state: Any, sums: Any, num_vectors: Any) -> None:
    """`weigh(scores, num_visible, state, sums, D / 16)`: a tile's scores of one query become weights, in place.

    As `tile_weights` says; the `sums` are scaled to the new largest score.
    """
    weights, factor = tile_weights(v, scores, num_visible, state)
    for part, weight in enumerate(weights):
        v.store(weight, scores, 64 * part)
    with v.loop(num_vectors) as loop:
        at = v.add(sums, v.mul(loop.index, 64))
        v.store(v.product(v.load_floats(at), factor), at)


def tile_weights(v: Vectors, scores: Any, num_visible: Any, state: Any) -> tuple[list[Any], Any]:
    """The weights of a tile of one query, and what its sums so far have to be multiplied by.

    A weight is `exp(score - largest)`, with the largest score up to this tile. Scores from `num_visible` on, which may
    be all of them or none, weigh 0. `state` is two float32, kept up: the largest score and the total of all weights,
    -inf and 0 at first.
    """
    lowest, parts = v.constant(float("-inf")), range(TILE_TOKENS // TOKENS)
    visible = [v.first_lanes(v.add(num_visible, -TOKENS * part)) for part in parts]
    numbers = [v.where(visible[part], v.load_floats(scores, 64 * part), lowest) for part in parts]
    before = v.load_float(state)
    largest = v.larger(before, v.broadcast(v.largest_lane(functools.reduce(v.larger, numbers))))
    opposite = v.negative(largest)
    factor = v.exponential(v.sum(before, opposite))
    weights = [v.where(visible[part], v.exponential(v.sum(numbers[part], opposite)), v.zeros()) for part in parts]
    total = v.broadcast(v.lane_sum(functools.reduce(v.sum, weights)))
    v.store(v.first_lane(largest), state)
    v.store(v.first_lane(v.fma(v.load_float(state, 4), factor, total)), state, 4)
    return weights, factor


def make_add_values(num_vectors: int) -> Any:
    """For kernels: `add_values(num_rows, weights, stride, values, row_bytes, sums, sums_stride, num_tokens, later)`.

    Of a cache in float32. Adds `num_vectors` vectors of a record's first `num_tokens` values, weighted, to the sums of
    1 to MAX_ROWS queries. `values` is the first of those vectors of the record's first value, and values lie
    `row_bytes` apart. The same vectors of the record's values at `later` are brought near.
    """
    parts = range(num_vectors)

    @kernel_part
    def add_values(
        v: Vectors,
        num_rows: Any,
        weights: Any,
        stride: Any,
        values: Any,
        row_bytes: Any,
        sums: Any,
        sums_stride: Any,
        num_tokens: Any,
        later: Any,
    ) -> None:
        def spell(count: int) -> None:
            rows = range(count)
            targets = [v.add(sums, v.mul(sums_stride, row)) for row in rows]
            weight_rows = [v.add(weights, v.mul(stride, row)) for row in rows]
            starts = [v.load_floats(targets[row], 64 * part) for row in rows for part in parts]
            with v.loop(num_tokens, *starts) as loop:
                offset = v.mul(loop.index, row_bytes)
                at = v.add(values, offset)
                v.prefetch(v.add(later, offset), 64 * num_vectors)
                vectors = [v.load_floats(at, 64 * part) for part in parts]
                totals = []
                for row in rows:
                    weight = v.load_float(v.add(weight_rows[row], v.mul(loop.index, 4)))
                    carried = loop.carried[num_vectors * row : num_vectors * (row + 1)]
                    totals += [v.fma(weight, vectors[part], carried[part]) for part in parts]
                loop.carry(*totals)
            for row in rows:
                for part in parts:
                    v.store(loop.results[num_vectors * row + part], targets[row], 64 * part)

        v.choose(num_rows, range(1, MAX_ROWS + 1), spell)

    return add_values


@kernel_part
def prefetch_line(v: Vectors, address: Any) -> None:
    """`prefetch_line(address)`: have the cache line at an address brought near."""
    v.prefetch(address, 64)


@kernel_part
def divide_row(v: Vectors, sums: Any, num_vectors: Any, state: Any, out: Any) -> None:
    """`divide_row(sums, D / 16, state, out)`: one query's sums over the sum of its weights."""
    divisor = v.load_float(state, 4)
    with v.loop(num_vectors) as loop:
        offset = v.mul(loop.index, 64)
        v.store(v.quotient(v.load_floats(v.add(sums, offset)), divisor), v.add(out, offset))
