"""Which blocks of one executor's KV cache are free, and who holds the others. Knows nothing of what is in them."""

from shared.ids import BlockId


class BlockPool:
    """Reference counts of all blocks, and the free ones in the order in which they will be taken.

    The free blocks form a doubly linked list in two arrays, so that a block can be taken back from the middle of it
    (a prefix hit) in constant time. Blocks worth keeping wait at the far end, the others are taken first.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._num_holders = [0] * num_blocks
        end = num_blocks  # the list's head and tail: one more element than there are blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [end, *range(num_blocks)]

    def take(self) -> BlockId | None:
        """The free block that is worth least, now held once; None if all are held."""
        block = self._next[self.num_blocks]
        if block == self.num_blocks:
            return None
        self._unlink(block)
        self._num_holders[block] = 1
        return BlockId(block)

    def hold(self, block: BlockId) -> None:
        """One more holder for a block, which may be free."""
        if self._num_holders[block] == 0:
            self._unlink(block)
        self._num_holders[block] += 1

    def free(self, block: BlockId, *, is_worth_keeping: bool) -> None:
        """One holder less. A block without holders is free: to be taken last if worth keeping, else next."""
        if self._num_holders[block] < 1:
            raise ValueError(f"block {block} is already free")
        self._num_holders[block] -= 1
        if self._num_holders[block] == 0:
            self._link(block, at_end=is_worth_keeping)

    def num_holders(self, block: BlockId) -> int:
        """How many hold a block; 0 means free."""
        return self._num_holders[block]

    def free_blocks(self) -> list[BlockId]:
        """The free blocks, the next to be taken first."""
        blocks = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            blocks.append(BlockId(block))
            block = self._next[block]
        return blocks

    def check_invariants(self) -> None:
        """Raise AssertionError if the list of free blocks and the reference counts disagree."""
        free = self.free_blocks()
        assert len(free) == self.num_free, f"{len(free)} blocks in the free list, {self.num_free} counted"
        assert len(set(free)) == len(free), "a block is in the free list twice"
        unheld = {block for block, holders in enumerate(self._num_holders) if holders == 0}
        assert set(free) == unheld, f"free list and reference counts differ in {set(free) ^ unheld}"

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self.num_free -= 1

    def _link(self, block: int, *, at_end: bool) -> None:
        end = self.num_blocks
        before, after = (self._previous[end], end) if at_end else (end, self._next[end])
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self.num_free += 1
