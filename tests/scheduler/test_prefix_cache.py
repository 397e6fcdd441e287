"""The prefix cache: what it finds, what it must never find, and salts that cannot be confused."""

from array import array
from itertools import count

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.scheduler.core.prefix_cache import (
    ROOT,
    ChainedPrefixCache,
    Hash,
    KeyChain,
    block_hash,
    encode_salts,
)
from shared.ids import BlockId

SIZE = 2


def chain_of(
    tokens: list[int], hash_function: Hash = block_hash, salts: list[tuple[str, str]] | None = None
) -> KeyChain:
    chain = KeyChain(salts or [], SIZE, hash_function)
    chain.extend(array("i", tokens))
    return chain


def insert(cache: ChainedPrefixCache, chain: KeyChain, blocks: list[int]) -> None:
    parent = ROOT
    for key, block in zip(chain.keys, blocks, strict=True):
        parent = cache.insert(key, BlockId(block), parent)


def test_only_full_blocks_have_keys() -> None:
    assert len(chain_of([1, 2, 3]).keys) == 1
    assert len(chain_of([1, 2, 3, 4]).keys) == 2


def test_a_chain_extended_in_parts_equals_one_made_at_once() -> None:
    chain = chain_of([1, 2, 3])
    chain.extend(array("i", [1, 2, 3, 4, 5, 6, 7]))
    assert chain.keys == chain_of([1, 2, 3, 4, 5, 6, 7]).keys


def test_the_longest_known_beginning_is_found() -> None:
    cache = ChainedPrefixCache()
    insert(cache, chain_of([1, 2, 3, 4, 5, 6]), [10, 11, 12])
    assert cache.match(chain_of([1, 2, 3, 4, 9, 9]).keys) == [10, 11]
    assert cache.match(chain_of([9, 9, 3, 4]).keys) == []


def test_equal_blocks_after_different_prefixes_are_different() -> None:
    cache = ChainedPrefixCache()
    insert(cache, chain_of([1, 2, 3, 4]), [10, 11])
    assert cache.match(chain_of([3, 4]).keys) == []


def test_a_second_block_with_the_same_content_leaves_the_first_in_place() -> None:
    cache = ChainedPrefixCache()
    insert(cache, chain_of([1, 2, 3, 4]), [10, 11])
    insert(cache, chain_of([1, 2, 3, 4, 5, 6]), [20, 21, 22])
    assert cache.match(chain_of([1, 2, 3, 4, 5, 6]).keys) == [10, 11, 22]
    assert BlockId(20) not in cache


def test_a_forgotten_block_hides_what_followed_it() -> None:
    cache = ChainedPrefixCache()
    insert(cache, chain_of([1, 2, 3, 4]), [10, 11])
    cache.forget(BlockId(10))
    assert cache.match(chain_of([1, 2, 3, 4]).keys) == []
    insert(cache, chain_of([1, 2]), [20])
    assert cache.match(chain_of([1, 2, 3, 4]).keys) == [20], "the old continuation belongs to an entry that is gone"


def test_other_salts_share_nothing() -> None:
    cache = ChainedPrefixCache()
    insert(cache, chain_of([1, 2], salts=[("tenant", "a")]), [10])
    assert cache.match(chain_of([1, 2], salts=[("tenant", "b")]).keys) == []
    assert cache.match(chain_of([1, 2], salts=[("adapter", "a")]).keys) == []
    assert cache.match(chain_of([1, 2]).keys) == []
    assert cache.match(chain_of([1, 2], salts=[("tenant", "a")]).keys) == [10]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([("tenant", "a")], [("tenanta", "")]),
        ([("tenant", "a"), ("adapter", "b")], [("tenant", "aadapterb")]),
        ([("tenant", "")], []),
        ([("tenant", "a\x00")], [("tenant", "a")]),
        ([("a", "b"), ("c", "d")], [("c", "d"), ("a", "b")]),
    ],
)
def test_salts_that_look_alike_are_encoded_apart(one: list[tuple[str, str]], other: list[tuple[str, str]]) -> None:
    assert encode_salts(one) != encode_salts(other)


salts = st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=3)


@given(salts, salts)
def test_salts_are_encoded_injectively(one: list[tuple[str, str]], other: list[tuple[str, str]]) -> None:
    assert (encode_salts(one) == encode_salts(other)) == (one == other)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["insert", "insert", "match", "forget"]),
            st.lists(st.integers(0, 2), min_size=2, max_size=8),
            st.integers(0, 40),
        ),
        max_size=60,
    ),
    st.integers(1, 6),
)
def test_colliding_hashes_never_serve_another_prompts_blocks(
    moves: list[tuple[str, list[int], int]], num_hashes: int
) -> None:
    def weak_hash(data: bytes) -> bytes:
        return bytes([block_hash(data)[0] % num_hashes])

    cache = ChainedPrefixCache()
    fresh = count()
    holds: dict[int, list[int]] = {}  # block → all tokens up to its end
    for move, tokens, number in moves:
        chain = chain_of(tokens, weak_hash)
        if move == "insert":
            # As the block manager does: go on from what matches, with new blocks for the rest.
            matched = cache.match(chain.keys)
            parent = cache.entry_of(matched[-1]) if matched else ROOT
            for index in range(len(matched), len(chain.keys)):
                block = next(fresh)
                holds[block] = tokens[: (index + 1) * SIZE]
                parent = cache.insert(chain.keys[index], BlockId(block), parent)
        elif move == "forget":
            cache.forget(BlockId(number))
        for index, block in enumerate(cache.match(chain.keys)):
            assert holds[block] == tokens[: (index + 1) * SIZE]
        cache.check_invariants()
