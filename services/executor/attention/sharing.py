"""Which sequences of a step begin with the same blocks, so that attention reads these once for all of them."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

_TILE: Final = 64
"""Tokens that attention reads together: only whole ones are shared, so that each query's are the same ones as alone."""


class Member(NamedTuple):
    """A few queries of one sequence that lie together."""

    sequence: int
    first: int
    """The first query, a row of the batch."""
    num_queries: int
    position: int
    """Of the first query in its sequence."""


def shared_pieces(
    members: Sequence[Member], tables: npt.NDArray[np.int32], block_size: int, max_queries: int, num_shares: int
) -> list[tuple[list[Member], int]]:
    """The members, sorted into pieces of at most `max_queries` queries, and how many tokens all of a piece begin with.

    `tables` are the block tables [sequences, blocks]. Whole blocks and tiles before every query are shared. There
    are about `num_shares` pieces at least, where there are so many members, so that every thread has some.
    """
    if not members:
        return []
    by_first_block: dict[int, list[Member]] = {}
    for member, block in zip(members, tables[[member.sequence for member in members], 0].tolist(), strict=True):
        by_first_block.setdefault(block, []).append(member)
    most = max(1, min(max_queries, -(-len(members) // num_shares)))
    pieces: list[tuple[list[Member], int]] = []
    for alike in by_first_block.values():
        piece: list[Member] = []
        for member in alike:
            if piece and (
                len(piece) == most or sum(each.num_queries for each in piece) + member.num_queries > max_queries
            ):
                pieces += _with_shared(piece, tables, block_size)
                piece = []
            piece.append(member)
        pieces += _with_shared(piece, tables, block_size)
    return pieces


def _with_shared(piece: list[Member], tables: npt.NDArray[np.int32], block_size: int) -> list[tuple[list[Member], int]]:
    """A piece with what its members share; if that is little, each of them alone."""
    if len(piece) == 1:
        return [(piece, 0)]
    num_blocks = min(member.position for member in piece) // block_size
    own = tables[[member.sequence for member in piece], :num_blocks]
    differs = (own != own[0]).any(axis=0)
    num_shared = (int(differs.argmax()) if differs.any() else num_blocks) * block_size // _TILE * _TILE
    return [(piece, num_shared)] if num_shared > 0 else [([member], 0) for member in piece]
