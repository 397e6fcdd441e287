"""What planning a step takes, in calls of functions rather than in time: it grows with what is there, not faster."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from services.scheduler.core.prefix_cache import ChainedPrefixCache
from tests.scheduler.driver import Bench, make_capacity, make_request


def num_calls(function: Callable[[], object]) -> int:
    """Calls that a function makes, of Python's own functions too."""
    number = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return number


def calls_with_prompts_overdue(num_slots: int) -> int:
    """Calls for a step in which as many prompts as there are slots have waited for too long, all but a few in vain."""
    capacity = make_capacity(num_blocks=20_000, max_slots=num_slots, max_step_tokens=num_slots + 16)
    bench = Bench(capacity, max_wait_tokens=50)
    bench.add(make_request("output", [40], max_tokens=900))
    bench.step()
    prompts = [make_request(f"r{i}", [i % 50, i // 50] * 150, arrival=1 + i) for i in range(num_slots - 1)]
    bench.add(*prompts)
    for _ in range(num_slots // 16):
        bench.step()
    assert not bench.scheduler.waiting
    for _ in range(6):
        bench.step()
    assert all(request.choices[0].num_tokens_waited >= 50 for request in prompts[num_slots // 2 :])
    return num_calls(bench.scheduler.schedule)


def test_a_step_with_many_overdue_prompts_takes_work_in_proportion_to_them() -> None:
    assert calls_with_prompts_overdue(256) < 5 * calls_with_prompts_overdue(64)


def calls_beside_a_cached_prompt(num_tokens: int, *, num_slots: int) -> int:
    """Calls for a step in which a prompt waits that is in the cache, for a slot or for the blocks that it lacks."""
    num_blocks = 2 * num_tokens // 4 + 40
    bench = Bench(make_capacity(num_blocks=num_blocks, max_slots=num_slots, max_step_tokens=64))
    document = [7] * num_tokens
    bench.add(make_request("document", document, max_tokens=1))
    bench.finish()
    bench.add(make_request("output", [40], arrival=1, max_tokens=900))
    if num_slots > 1:
        bench.add(make_request("large", [*document, *([8] * (num_tokens + 32))], arrival=2, max_tokens=900))
    for _ in range(2 + num_tokens // 50):
        bench.step()
    assert [len(choice.output) > 1 for choice in bench.scheduler.running] == [True] * min(2, num_slots)
    bench.add(make_request("again", [*document, *([9] * (num_tokens + 200))], arrival=3))
    for _ in range(3):
        bench.step()
    assert len(bench.scheduler.waiting) == 1
    return num_calls(bench.scheduler.schedule)


@pytest.mark.parametrize("num_slots", [1, 8], ids=["for a slot", "for blocks"])
def test_a_cached_prompt_that_waits_takes_the_same_work_in_each_step_however_long_it_is(num_slots: int) -> None:
    short, long = (calls_beside_a_cached_prompt(length, num_slots=num_slots) for length in (80, 4000))
    assert long <= short + 10


def test_what_the_cache_has_of_a_waiting_prompt_is_found_again_after_blocks_were_forgotten_or_came() -> None:
    cache = ChainedPrefixCache()
    bench = Bench(make_capacity(max_slots=1, num_blocks=40), cache=cache)
    bench.add(make_request("first", list(range(20)), max_tokens=1))
    bench.finish()
    waiting = make_request("waiting", [*range(20), *range(30, 42)], arrival=9)
    bench.scheduler.waiting.shares.opened("a")
    choice = waiting.choices[0]
    blocks = bench.scheduler.blocks
    assert len(blocks._found(choice)) == 5
    cache.forget(blocks._found(choice)[3])
    assert len(blocks._found(choice)) == 3
    bench.add(make_request("same", [*range(20), *range(30, 42)], arrival=1, max_tokens=1))
    bench.finish()
    assert len(blocks._found(choice)) == 8
    assert blocks._found(choice) == cache.match(blocks.keys_of(choice))
