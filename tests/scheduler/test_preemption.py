"""Who gives way to whom, what it costs, and that nobody gives way for ever."""

import pytest

from services.scheduler.core.prefix_cache import NoPrefixCache
from services.scheduler.core.request import ChoiceState, Request
from shared.messages import Outcome
from tests.scheduler.driver import Bench, expected_output, make_capacity, make_request

LOW, HIGH = 1, 0


def names(bench: Bench) -> list[str]:
    """The requests of those that run, in order."""
    return [choice.request.request_id for choice in bench.scheduler.running]


def run_until_decoding(bench: Bench, *requests: Request) -> None:
    """Add requests and step until each has a first token."""
    bench.add(*requests)
    while not all(request.choices[0].output for request in requests):
        assert bench.step() is not None


def test_a_high_priority_takes_a_slot_at_once_when_low_ones_hold_them_all() -> None:
    bench = Bench(make_capacity(max_slots=3))
    low = [make_request(f"low{i}", [i] * 4, arrival=i, max_tokens=20, priority=LOW) for i in range(3)]
    run_until_decoding(bench, *low)
    high = make_request("high", [9] * 4, arrival=9, max_tokens=2, priority=HIGH)
    bench.add(high)
    plan = bench.step()
    assert plan is not None
    assert [assignment.request_id for assignment in plan.assigned] == ["high"]
    assert len(bench.output(high)) == 1, "its first token comes with the very next step"
    assert names(bench) == ["high", "low0", "low1"], "the latest gave way"
    bench.finish()
    assert bench.ended_in_step["high"] == 3
    for request in low:
        assert bench.output(request) == expected_output(request)


def test_a_high_priority_takes_blocks_at_once_when_low_ones_hold_them_all() -> None:
    bench = Bench(make_capacity(num_blocks=12))
    low = [make_request(f"low{i}", [i] * 11, arrival=i, max_tokens=5, priority=LOW) for i in range(3)]
    run_until_decoding(bench, *low)
    assert bench.num_free_blocks < 6
    high = make_request("high", [9] * 20, arrival=9, max_tokens=2, priority=HIGH)
    bench.add(high)
    bench.step()
    assert "high" in names(bench)
    assert len(bench.output(high)) == 1
    bench.finish()
    assert [bench.output(request) for request in low] == [expected_output(request) for request in low]


def test_blocks_that_low_ones_share_with_each_other_are_freed_by_preempting_them_together() -> None:
    """Each of them alone holds one block of its own; what they hold together is nearly everything."""
    bench = Bench(make_capacity(num_blocks=18))
    low = make_request("low", list(range(40)), max_tokens=4, num_choices=4, priority=LOW)
    bench.add(low)
    bench.step()
    bench.step()
    assert len(bench.scheduler.running) == 4
    assert bench.num_free_blocks == 4
    high = make_request("high", [49] * 44, arrival=1, max_tokens=2, priority=HIGH)
    bench.add(high)
    bench.step()
    assert len(bench.output(high)) == 1
    bench.finish()
    for index in range(4):
        assert bench.output(low, index) == expected_output(low, index)


def test_nobody_is_preempted_if_that_would_not_be_enough() -> None:
    bench = Bench(make_capacity(num_blocks=16, max_slots=8))
    first = make_request("first", [1] * 30, max_tokens=20)
    low = make_request("low", [2] * 8, arrival=1, max_tokens=8, priority=LOW)
    run_until_decoding(bench, first, low)
    bench.add(make_request("high", [3] * 40, arrival=2, max_tokens=2, priority=HIGH))
    bench.step()
    assert names(bench) == ["first", "low"]
    assert bench.scheduler.num_preemptions == 0


def test_preempting_whoever_shares_the_newcomers_prefix_counts_its_blocks_once() -> None:
    """The blocks that the newcomer finds are free after the preemption, but not for anything else."""
    bench = Bench(make_capacity(num_blocks=8, max_slots=8))
    prefix = list(range(12))
    low = make_request("low", [*prefix, 40], max_tokens=3, priority=LOW)
    other = make_request("other", [2] * 12, arrival=1, max_tokens=3)
    run_until_decoding(bench, other, low)
    bench.add(make_request("high", [*prefix, *range(13, 21)], arrival=2, max_tokens=2, priority=HIGH))
    bench.step()
    assert ("high" in names(bench)) == (bench.scheduler.num_preemptions > 0), "preempted in vain"
    bench.finish()


def test_a_preempted_choice_is_resumed_before_those_behind_it_even_with_a_token_on_its_way() -> None:
    """Two steps are planned ahead, so when it is preempted its last token is not known yet."""
    bench = Bench(make_capacity(num_blocks=8, max_slots=2))
    first = make_request("first", [1] * 12, arrival=0, max_tokens=12)
    second = make_request("second", [2] * 12, arrival=1, max_tokens=6)
    third = make_request("third", [3] * 2, arrival=2, max_tokens=12)
    bench.add(first, second, third)
    while True:
        bench.plan()
        if bench.scheduler.num_preemptions:
            break
        if len(bench.plans) == 2:
            bench.run()
    assert second.choices[0].state is ChoiceState.PREEMPTED
    assert second.choices[0].num_in_flight > 0
    assert third.choices[0].state is ChoiceState.WAITING, "the slot is kept for the one before it"
    bench.finish_pipelined(2)
    assert list(bench.ends()) == ["first", "second", "third"]
    assert [bench.output(r) for r in (first, second, third)] == [expected_output(r) for r in (first, second, third)]


def test_a_preempted_choice_computes_only_what_was_lost_of_its_blocks() -> None:
    bench = Bench(make_capacity(num_blocks=32, max_slots=1))
    low = make_request("low", list(range(33)), max_tokens=8, priority=LOW)
    run_until_decoding(bench, low)
    for _ in range(3):
        bench.step()
    before = bench.executor.num_tokens_computed
    bench.add(make_request("high", [45] * 4, arrival=1, max_tokens=1, priority=HIGH))
    bench.step()
    plan = bench.step()
    assert plan is not None
    assert (plan.assigned[0].request_id, len(plan.assigned[0].token_ids)) == ("low", 37)
    assert list(plan.starts) == [36], "36 tokens were in nine full blocks, which survived"
    assert bench.executor.num_tokens_computed - before == 4 + 1
    bench.finish()
    assert bench.output(low) == expected_output(low)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [6, 7, 8, 10, 13, 17, 24])
def test_preemptions_for_blocks_are_fewer_than_blocks_grown(num_blocks: int, depth: int) -> None:
    """Each is caused by a choice before it in order that takes a block, so there is no thrashing."""
    bench = Bench(make_capacity(num_blocks=num_blocks, max_slots=8))
    requests = [make_request(f"r{i}", [i] * (3 + i % 5), arrival=i, max_tokens=16) for i in range(8)]
    bench.add(*requests)
    bench.finish_pipelined(depth)
    assert [bench.output(request) for request in requests] == [expected_output(request) for request in requests]
    num_grown = sum(-(-request.max_total_tokens // 4) - len(request.prompt) // 4 for request in requests)
    assert bench.scheduler.num_preemptions < num_grown
    num_needed = sum(request.max_total_tokens - 1 for request in requests)
    assert bench.executor.num_tokens_computed < 2 * num_needed, "most work was done again"


def test_a_stream_of_high_ones_preempts_a_low_one_once_each_at_most() -> None:
    bench = Bench(make_capacity(max_slots=1), max_wait_tokens=1000)
    low = make_request("low", [1] * 9, max_tokens=12, priority=LOW)
    run_until_decoding(bench, low)
    for number in range(5):
        bench.add(make_request(f"high{number}", [number] * 4, arrival=1 + number, max_tokens=2))
        for _ in range(4):
            bench.step()
    bench.finish()
    assert bench.scheduler.num_preemptions == 5
    assert bench.output(low) == expected_output(low)


def test_one_tenant_gives_way_to_another_only_down_to_its_part_and_only_twice() -> None:
    bench = Bench(make_capacity(max_slots=4, num_blocks=256))
    flood = [make_request(f"a{i}", [i] * 4, arrival=i, max_tokens=40) for i in range(8)]
    run_until_decoding(bench, *flood[:4])
    bench.add(*flood[4:])
    late = [make_request(f"b{i}", [40 + i] * 4, arrival=10 + i, max_tokens=40, tenant="b") for i in range(8)]
    bench.add(*late)
    for _ in range(3):
        bench.step()
    tenants = sorted(choice.request.tenant for choice in bench.scheduler.running)
    assert tenants == ["a", "a", "b", "b"], "each has half of the slots within three steps"
    bench.finish()
    assert all(request.choices[0].num_times_gave_way <= 2 for request in [*flood, *late])
    for request in [*flood, *late]:
        assert bench.output(request) == expected_output(request)


@pytest.mark.parametrize("max_chunk", [4, 64])
def test_choices_do_not_start_from_a_prompt_that_is_computed_again_in_the_same_step(max_chunk: int) -> None:
    """The first choice was preempted before the others got a slot; all of them are seated again together."""
    bench = Bench(make_capacity(max_slots=2), cache=NoPrefixCache(), max_chunk=max_chunk)
    other = make_request("other", [5] * 4, arrival=0, max_tokens=12)
    low = make_request("low", list(range(10)), arrival=1, max_tokens=12, num_choices=2, priority=LOW)
    run_until_decoding(bench, other, low)
    high = make_request("high", [9] * 4, arrival=2, max_tokens=14)
    bench.add(high)
    bench.step()
    assert [choice.state for choice in low.choices] == [ChoiceState.PREEMPTED, ChoiceState.WAITING]
    bench.take(bench.scheduler.end(other, Outcome.CANCELLED))
    bench.take(bench.scheduler.end(high, Outcome.CANCELLED))
    bench.finish()
    for index in range(2):
        assert bench.output(low, index) == expected_output(low, index)


def test_a_choice_that_gave_way_to_another_tenant_twice_runs_to_its_end_and_the_next_one_gives_way() -> None:
    bench = Bench(make_capacity(max_slots=4, num_blocks=256))
    many = [make_request(f"a{i}", [i] * 4, arrival=i, max_tokens=100) for i in range(4)]
    run_until_decoding(bench, *many)
    for number in range(4):
        short = make_request(f"b{number}", [40 + number] * 4, arrival=10 + number, max_tokens=2, tenant="b")
        bench.add(short)
        for _ in range(6):
            bench.step()
        assert bench.output(short) == expected_output(short), "it was served at once every time"
    assert [request.choices[0].num_times_gave_way for request in many] == [0, 0, 2, 2]
    bench.finish()


def test_nobody_is_preempted_for_one_that_waits_for_a_prefix_being_computed() -> None:
    bench = Bench(make_capacity(num_blocks=256, max_slots=3), max_chunk=8)
    low = [make_request(f"low{i}", [i] * 4, arrival=i, max_tokens=60, priority=LOW) for i in range(2)]
    run_until_decoding(bench, *low)
    prefix = [40] * 80
    bench.add(make_request("first", [*prefix, 1], arrival=2, max_tokens=20))
    bench.step()
    second = make_request("second", [*prefix, 2], arrival=3, max_tokens=2)
    bench.add(second)
    while not second.choices[0].output:
        bench.step()
    assert bench.scheduler.num_preemptions == 1, "once, when the prefix was there"
    assert second.num_cached_tokens == 80
    bench.finish()
    assert [bench.output(request) for request in low] == [expected_output(request) for request in low]


def test_blocks_that_others_take_in_the_same_step_are_counted_too() -> None:
    """Preempting one would do, if the first did not need its next block just now."""
    bench = Bench(make_capacity(num_blocks=9))
    first = make_request("first", [1] * 4, max_tokens=20)
    low = [make_request(f"low{i}", [10 + i] * 5, arrival=1 + i, max_tokens=20, priority=LOW) for i in range(2)]
    bench.add(first, *low)
    for _ in range(5):
        bench.step()
    assert [len(choice.block_table) for choice in bench.scheduler.running] == [2, 3, 3]
    high = make_request("high", [9] * 8, arrival=9, max_tokens=1)
    bench.add(high)
    bench.step()
    assert bench.output(high) == expected_output(high), "it came in with the very step that others gave way in"
    assert bench.scheduler.num_preemptions == 2
    bench.finish()
