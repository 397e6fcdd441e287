"""The block pool: order of taking, reference counts, and the list of free blocks."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.scheduler.core.block_pool import BlockPool
from shared.ids import BlockId


def take(pool: BlockPool) -> BlockId:
    block = pool.take()
    assert block is not None
    return block


def test_blocks_are_taken_in_order_until_none_is_left() -> None:
    pool = BlockPool(3)
    assert [pool.take() for _ in range(4)] == [0, 1, 2, None]
    assert pool.num_free == 0


def test_a_block_not_worth_keeping_is_taken_before_one_that_is() -> None:
    pool = BlockPool(3)
    a, b, c = take(pool), take(pool), take(pool)
    pool.free(a, is_worth_keeping=True)
    pool.free(b, is_worth_keeping=False)
    pool.free(c, is_worth_keeping=True)
    assert [take(pool) for _ in range(3)] == [b, a, c]


def test_kept_blocks_are_taken_least_recently_released_first() -> None:
    pool = BlockPool(3)
    blocks = [take(pool) for _ in range(3)]
    for block in (blocks[2], blocks[0], blocks[1]):
        pool.free(block, is_worth_keeping=True)
    assert pool.free_blocks() == [blocks[2], blocks[0], blocks[1]]


def test_a_free_block_can_be_held_again_from_the_middle_of_the_list() -> None:
    pool = BlockPool(3)
    blocks = [take(pool) for _ in range(3)]
    for block in blocks:
        pool.free(block, is_worth_keeping=True)
    pool.hold(blocks[1])
    assert pool.free_blocks() == [blocks[0], blocks[2]]
    assert pool.num_holders(blocks[1]) == 1


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(1)
    block = take(pool)
    pool.hold(block)
    pool.free(block, is_worth_keeping=True)
    assert pool.num_free == 0
    pool.free(block, is_worth_keeping=True)
    assert pool.num_free == 1


def test_releasing_a_free_block_is_an_error_and_changes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="block 1 is already free"):
        pool.free(BlockId(1), is_worth_keeping=True)
    pool.check_invariants()


def test_a_pool_has_at_least_one_block() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1, not 0"):
        BlockPool(0)


@given(st.integers(1, 8), st.lists(st.tuples(st.sampled_from(["take", "hold", "release"]), st.integers(0, 7))))
def test_any_sequence_of_moves_keeps_list_and_counts_in_step(num_blocks: int, moves: list[tuple[str, int]]) -> None:
    pool = BlockPool(num_blocks)
    holders = [0] * num_blocks
    for move, number in moves:
        block = BlockId(number % num_blocks)
        if move == "take":
            taken = pool.take()
            assert (taken is None) == (min(holders) > 0)
            if taken is not None:
                assert holders[taken] == 0
                holders[taken] = 1
        elif move == "hold":
            pool.hold(block)
            holders[block] += 1
        elif holders[block]:
            pool.free(block, is_worth_keeping=number % 2 == 0)
            holders[block] -= 1
        pool.check_invariants()
        assert [pool.num_holders(BlockId(b)) for b in range(num_blocks)] == holders
