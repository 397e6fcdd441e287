"""What prefix reuse saves, what is evicted for what, and what looking it up costs, in operations rather than time."""

from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from services.scheduler.core.block_pool import BlockPool
from services.scheduler.core.prefix_cache import ROOT, BlockKey, ChainedPrefixCache, KeyChain, block_hash
from shared.ids import BlockId
from tests.scheduler.driver import Bench, expected_output, make_capacity, make_request

SIZES = [10, 100_000]


class CountingList(list[Any]):
    """Counts how often an element is read or written, or passed in a loop."""

    num_uses = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_uses += 1
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.num_uses += 1
        super().__setitem__(index, value)

    def __iter__(self) -> Iterator[Any]:
        for element in super().__iter__():
            self.num_uses += 1
            yield element


class CountingDict(dict[Any, Any]):
    """Counts what is asked of it, and fails if anybody walks through it."""

    num_uses = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.num_uses += 1
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self.num_uses += 1
        return super().pop(key, *default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.num_uses += 1
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self.num_uses += 1
        super().__delitem__(key)

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("walks through all entries")


@pytest.mark.parametrize("num_blocks", SIZES)
def test_taking_holding_and_releasing_a_block_cost_the_same_in_a_pool_of_any_size(num_blocks: int) -> None:
    pool = BlockPool(num_blocks)
    links = CountingList(pool._next)
    pool._next = links
    blocks = [pool.take() for _ in range(6)]
    for block in blocks:
        assert block is not None
        pool.free(block, is_worth_keeping=True)
    pool.hold(BlockId(3))
    pool.free(BlockId(3), is_worth_keeping=False)
    pool.take()
    num_moves = 6 + 6 + 3
    assert links.num_uses <= 3 * num_moves


def chain_of(num_blocks: int, first: int = 0) -> KeyChain:
    chain = KeyChain([], 4)
    chain.extend(array("i", range(first, first + 4 * num_blocks)))
    return chain


def fill(cache: ChainedPrefixCache, keys: list[BlockKey], first_block: int = 0) -> None:
    parent = ROOT
    for number, key in enumerate(keys, first_block):
        parent = cache.insert(key, BlockId(number), parent)


@pytest.mark.parametrize("num_known", [0, 1000])
def test_a_lookup_costs_one_step_for_each_block_found_and_an_insert_a_few(num_known: int) -> None:
    cache = ChainedPrefixCache()
    fill(cache, chain_of(num_known, first=1_000_000).keys, first_block=1000)
    chain = chain_of(100)
    fill(cache, chain.keys[:30])
    cache._by_digest, cache._by_block = CountingDict(cache._by_digest), CountingDict(cache._by_block)
    keys = CountingList(chain.keys)
    assert len(cache.match(keys)) == 30
    assert keys.num_uses == cache._by_digest.num_uses == 31
    cache.insert(chain.keys[30], BlockId(30), cache.entry_of(BlockId(29)))
    cache.forget(BlockId(30))
    assert cache._by_digest.num_uses + cache._by_block.num_uses <= 31 + 8


def test_each_full_block_is_hashed_once_however_its_tokens_come() -> None:
    num_hashed = 0

    def counting_hash(data: bytes) -> bytes:
        nonlocal num_hashed
        num_hashed += 1
        return block_hash(data)

    chain = KeyChain([("tenant", "a")], 4, counting_hash)
    tokens = array("i", range(401))
    for length in (7, 8, 200, 201, 202, 401):
        chain.extend(tokens[:length])
    chain.fork().extend(tokens)
    assert num_hashed == 1 + 100, "the salts, and each block"


def test_hits_are_counted_in_tokens_and_evictions_in_blocks_that_could_still_be_found() -> None:
    bench = Bench(make_capacity(num_blocks=16))
    hits = []
    for number, first in enumerate([0, 0, 20, 0, 0]):
        request = make_request(f"r{number}", list(range(first, first + 16)), max_tokens=8)
        bench.add(request)
        bench.finish()
        hits.append(request.num_cached_tokens)
    assert hits == [0, 15, 0, 15, 15]
    cached = bench.scheduler.blocks.num_cached_blocks
    assert (cached, bench.scheduler.blocks.num_evictions) == (10, 0), "two prompts and outputs of five blocks each"
    bench.add(make_request("large", [49] * 40, arrival=9, max_tokens=1))
    bench.finish()
    assert bench.scheduler.blocks.num_evictions == 4, "of the ten blocks it took, six were known to nobody"
    assert bench.scheduler.blocks.num_cached_blocks == 16


def test_the_prefix_used_last_is_evicted_last() -> None:
    bench = Bench(make_capacity(num_blocks=12))
    for number, first in enumerate([0, 20, 0]):
        bench.add(make_request(f"r{number}", list(range(first, first + 16)), arrival=number, max_tokens=1))
        bench.finish()
    bench.add(make_request("new", [49] * 24, arrival=3, max_tokens=1))
    bench.finish()
    hits = []
    for number, first in enumerate([0, 20]):
        request = make_request(f"again{number}", list(range(first, first + 16)), arrival=4 + number, max_tokens=1)
        bench.add(request)
        bench.step()
        hits.append(request.num_cached_tokens)
    assert hits[0] == 15
    assert hits[1] < 15


@pytest.mark.parametrize("num_choices", [2, 5])
@pytest.mark.parametrize("num_prompt_tokens", [40, 42])
def test_choices_hold_the_prompt_once_and_compute_it_once(num_choices: int, num_prompt_tokens: int) -> None:
    bench = Bench(make_capacity(num_blocks=64))
    request = make_request("r", list(range(num_prompt_tokens)), max_tokens=8, num_choices=num_choices)
    bench.add(request)
    bench.step()
    bench.step()
    num_held = bench.capacity.num_blocks - bench.num_free_blocks
    assert num_held == (num_prompt_tokens - 1) // 4 + num_choices + (num_prompt_tokens == 40), "shared, and one each"
    num_extra = bench.executor.num_tokens_computed - num_prompt_tokens
    assert num_extra == 1 + (num_choices - 1), "the first goes on; the others compute the last token of the prompt"
    bench.finish()
    for index in range(num_choices):
        assert bench.output(request, index) == expected_output(request, index)


def test_the_second_identical_request_gives_the_same_tokens_from_the_cache() -> None:
    bench = Bench()
    outputs = []
    for number in range(3):
        request = make_request(f"r{number}", list(range(30)), arrival=0, max_tokens=10)
        bench.add(request)
        bench.finish()
        outputs.append(bench.output(request))
        assert request.num_cached_tokens == (28 if number else 0)
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_planning_ahead_leaves_as_many_blocks_to_be_found(depth: int) -> None:
    bench = Bench()
    request = make_request("r", list(range(10)), max_tokens=11)
    bench.add(request)
    bench.finish_pipelined(depth)
    assert bench.scheduler.blocks.num_cached_blocks == 5, "of 21 tokens the last was not computed"
    again = make_request("again", [*range(10), *bench.output(request)], max_tokens=1)
    bench.add(again)
    bench.step()
    assert again.num_cached_tokens == 20


def test_the_age_of_evicted_blocks_is_the_time_that_the_executor_worked_since_they_were_used() -> None:
    bench = Bench(make_capacity(num_blocks=10), step_seconds=lambda _plan: 2.0)
    bench.add(make_request("old", [1] * 16, max_tokens=1))
    bench.finish()
    bench.add(make_request("new", [2] * 4, arrival=1, max_tokens=9))
    bench.finish()
    assert bench.scheduler.blocks.busy_s == 2.0 * (1 + 9)
    bench.add(make_request("large", [3] * 24, arrival=2, max_tokens=1))
    bench.step()
    blocks = bench.scheduler.blocks
    assert blocks.num_evictions == 3, "of ten blocks three were known to nobody: of the old prompt's four one is left"
    assert blocks.eviction_age_s == 2.0 * 9
