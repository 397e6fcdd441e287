"""Weighted sums of values in bytes, with exact integer sums; and attention of many queries by tile registers.

The weights of a tile of 64 tokens, times the steps of the tokens' values, are brought into 16 bits relative to the
largest of them:

    p[t] = round(weight[t] · step[t] / unit),   unit = max (weight · step) / 32767

so that what a tile adds to a query's sums is `unit · Σ_t p[t] · i[t, d]`, an exact integer times a number. Where the
processor's instructions multiply bytes, p is two planes of them, the upper ones and the lower ones; where they multiply
16-bit integers, it is as it is. Finer weights would change nothing that matters; with 8 bits alone, those beside a
large one would vanish.

Values of a record lie as [4 fours of tokens, D, 4 tokens]: what a dot instruction takes, and a quarter of what a tile
register does.
"""

import functools
from typing import Any, Final

from services.executor.kernels import tiles
from services.executor.kernels.cached_attention import FACTS_BYTES, TILE_TOKENS, TOKENS, tile_weights
from services.executor.kernels.vectors import BY_SHORTS, LANES, Vectors, kernel_part

MAX_ROWS: Final = 4 if BY_SHORTS else 3
"""Queries that share each value that is loaded, without tile registers."""
WIDE: Final = 1 if BY_SHORTS else 4
"""Vectors of dimensions for which each weight is loaded once: as many sums as registers take."""
PLANES_BYTES: Final = 2 * TILE_TOKENS
"""Of one query."""
CHANGE_BYTES: Final = 8
PLACES_BYTES: Final = 64
"""Addresses of the values of four records, then of as many later ones."""
TILE_SCRATCH_BYTES: Final = tiles.TOKENS * 4 * 4 * LANES
"""What `add_values_by_tiles` needs for its sums."""

_PARTS: Final = range(TILE_TOKENS // TOKENS)
_LARGEST: Final = 32767.0
_SMALLEST: Final = 1e-30


@kernel_part
def copy_vectors(v: Vectors, source: Any, target: Any, num_vectors: Any, later: Any) -> None:
    """`copy_vectors(source, target, num_vectors, later)`: 64 bytes each; as many from `later` on are brought near."""
    with v.loop(num_vectors) as loop:
        offset = v.mul(loop.index, 64)
        v.prefetch(v.add(later, offset), 64)
        v.store(v.load_bytes(v.add(source, offset)), v.add(target, offset))


@kernel_part
def weigh_in_bytes(v: Vectors, scores: Any, num_visible: Any, steps: Any, state: Any, planes: Any, change: Any) -> None:
    """`weigh_in_bytes(scores, num_visible, steps, state, planes, change)`: a tile's scores of one query as planes.

    As `tile_weights` says; `steps` are those of the tokens' values. `change` gets two float32: what the sums so far are
    multiplied by, and the unit of this tile.
    """
    weights, factor = tile_weights(v, scores, num_visible, state)
    products = []
    for part, weight in enumerate(weights):
        # 0 stays 0, whatever the step is: that of a token that was never written may be anything. And what is nothing
        # beside a weight of 1, which some token has, becomes 0: the processor takes long over numbers near its least.
        is_nothing = v.builder.fcmp_ordered("<", weight, v.constant(_SMALLEST))
        product = v.product(v.where(is_nothing, v.zeros(), weight), v.load_floats(steps, 64 * part))
        products.append(v.where(is_nothing, v.zeros(), product))
    _write_planes(v, products, planes, change)
    v.store(v.first_lane(factor), change)


def _write_planes(v: Vectors, products: list[Any], planes: Any, change: Any) -> None:
    most = v.broadcast(v.largest_lane(functools.reduce(v.larger, products)))
    is_nothing = v.builder.fcmp_ordered("<", most, v.constant(_SMALLEST))
    inverse = v.where(is_nothing, v.zeros(), v.quotient(v.constant(_LARGEST), most))
    poison = v.zeros()
    for part, product in enumerate(products):
        ints = v.rounded(v.product(product, inverse))
        if BY_SHORTS:
            v.store_shorts(ints, planes, 2 * TOKENS * part)
        else:
            v.store_int8s(v.builder.lshr(ints, v.int_constant(8)), planes, TOKENS * part)
            v.store_int8s(ints, planes, TILE_TOKENS + TOKENS * part)
        poison = v.fma(product, v.zeros(), poison)  # 0, but for what is no finite number
    unit = v.product(v.where(is_nothing, v.zeros(), most), v.constant(1 / _LARGEST))
    v.store(v.first_lane(v.sum(unit, v.broadcast(v.lane_sum(poison)))), change, 4)


def make_add_values(num_vectors: int) -> Any:
    """For kernels: `add_values(num_rows, planes, changes, places, offset, four_bytes, sums, sums_stride)`.

    Adds `num_vectors` vectors of what a tile comes to, to the sums of 1 to MAX_ROWS queries. `places` are the addresses
    of its four records' values, then those of later ones, which are brought near; the vectors begin `offset` bytes
    from there, and those of the next four tokens `four_bytes` later.
    """
    spell_sums = _sums_by_shorts if BY_SHORTS else _sums_by_planes

    @kernel_part
    def add_values(
        v: Vectors,
        num_rows: Any,
        planes: Any,
        changes: Any,
        places: Any,
        offset: Any,
        four_bytes: Any,
        sums: Any,
        sums_stride: Any,
    ) -> None:
        def spell(count: int) -> None:
            found = spell_sums(v, count, num_vectors, planes, places, offset, four_bytes)
            for row in range(count):
                target, change = v.add(sums, v.mul(sums_stride, row)), v.add(changes, CHANGE_BYTES * row)
                _add_to_sums(v, found[num_vectors * row :][:num_vectors], change, target)

        v.choose(num_rows, range(1, MAX_ROWS + 1), spell)

    return add_values


def _sums_by_planes(
    v: Vectors, num_rows: int, num_vectors: int, planes: Any, places: Any, offset: Any, four_bytes: Any
) -> list[Any]:
    """Exact sums of each query, and of each vector of dimensions."""
    rows, parts, planes_of = range(num_rows), range(num_vectors), range(2)
    with v.loop(v.int64(4), *(v.int_zeros() for _ in rows for _ in planes_of for _ in parts)) as loop:
        place = v.add(places, v.mul(loop.index, 8))
        at, later = v.add(v.load_int64(place), offset), v.add(v.load_int64(place, 32), offset)
        weights_at = v.add(planes, v.mul(loop.index, TOKENS))
        totals = list(loop.carried)
        for four in range(4):
            values = v.add(at, v.mul(four_bytes, four))
            v.prefetch(v.add(later, v.mul(four_bytes, four)), 64 * num_vectors)
            vectors = [v.load_bytes(values, 64 * part) for part in parts]
            for number, (row, plane) in enumerate((row, plane) for row in rows for plane in planes_of):
                weights = v.load_four_bytes(weights_at, PLANES_BYTES * row + TILE_TOKENS * plane + 4 * four)
                for part in parts:
                    place_of = num_vectors * number + part
                    totals[place_of] = v.dot(totals[place_of], weights, vectors[part])
        loop.carry(*totals)
    found = []
    for row in rows:
        upper = loop.results[2 * num_vectors * row :][:num_vectors]
        lower = loop.results[(2 * row + 1) * num_vectors :][:num_vectors]
        found += [_joined(v, *planes_of_part) for planes_of_part in zip(upper, lower, strict=True)]
    return found


def _sums_by_shorts(
    v: Vectors, num_rows: int, num_vectors: int, planes: Any, places: Any, offset: Any, four_bytes: Any
) -> list[Any]:
    """As `_sums_by_planes`."""
    rows, parts = range(num_rows), range(num_vectors)
    with v.loop(v.int64(4), *(v.int_zeros() for _ in rows for _ in parts)) as records:
        place = v.add(places, v.mul(records.index, 8))
        at, later = v.add(v.load_int64(place), offset), v.add(v.load_int64(place, 32), offset)
        weights_at = v.add(planes, v.mul(records.index, 2 * TOKENS))
        with v.loop(v.int64(4), *records.carried) as loop:
            totals, skipped = list(loop.carried), v.mul(four_bytes, loop.index)
            v.prefetch(v.add(later, skipped), 64 * num_vectors)
            vectors = [v.shorts_of_signed(v.load_bytes(v.add(at, skipped), 64 * part)) for part in parts]
            for odd in range(2):
                for row in rows:
                    two = v.load_two_shorts(v.add(weights_at, v.mul(loop.index, 8)), PLANES_BYTES * row + 4 * odd)
                    for part in parts:
                        place_of = num_vectors * row + part
                        totals[place_of] = v.dot_shorts(totals[place_of], vectors[part][odd], two)
            loop.carry(*totals)
        records.carry(*loop.results)
    return list(records.results)


def _joined(v: Vectors, upper: Any, lower: Any) -> Any:
    return v.int_sum(v.builder.shl(upper, v.int_constant(8)), lower)


def _add_to_sums(v: Vectors, found: list[Any], change: Any, target: Any) -> None:
    factor, unit = v.load_float(change), v.load_float(change, 4)
    for part, total in enumerate(found):
        before = v.product(v.load_floats(target, 64 * part), factor)
        v.store(v.fma(v.to_floats(total), unit, before), target, 64 * part)


# Many queries at once.


@kernel_part
def score_by_tiles(v: Vectors, num_rows: Any, taken: Any, record: Any, num_runs: Any, out: Any, later: Any) -> None:
    """`score_by_tiles(num_rows, taken, record, D / 64, out, later)`: products of up to 32 queries and 16 keys.

    Queries lie as `take_query` left them, and are read for whole tiles. `out` are int32 in rows of TILE_TOKENS, written
    for whole tiles too. `later` is another record, whose keys are brought near.
    """

    def spell(num_registers: int) -> None:
        registers = range(num_registers)
        for register in registers:
            tiles.clear(v, tiles.SUMS[register])
        size = v.mul(num_runs, 64)
        with v.loop(num_runs) as loop:
            offset = v.mul(loop.index, 64)
            v.prefetch(v.add(later, v.mul(offset, TOKENS)), 64 * TOKENS)
            tiles.load(v, tiles.WEIGHTS[0], v.add(record, v.mul(offset, TOKENS)), v.int64(64))
            for register in registers:
                at = v.add(taken, v.mul(size, tiles.TOKENS * register), offset)
                tiles.load(v, tiles.ACTIVATIONS[register], at, size)
                tiles.multiply_signed(v, tiles.SUMS[register], tiles.ACTIVATIONS[register], tiles.WEIGHTS[0])
        for register in registers:
            at = v.add(out, 4 * TILE_TOKENS * tiles.TOKENS * register)
            tiles.store(v, tiles.SUMS[register], at, v.int64(4 * TILE_TOKENS))

    _for_registers(v, num_rows, spell)


@kernel_part
def finish_scores(v: Vectors, num_rows: Any, scores: Any, facts: Any, steps: Any) -> None:
    """`finish_scores(num_rows, scores, facts, steps)`: a tile's products as scores, in place."""
    factors = [v.load_floats(steps, 64 * part) for part in _PARTS]
    with v.loop(num_rows) as loop:
        at, fact = v.add(scores, v.mul(loop.index, 4 * TILE_TOKENS)), v.add(facts, v.mul(loop.index, FACTS_BYTES))
        start, step = v.broadcast(v.load_int(fact)), v.load_float(fact, 4)
        for part in _PARTS:
            total = v.to_floats(v.int_sum(v.load_ints(at, 64 * part), start))
            v.store(v.product(v.product(total, step), factors[part]), at, 64 * part)


@kernel_part
def add_values_by_tiles(
    v: Vectors, num_rows: Any, planes: Any, changes: Any, values: Any, num_pairs: Any, sums: Any, scratch: Any
) -> None:
    """`add_values_by_tiles(num_rows, planes, changes, values, D / 32, sums, scratch)`: for up to 32 queries.

    `values` are those of a whole tile, [16 fours of tokens, D, 4]; planes are read for whole tile registers; `scratch`
    is TILE_SCRATCH_BYTES of memory.
    """
    four_bytes, sums_stride = v.mul(num_pairs, 128), v.mul(num_pairs, 128)

    def spell(num_registers: int) -> None:
        with v.loop(num_pairs) as pairs:
            offset = v.mul(pairs.index, 128)
            for half, weights in enumerate(tiles.WEIGHTS):
                tiles.load(v, weights, v.add(values, offset, 64 * half), four_bytes)
            for register in range(num_registers):
                first = v.mul(v.int64(register), tiles.TOKENS)
                for plane, activations in enumerate(tiles.ACTIVATIONS):
                    at = v.add(planes, v.mul(first, PLANES_BYTES), TILE_TOKENS * plane)
                    tiles.load(v, activations, at, v.int64(PLANES_BYTES))
                    for half, weights in enumerate(tiles.WEIGHTS):
                        number = 2 * plane + half
                        tiles.clear(v, tiles.SUMS[number])
                        tiles.multiply(v, tiles.SUMS[number], activations, weights)
                for number in range(4):
                    tiles.store(v, tiles.SUMS[number], v.add(scratch, 64 * number), v.int64(256))
                with v.loop(v.smaller(v.sub(num_rows, first), v.int64(tiles.TOKENS))) as rows:
                    row, at = v.add(first, rows.index), v.add(scratch, v.mul(rows.index, 256))
                    ints = [v.load_ints(at, 64 * number) for number in range(4)]
                    target = v.add(sums, v.mul(sums_stride, row), offset)
                    found = [_joined(v, *planes_of_part) for planes_of_part in zip(ints[:2], ints[2:], strict=True)]
                    _add_to_sums(v, found, v.add(changes, v.mul(row, CHANGE_BYTES)), target)

    _for_registers(v, num_rows, spell)


def _for_registers(v: Vectors, num_rows: Any, spell: Any) -> None:
    """With as many registers of 16 rows as there are rows for, one or two."""
    is_short = v.builder.icmp_signed("<=", num_rows, v.int64(tiles.TOKENS))
    v.choose(v.builder.select(is_short, v.int64(1), v.int64(2)), (1, 2), spell)
