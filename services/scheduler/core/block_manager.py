"""The block table of each running choice: which blocks it holds, which of them it shares, when it gets more.

    prompt of a new choice    [ found in the cache | new ............... ]
    its blocks                [ shared, read only  | its own, written    ]
    further choices           [ the first one's full blocks | copy of its last ]

A block that a choice writes is held by that choice alone; whoever starts inside a shared block gets a copy of it.
Answers None where blocks are short; whom to preempt is not decided here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.scheduler.core.block_pool import BlockPool
from services.scheduler.core.prefix_cache import ROOT, BlockKey, KeyChain, PrefixCache
from services.scheduler.core.request import Choice, Request
from shared.ids import BlockId

_NUM_AGES: Final = 256
"""Evictions that the age is an average of."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What a choice got when it was admitted; its block table and computed tokens are set."""

    copied: tuple[BlockId, BlockId] | None
    """The shared block to copy and its new copy."""


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a choice can start: the blocks it would share and how many tokens they spare it."""

    shared: list[BlockId]
    to_copy: BlockId | None
    num_computed_tokens: int
    is_cached: bool
    """Whether the prefix cache knows the shared blocks."""

    @property
    def kept(self) -> list[BlockId]:
        """The blocks that must not be lost while the choice is admitted."""
        return self.shared if self.to_copy is None else [*self.shared, self.to_copy]


class Lack:
    """How many more blocks would have to be free to admit a choice, and what it helps if others give up theirs."""

    def __init__(self, pool: BlockPool, num_needed: int, kept: list[BlockId]) -> None:
        self.num_blocks = num_needed - pool.num_free
        """0 or less: nothing is missing."""
        self._pool = pool
        self._kept = frozenset(kept)
        self._num_given_up: dict[BlockId, int] = {}

    def give_up(self, choice: Choice) -> None:
        """Count as if a choice had been preempted. A block is free once all its holders have given it up; one that is
        to be shared anyway helps nobody."""
        for block in choice.block_table:
            num_given_up = self._num_given_up[block] = self._num_given_up.get(block, 0) + 1
            if num_given_up == self._pool.num_holders(block) and block not in self._kept:
                self.num_blocks -= 1


class BlockManager:
    """The blocks of one executor."""

    def __init__(self, pool: BlockPool, cache: PrefixCache, block_size: int) -> None:
        self.pool = pool
        self.cache = cache
        self.block_size = block_size
        self.busy_s = 0.0
        """How long the executor has worked; the scheduler keeps it."""
        self.num_evictions = 0
        """Blocks that were reused although their content could still be found."""
        self.eviction_age_s = 0.0
        """How long those evicted lately had been held by nobody, in seconds that the executor worked."""
        self._freed_at = [0.0] * pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no choice holds, including those that keep reusable prefixes."""
        return self.pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks, held or free, that can be found by their content."""
        return len(self.cache)

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of a request's prompt that are in the cache now."""
        matched = self.cache.match(request.prompt_chain(self.block_size).keys)
        return min(len(matched) * self.block_size, len(request.prompt) - 1)

    def lack(self, choice: Choice) -> "Lack":
        """What is missing for `admit` without headroom. No fork is assumed."""
        start = self._find_start(choice, None)
        return Lack(self.pool, self._num_new(choice, start) + self._num_unheld(start), start.kept)

    def can_admit(self, choice: Choice, headroom: int) -> bool:
        """Whether `admit` would, without a fork."""
        return self._has_room(choice, self._find_start(choice, None), headroom)

    def is_growing(self, choice: Choice) -> bool:
        """Whether a choice's next token takes a new block, or may, where guesses are in flight."""
        return self.num_missing(choice, choice.num_drafts_in_flight + 1) > 0

    @property
    def can_share(self) -> bool:
        """Whether what one choice computes can be found by another."""
        return self.cache.remembers

    def keys_of(self, choice: Choice) -> list[BlockKey]:
        """The keys of all full blocks of a choice that waits."""
        return self._prepare(choice).keys

    def admit(self, choice: Choice, *, fork_of: Choice | None, headroom: int) -> Admission | None:
        """Give a choice the blocks for all its known tokens; None, and no change, if they are not there.

        `fork_of` is a running choice of the same request that has the prompt in its blocks, to share them. Afterwards
        at least `headroom` blocks are free, for those that run already.
        """
        start = self._find_start(choice, fork_of)
        if not self._has_room(choice, start, headroom):
            return None
        num_new = self._num_new(choice, start)
        for block in start.kept:
            self.pool.hold(block)
        choice.block_table = start.shared + [self._take() for _ in range(num_new)]
        choice.num_computed_tokens = start.num_computed_tokens
        choice.num_committed_blocks = len(start.shared) if start.is_cached else 0
        choice.cache_entry = self.cache.entry_of(start.shared[-1]) if start.is_cached and start.shared else ROOT
        if start.to_copy is None:
            return Admission(copied=None)
        # Copies run before anything is written in a step, so the source need not be held any longer.
        self.free_block(start.to_copy)
        return Admission(copied=(start.to_copy, choice.block_table[len(start.shared)]))

    def num_missing(self, choice: Choice, num_tokens: int) -> int:
        """How many blocks a choice lacks for its next `num_tokens`; 0 or less: none."""
        return -(-(choice.num_computed_tokens + num_tokens) // self.block_size) - len(choice.block_table)

    def grow(self, choice: Choice, num_tokens: int, *, headroom: int = 0) -> list[BlockId] | None:
        """Blocks, already appended to its table, for a choice's next `num_tokens`; None, and no change, if short, or
        if fewer than `headroom` would be left."""
        num_needed = self.num_missing(choice, num_tokens)
        if num_needed <= 0:
            return []
        if num_needed > self.pool.num_free - headroom:
            return None
        blocks = [self._take() for _ in range(num_needed)]
        choice.block_table += blocks
        return blocks

    def commit(self, choice: Choice) -> None:
        """Let others find the choice's full blocks whose tokens are known and planned."""
        if choice.num_computed_tokens < (choice.num_committed_blocks + 1) * self.block_size:
            return
        assert choice.key_chain is not None, "only an admitted choice has blocks to commit"
        num_full = min(choice.num_computed_tokens, choice.num_known_tokens) // self.block_size
        if num_full <= choice.num_committed_blocks:
            return
        if num_full > len(choice.key_chain.keys):
            choice.key_chain.extend(choice.known_tokens())
        for index in range(choice.num_committed_blocks, num_full):
            key, block = choice.key_chain.keys[index], choice.block_table[index]
            choice.cache_entry = self.cache.insert(key, block, choice.cache_entry)
        choice.num_committed_blocks = num_full

    def commit_all(self, choices: Sequence[Choice]) -> None:
        """The same for all that run; for most there is nothing to do, since they went on by one token."""
        block_size = self.block_size
        for choice in choices:
            if choice.num_computed_tokens >= (choice.num_committed_blocks + 1) * block_size:
                self.commit(choice)

    def free(self, choice: Choice) -> None:
        """Take all blocks of a choice. Later blocks are freed first, so that they are evicted before their prefix."""
        for block in reversed(choice.block_table):
            self.free_block(block)
        choice.block_table = []
        choice.num_computed_tokens = choice.num_committed_blocks = 0
        choice.cache_entry = ROOT
        choice.key_chain = None

    def free_block(self, block: BlockId) -> None:
        """One holder less for a block; it is kept for later as long as possible if others could find it."""
        self.pool.free(block, is_worth_keeping=block in self.cache)
        self._freed_at[block] = self.busy_s

    def spoil(self, choice: Choice) -> None:
        """Have nobody find the choice's blocks again: what is in them cannot be trusted.

        That goes for blocks it has given up too, if it was preempted or ended meanwhile, and for those it has not
        committed yet.
        """
        self._forget_from(choice, 0)
        choice.num_committed_blocks = len(choice.block_table)
        if choice.is_finished:
            choice.key_chain = None

    def forget_after(self, choice: Choice, num_tokens: int) -> None:
        """Have nobody find what a choice has beyond its first `num_tokens` tokens. For one whose log is about to be cut
        there: should a row of it turn out to have failed, nobody could tell any more which blocks were its."""
        self._forget_from(choice, num_tokens // self.block_size)

    def _forget_from(self, choice: Choice, first: int) -> None:
        found = self.cache.match(self._prepare(choice).keys)
        for block in (*choice.block_table[first:], *found[first:]):
            self.cache.forget(block)

    def check_invariants(self, running: Sequence[Choice], pinned: list[BlockId]) -> None:
        """Raise AssertionError unless the pool's counts are exactly the tables of `running` and what is pinned, and
        writes are private."""
        self.pool.check_invariants()
        holders = [0] * self.pool.num_blocks
        for block in pinned:
            holders[block] += 1
        for choice in running:
            for block in choice.block_table:
                holders[block] += 1
        counted = [self.pool.num_holders(BlockId(block)) for block in range(self.pool.num_blocks)]
        assert holders == counted, "reference counts differ from the block tables"
        for choice in running:
            written = choice.block_table[choice.num_computed_tokens // self.block_size :]
            assert all(holders[block] == 1 and block not in self.cache for block in written), (
                "a written block is shared"
            )

    def _prepare(self, choice: Choice) -> KeyChain:
        """The keys of all full blocks of a choice that waits. They stay right until it runs."""
        if choice.key_chain is None:
            choice.key_chain = choice.request.prompt_chain(self.block_size).fork()
            choice.key_chain.extend(choice.known_tokens())
        return choice.key_chain

    def _found(self, choice: Choice) -> list[BlockId]:
        """What the cache has of a choice that waits. Asked for several times a step, by whoever waits at the head of a
        queue in every step; so only what has changed is looked up."""
        chain = self._prepare(choice)
        is_current = chain.num_forgotten_before == self.cache.num_forgotten
        if not is_current or len(chain.found) < len(chain.keys):
            chain.found = self.cache.match(chain.keys, chain.found if is_current else ())
            chain.num_forgotten_before = self.cache.num_forgotten
        return chain.found

    def _has_room(self, choice: Choice, start: _Start, headroom: int) -> bool:
        num_spare = self.pool.num_free - headroom - self._num_new(choice, start)
        if not 0 <= num_spare < len(start.kept):
            return num_spare >= 0  # whether others hold what it shares makes no difference
        return num_spare >= self._num_unheld(start)

    def _num_new(self, choice: Choice, start: _Start) -> int:
        """Blocks that a choice does not share."""
        return -(-choice.num_known_tokens // self.block_size) - len(start.shared)

    def _num_unheld(self, start: _Start) -> int:
        """Blocks that it shares and that are free as long as nobody holds them."""
        return sum(self.pool.num_holders(block) == 0 for block in start.kept)

    def _find_start(self, choice: Choice, fork_of: Choice | None) -> _Start:
        """The longest beginning that is there already. At least one token is left to compute: sampling needs logits."""
        if fork_of is not None:
            self._prepare(choice)
            blocks, num_there = fork_of.block_table, len(choice.request.prompt)
        else:
            blocks = self._found(choice)
            num_there = len(blocks) * self.block_size
        num_computed = min(num_there, choice.num_known_tokens - 1)
        num_shared, num_inside = divmod(num_computed, self.block_size)
        return _Start(blocks[:num_shared], blocks[num_shared] if num_inside else None, num_computed, fork_of is None)

    def _take(self) -> BlockId:
        block = self.pool.take()
        assert block is not None, "taken more blocks than were counted as free"
        if block in self.cache:
            self.num_evictions += 1
            age_s = self.busy_s - self._freed_at[block]
            self.eviction_age_s += (age_s - self.eviction_age_s) / min(self.num_evictions, _NUM_AGES)
            self.cache.forget(block)
        return block
