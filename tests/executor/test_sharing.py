"""Which queries of a step are put together: only those that really begin with the same blocks, and each once."""

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from services.executor.attention.sharing import Member, shared_pieces

BLOCK_SIZE = 16


def tables_of(*rows: list[int]) -> npt.NDArray[np.int32]:
    table = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    return table


def decoding(*positions: int) -> list[Member]:
    return [Member(sequence, sequence, 1, position) for sequence, position in enumerate(positions)]


def test_sequences_that_begin_alike_are_one_piece_up_to_where_they_differ() -> None:
    tables = tables_of([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 8], [7, 2, 3, 4, 5, 6])
    members = decoding(90, 85, 90)
    assert shared_pieces(members, tables, BLOCK_SIZE, 8, 1) == [(members[:2], 64), (members[2:], 0)]


def test_a_block_that_a_query_is_inside_of_is_not_shared() -> None:
    tables = tables_of(list(range(10)), list(range(10)))
    assert shared_pieces(members := decoding(150, 129), tables, BLOCK_SIZE, 8, 1) == [(members, 128)]
    assert shared_pieces(members := decoding(150, 127), tables, BLOCK_SIZE, 8, 1) == [(members, 64)]


def test_a_tile_that_is_shared_in_part_is_not_shared() -> None:
    tables = tables_of([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7])
    assert shared_pieces(members := decoding(95, 90), tables, BLOCK_SIZE, 8, 1) == [(members, 64)]


def test_little_in_common_is_not_worth_a_piece() -> None:
    tables = tables_of([1, 2, 3], [1, 2, 4])
    members = decoding(40, 40)
    assert shared_pieces(members, tables, BLOCK_SIZE, 8, 1) == [([members[0]], 0), ([members[1]], 0)]


def test_there_are_pieces_for_every_thread() -> None:
    tables = tables_of(*([[1, 2, 3, 4, 5]] * 8))
    assert [len(piece) for piece, _ in shared_pieces(decoding(*[70] * 8), tables, BLOCK_SIZE, 8, 4)] == [2, 2, 2, 2]


@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=7, max_size=7), max_size=12),
    data=st.data(),
    max_queries=st.integers(4, 8),
    num_shares=st.integers(1, 6),
)
def test_every_member_is_in_one_piece_whose_beginning_it_has(
    rows: list[list[int]], data: st.DataObject, max_queries: int, num_shares: int
) -> None:
    tables = tables_of(*rows) if rows else np.zeros((0, 7), np.int32)
    members = [
        Member(row, 10 * row, data.draw(st.integers(1, 3)), data.draw(st.integers(0, 7 * BLOCK_SIZE - 4)))
        for row in range(len(rows))
    ]
    pieces = shared_pieces(members, tables, BLOCK_SIZE, max_queries, num_shares)
    assert sorted(member for piece, _ in pieces for member in piece) == members
    for piece, num_shared in pieces:
        assert sum(member.num_queries for member in piece) <= max_queries
        blocks = num_shared // BLOCK_SIZE
        assert num_shared == blocks * BLOCK_SIZE <= min(member.position for member in piece)
        assert len({tuple(rows[member.sequence][:blocks]) for member in piece}) == 1
