"""Which blocks hold which tokens after which prefix, so that a prompt that starts like an earlier one need not be
computed again. Does not own the blocks: the block pool says who holds them.

A full block is found by its chained hash: the hash of (the previous block's hash, the block's tokens), beginning with
typed salts. A hash only finds a candidate. What counts is equality: the block's own tokens, and that its entry was
made as the continuation of the very entry that matched before it. So no collision can serve another prompt's blocks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Final, Protocol

from shared.ids import BlockId
from shared.messages import Int32Array

Hash = Callable[[bytes], bytes]

ROOT: Final = 0
"""The entry that the first block of every prompt continues."""


def block_hash(data: bytes) -> bytes:
    """128 bits of BLAKE2b."""
    return blake2b(data, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class BlockKey:
    """What a full block holds: how to find it, and how to be sure."""

    digest: bytes
    tokens: bytes


class KeyChain:
    """The keys of one choice's full blocks, computed as its tokens become known."""

    __slots__ = ("_block_size", "_hash", "_last", "found", "keys", "num_forgotten_before")

    def __init__(self, salts: Iterable[tuple[str, str]], block_size: int, hash_function: Hash = block_hash) -> None:
        """`salts` are (kind, value) pairs, such as ("tenant", "acme"): chains with other salts share nothing."""
        self.keys: list[BlockKey] = []
        self.found: list[BlockId] = []
        """What a prefix cache found of it when it was asked last."""
        self.num_forgotten_before = 0
        """How many blocks that cache had forgotten by then: `found` holds until it forgets another."""
        self._block_size = block_size
        self._hash = hash_function
        self._last = hash_function(encode_salts(salts))

    def extend(self, tokens: Int32Array) -> None:
        """Add the keys of all blocks that `tokens`, the choice's first tokens, fill and that have none yet."""
        size = self._block_size
        for start in range(len(self.keys) * size, len(tokens) - size + 1, size):
            content = tokens[start : start + size].tobytes()
            self._last = self._hash(self._last + content)
            self.keys.append(BlockKey(self._last, content))

    def fork(self) -> "KeyChain":
        """A copy that can grow on its own."""
        twin = KeyChain.__new__(KeyChain)
        twin.keys, twin._last = self.keys.copy(), self._last
        twin.found, twin.num_forgotten_before = [], 0
        twin._block_size, twin._hash = self._block_size, self._hash
        return twin


def encode_salts(salts: Iterable[tuple[str, str]]) -> bytes:
    """Salts as bytes, each kind and value behind its length, so that no two lists of salts look alike."""
    parts = [part.encode() for salt in salts for part in salt]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


class PrefixCache(Protocol):
    """What the block manager asks of a prefix cache."""

    @property
    def remembers(self) -> bool:
        """Whether what was inserted can be found later."""
        ...

    @property
    def num_forgotten(self) -> int:
        """How many blocks were forgotten so far. As long as that stays, what was found is found again."""
        ...

    def match(self, keys: list[BlockKey], found: Sequence[BlockId] = ()) -> list[BlockId]:
        """The blocks that hold the longest known beginning of a chain. `found` is what it was before, if nothing was
        forgotten since: only what comes after it is looked up."""
        ...

    def insert(self, key: BlockKey, block: BlockId, parent: int) -> int:
        """Remember that `block` holds `key` after entry `parent`; returns its entry, the next block's parent."""
        ...

    def entry_of(self, block: BlockId) -> int:
        """The entry of a block that `match` returned."""
        ...

    def forget(self, block: BlockId) -> None:
        """The block's content is about to be lost, or is not to be used again."""
        ...

    def __contains__(self, block: object) -> bool:
        """Whether the block can be found by its content."""
        ...

    def __len__(self) -> int:
        """How many blocks can be found."""
        ...


class NoPrefixCache:
    """Never finds anything: what the scheduler does without a prefix cache."""

    remembers = False
    num_forgotten = 0

    def match(self, keys: list[BlockKey], found: Sequence[BlockId] = ()) -> list[BlockId]:
        """Nothing."""
        return []

    def insert(self, key: BlockKey, block: BlockId, parent: int) -> int:
        """Remembers nothing."""
        return ROOT

    def entry_of(self, block: BlockId) -> int:
        """There are no entries."""
        return ROOT

    def forget(self, block: BlockId) -> None:
        """Nothing to forget."""

    def __contains__(self, block: object) -> bool:
        return False

    def __len__(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class _Entry:
    number: int
    parent: int
    key: BlockKey
    block: BlockId


class ChainedPrefixCache:
    """Finds blocks by chained hash and compares what it finds."""

    remembers = True

    def __init__(self) -> None:
        self.num_forgotten = 0
        self._by_digest: dict[bytes, _Entry] = {}
        self._by_block: dict[BlockId, _Entry] = {}
        self._numbers = count(ROOT + 1)

    def match(self, keys: list[BlockKey], found: Sequence[BlockId] = ()) -> list[BlockId]:
        """The blocks that hold the longest known beginning of a chain."""
        blocks = list(found)
        parent = self._by_block[blocks[-1]].number if blocks else ROOT
        for index in range(len(blocks), len(keys)):
            key = keys[index]
            entry = self._by_digest.get(key.digest)
            if entry is None or entry.parent != parent or entry.key.tokens != key.tokens:
                break
            blocks.append(entry.block)
            parent = entry.number
        return blocks

    def insert(self, key: BlockKey, block: BlockId, parent: int) -> int:
        """Remember a block. If another block already holds the same after the same prefix, that one stays.

        An entry that is in the way with other content (its prefix is gone, or the hashes collide) is replaced.
        """
        known = self._by_digest.get(key.digest)
        if known is not None:
            if known.parent == parent and known.key.tokens == key.tokens:
                return known.number
            self.forget(known.block)
        self.forget(block)
        entry = _Entry(next(self._numbers), parent, key, block)
        self._by_digest[key.digest] = self._by_block[block] = entry
        return entry.number

    def entry_of(self, block: BlockId) -> int:
        """The entry of a block that `match` returned."""
        return self._by_block[block].number

    def forget(self, block: BlockId) -> None:
        """The block's content is about to be lost, or is not to be used again."""
        entry = self._by_block.pop(block, None)
        if entry is not None:
            del self._by_digest[entry.key.digest]
            self.num_forgotten += 1

    def __contains__(self, block: object) -> bool:
        return block in self._by_block

    def __len__(self) -> int:
        return len(self._by_block)

    def check_invariants(self) -> None:
        """Raise AssertionError if the two indexes disagree."""
        assert len(self._by_digest) == len(self._by_block), "the indexes differ in size"
        for block, entry in self._by_block.items():
            assert entry.block == block, f"entry {entry.number} is filed under block {block}"
            assert self._by_digest[entry.key.digest] is entry, f"entry {entry.number} cannot be found"
