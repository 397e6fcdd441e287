"""Rotation, storing and attention over blocks: against formulas on whole sequences, with poison where none may look."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.attention.paged import PagedAttention
from services.executor.attention.reference import ReferenceAttention
from services.executor.batch import ForwardBatch
from services.executor.kernels.paged_attention import paged_attention, paged_attention_naive
from services.executor.kernels.rotary import RotaryTable, rotate_and_store
from services.executor.kv_cache import LayerCache
from services.executor.layers.rotary import rotary_table
from shared.models.config import RopeConfig

NUM_BLOCKS = 128
# The kernel adds up in float32, a few hundred numbers of about 1; the truth in float64.
TOLERANCE: dict[str, Any] = {"rtol": 5e-6, "atol": 5e-6}


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


SHAPES = [
    Shape(1, 1, 2, 1),
    Shape(4, 2, 16, 4),
    Shape(9, 3, 64, 16),
    Shape(6, 1, 24, 5),
    Shape(2, 2, 10, 3),
    Shape(8, 1, 80, 32),
    Shape(2, 1, 128, 16),
]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def poisoned_cache(shape: Shape) -> LayerCache:
    key = (NUM_BLOCKS, shape.num_kv_heads, shape.head_dim, shape.block_size)
    value = (NUM_BLOCKS, shape.num_kv_heads, shape.block_size, shape.head_dim)
    return LayerCache(torch.full(key, torch.nan), torch.full(value, torch.nan))


def noisy_cache(shape: Shape) -> LayerCache:
    key, value = poisoned_cache(shape)
    return LayerCache(noise(*key.shape, seed=5), noise(*value.shape, seed=6))


def table_of(shape: Shape) -> RotaryTable:
    return rotary_table(RopeConfig(theta=100.0), shape.head_dim, 64)


def batch_of(shape: Shape, rows: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]]) -> ForwardBatch:
    """Each row is a start and a count; what lies beyond a row's blocks in its table points to poison."""
    positions = [position for start, count in rows for position in range(start, start + count)]
    row_of = [row for row, (_, count) in enumerate(rows) for _ in range(count)]
    slots = [
        tables[row][position // shape.block_size] * shape.block_size + position % shape.block_size
        for row, position in zip(row_of, positions, strict=True)
    ]
    width = max(len(table) for table in tables)
    ends = [sum(count for _, count in rows[:row]) for row in range(len(rows) + 1)]
    return ForwardBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        query_starts=torch.tensor(ends, dtype=torch.int32),
        context_lens=torch.tensor([start + count for start, count in rows], dtype=torch.int32),
        block_tables=torch.tensor(
            [[*table, *[NUM_BLOCKS - 1] * (width - len(table))] for table in tables], dtype=torch.int32
        ),
        logits_rows=torch.zeros(0, dtype=torch.int64),
    )


def tables_for(shape: Shape, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    free = random.Random(seed).sample(range(NUM_BLOCKS - 1), NUM_BLOCKS - 1)
    return [[free.pop() for _ in range(-(-length // shape.block_size))] for length in lengths]


def split_heads(shape: Shape, num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as a model gives them: parts of one row."""
    sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    q, k, v = torch.split(noise(num_tokens, sum(sizes), shape.head_dim, seed=seed), sizes, dim=1)
    return q, k, v


def truth(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Rotary attention of one whole sequence, number by number."""
    table, length = table_of(shape), len(q)
    half = shape.head_dim // 2

    def turned(x: torch.Tensor, position: int) -> list[float]:
        values, angles = x.tolist(), range(half)
        cos, sin = table.cos[position].tolist(), table.sin[position].tolist()
        first = [values[i] * cos[i] - values[i + half] * sin[i] for i in angles]
        return first + [values[i + half] * cos[i] + values[i] * sin[i] for i in angles]

    out = torch.empty(length, shape.num_heads, shape.head_dim, dtype=torch.float64)
    for head in range(shape.num_heads):
        kv_head = head // (shape.num_heads // shape.num_kv_heads)
        keys = [turned(k[position, kv_head], position) for position in range(length)]
        for token in range(length):
            query = turned(q[token, head], token)
            scores = [
                math.fsum(map(float.__mul__, query, keys[i])) / math.sqrt(shape.head_dim) for i in range(token + 1)
            ]
            weights = [math.exp(score - max(scores)) for score in scores]
            mixed = sum(weight * v[i, kv_head].double() for i, weight in enumerate(weights))
            out[token, head] = mixed / math.fsum(weights)
    return out


BACKENDS: list[Callable[[RotaryTable, float], Any]] = [PagedAttention, ReferenceAttention]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_the_formula(shape: Shape, backend: Callable[[RotaryTable, float], Any]) -> None:
    """Two sequences in one batch; nothing unwritten is read, since it would make the result NaN."""
    lengths = [11, 6]
    parts = [split_heads(shape, length, seed) for seed, length in enumerate(lengths)]
    expected = torch.cat([truth(shape, *part) for part in parts])
    q, k, v = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    batch = batch_of(shape, [(0, length) for length in lengths], tables_for(shape, lengths))
    attend = backend(table_of(shape), shape.head_dim**-0.5)
    found = attend(q, k, v, poisoned_cache(shape), batch)
    # Rotated queries and keys are rounded to float32 before they are multiplied, and scores can reach 10.
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@given(
    shape=st.sampled_from(SHAPES),
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=4),
    data=st.data(),
)
@settings(deadline=None, max_examples=40)
def test_pieces_of_any_size_in_any_batch_give_the_same_bits(
    shape: Shape, lengths: list[int], data: st.DataObject
) -> None:
    parts = [split_heads(shape, length, seed) for seed, length in enumerate(lengths)]
    attend = PagedAttention(table_of(shape), shape.head_dim**-0.5)
    alone = []
    for part, table in zip(parts, tables_for(shape, lengths, seed=1), strict=True):
        batch = batch_of(shape, [(0, len(part[0]))], [table])
        alone.append(attend(part[0].clone(), part[1].clone(), part[2].clone(), poisoned_cache(shape), batch))
    tables, cache, done = tables_for(shape, lengths, seed=2), poisoned_cache(shape), [0] * len(lengths)
    while open_rows := [row for row, length in enumerate(lengths) if done[row] < length]:
        rows = data.draw(st.lists(st.sampled_from(open_rows), min_size=1, unique=True))
        spans = [(done[row], data.draw(st.integers(1, lengths[row] - done[row]))) for row in rows]
        q, k, v = (
            torch.cat(
                [parts[row][which][start : start + count] for row, (start, count) in zip(rows, spans, strict=True)]
            )
            for which in range(3)
        )
        used = [
            tables[row][: -(-(start + count) // shape.block_size)]
            for row, (start, count) in zip(rows, spans, strict=True)
        ]
        found = attend(q, k, v, cache, batch_of(shape, spans, used))
        expected = [alone[row][start : start + count] for row, (start, count) in zip(rows, spans, strict=True)]
        assert torch.equal(found, torch.cat(expected))
        for row, (_, count) in zip(rows, spans, strict=True):
            done[row] += count


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_backend_and_the_reference_agree_on_a_mixed_batch(shape: Shape) -> None:
    """A prefill, a chunk of one and a decode."""
    rows = [(0, 7), (5, 4), (9, 1)]
    tables = tables_for(shape, [start + count for start, count in rows])
    q, k, v = split_heads(shape, sum(count for _, count in rows))
    results, caches = [], []
    for backend in BACKENDS:
        cache = noisy_cache(shape)
        attend = backend(table_of(shape), shape.head_dim**-0.5)
        results.append(attend(q.clone(), k.clone(), v.clone(), cache, batch_of(shape, rows, tables)))
        caches.append(cache)
    torch.testing.assert_close(results[0], results[1], **TOLERANCE)
    torch.testing.assert_close(caches[0].key, caches[1].key, **TOLERANCE)
    assert torch.equal(caches[0].value, caches[1].value)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.block_size > 3], ids=str)
@pytest.mark.parametrize("rows", [[(0, 150)], [(63, 1), (64, 1), (65, 1)], [(100, 40), (0, 1), (127, 3)]], ids=str)
def test_the_kernel_and_its_twin_agree_over_many_keys(shape: Shape, rows: list[tuple[int, int]]) -> None:
    """More keys than one tile holds, chunks that begin and end inside tiles and blocks, poison beyond each sequence."""
    tables = tables_for(shape, [start + count for start, count in rows])
    batch, cache = batch_of(shape, rows, tables), noisy_cache(shape)
    for row, (start, count) in enumerate(rows):
        for position in range(start + count, len(tables[row]) * shape.block_size):
            block, offset = tables[row][position // shape.block_size], position % shape.block_size
            cache.key[block, :, :, offset] = cache.value[block, :, offset] = torch.nan
    arguments: dict[str, Any] = {
        "query_starts": batch.query_starts,
        "context_lens": batch.context_lens,
        "block_tables": batch.block_tables,
        "scale": shape.head_dim**-0.5,
    }
    q = noise(len(batch.positions), shape.num_heads, shape.head_dim, seed=7)
    found = paged_attention(q, cache.key, cache.value, **arguments)
    torch.testing.assert_close(found, paged_attention_naive(q, cache.key, cache.value, **arguments), **TOLERANCE)


def test_keys_larger_than_all_before_them_do_not_overflow() -> None:
    """Scores that grow by hundreds from tile to tile: the running maximum has to follow."""
    shape = Shape(1, 1, 16, 16)
    batch = batch_of(shape, [(0, 200)], tables_for(shape, [200]))
    cache = poisoned_cache(shape)
    for position in range(200):
        block, offset = divmod(int(batch.slot_mapping[position]), 16)
        cache.key[block, :, :, offset] = float(position)
        cache.value[block, :, offset] = float(position)
    for sign in (1.0, -1.0):
        found = paged_attention(
            torch.full((200, 1, 16), sign),
            cache.key,
            cache.value,
            query_starts=batch.query_starts,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            scale=1.0,
        )
        expected = torch.arange(200.0) if sign > 0 else torch.zeros(200)
        torch.testing.assert_close(found[:, 0, 0], expected, rtol=1e-5, atol=1e-5)


def test_storing_writes_its_slots_and_no_others() -> None:
    shape = Shape(4, 2, 16, 4)
    q, k, v = split_heads(shape, 3)
    cache, original = poisoned_cache(shape), v.clone()
    slots = torch.tensor([4 * 7 + 1, 4 * 2 + 3, 0])
    rotate_and_store(
        q,
        k,
        v,
        positions=torch.tensor([0, 0, 0]),  # the angle 0 turns nothing
        slot_mapping=slots,
        table=table_of(shape),
        key_cache=cache.key,
        value_cache=cache.value,
    )
    for token, (block, offset) in enumerate([(7, 1), (2, 3), (0, 0)]):
        assert torch.equal(cache.value[block, :, offset], original[token])
        assert torch.equal(cache.key[block, :, :, offset], k[token])
    assert int((~cache.key.isnan()).sum()) == 3 * 2 * 16
    assert int((~cache.value.isnan()).sum()) == 3 * 2 * 16


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    shape = Shape(1, 1, 16, 64)
    table, vector = table_of(shape), noise(1, 1, 16)

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        cache = poisoned_cache(shape)
        arguments = {"positions": torch.tensor([position]), "slot_mapping": torch.tensor([0]), "table": table}
        q = rotate_and_store(x, x, x, key_cache=cache.key, value_cache=cache.value, **arguments)  # type: ignore[arg-type]
        assert torch.equal(cache.key[0, :, :, 0], q[0])
        return q.double()

    other = noise(1, 1, 16, seed=1)
    near = (turned(vector, 3) * turned(other, 1)).sum()
    far = (turned(vector, 42) * turned(other, 40)).sum()
    torch.testing.assert_close(near, far, rtol=1e-5, atol=1e-5)  # angles up to 42 are float32
    torch.testing.assert_close(turned(vector, 30).norm(), vector.double().norm(), **TOLERANCE)


GOOD: dict[str, Any] = {
    "q": torch.zeros(3, 4, 16),
    "k": torch.zeros(3, 2, 16),
    "v": torch.zeros(3, 2, 16),
    "positions": torch.zeros(3, dtype=torch.int64),
    "slot_mapping": torch.zeros(3, dtype=torch.int64),
    "key_cache": torch.zeros(8, 2, 16, 4),
    "value_cache": torch.zeros(8, 2, 4, 16),
    "cos": torch.zeros(64, 8),
    "sin": torch.zeros(64, 8),
    "query_starts": torch.tensor([0, 3], dtype=torch.int32),
    "context_lens": torch.tensor([3], dtype=torch.int32),
    "block_tables": torch.zeros(1, 1, dtype=torch.int32),
}


def store(arguments: dict[str, Any]) -> None:
    names = ("positions", "slot_mapping", "key_cache", "value_cache")
    rotate_and_store(
        arguments["q"],
        arguments["k"],
        arguments["v"],
        table=RotaryTable(arguments["cos"], arguments["sin"]),
        **{name: arguments[name] for name in names},
    )


def attend(arguments: dict[str, Any]) -> None:
    names = ("query_starts", "context_lens", "block_tables")
    paged_attention(
        arguments["q"],
        arguments["key_cache"],
        arguments["value_cache"],
        scale=1.0,
        **{name: arguments[name] for name in names},
    )


WRONG: list[tuple[Callable[[dict[str, Any]], None], str, torch.Tensor]] = [
    (store, "q", torch.zeros(3, 16, 4).transpose(1, 2)),
    (store, "k", torch.zeros(3, 3, 16)),
    (store, "v", torch.zeros(2, 2, 16)),
    (store, "positions", torch.zeros(3, dtype=torch.int32)),
    (store, "slot_mapping", torch.zeros(4, dtype=torch.int64)),
    (store, "cos", torch.zeros(64, 16)),
    (store, "sin", torch.zeros(32, 8)),
    (store, "key_cache", torch.zeros(8, 2, 4, 16).transpose(2, 3)),
    (store, "value_cache", torch.zeros(7, 2, 4, 16)),
    (attend, "q", torch.zeros(3, 4, 16).double()),
    (attend, "key_cache", torch.zeros(8, 2, 4, 16)),
    (attend, "value_cache", torch.zeros(8, 2, 4, 16).half()),
    (attend, "query_starts", torch.tensor([0, 3])),
    (attend, "context_lens", torch.tensor([3])),
    (attend, "block_tables", torch.zeros(2, 1, dtype=torch.int32)),
]


@pytest.mark.parametrize(("call", "name", "value"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_wrong_arguments_are_named(call: Callable[[dict[str, Any]], None], name: str, value: torch.Tensor) -> None:
    call(GOOD)
    with pytest.raises(ValueError, match=f"^{name} must be"):
        call(GOOD | {name: value})


def test_heads_that_do_not_share_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="q has 3 heads, which is no multiple of the cache's 2"):
        attend(GOOD | {"q": torch.zeros(3, 3, 16)})
