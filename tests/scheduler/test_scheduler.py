"""The core scheduler on one executor, one behaviour a test."""

from array import array

import pytest

from services.scheduler.core.pipeline import StepMismatch
from services.scheduler.core.prefix_cache import ChainedPrefixCache, NoPrefixCache, PrefixCache
from services.scheduler.core.request import Choice, ChoiceState, IllegalTransition
from shared.messages import FinishReason, Outcome, StepResult
from tests.scheduler.driver import Bench, expected_output, make_capacity, make_request

LONG = list(range(1, 21))


def test_a_request_runs_from_prompt_to_its_last_token() -> None:
    bench = Bench()
    request = make_request("r", LONG, max_tokens=5)
    bench.add(request)
    bench.finish()
    assert bench.output(request) == expected_output(request)
    assert bench.ends() == {"r": Outcome.COMPLETED}
    assert request.choices[0].finish_reason is FinishReason.LENGTH
    assert bench.num_free_blocks == bench.capacity.num_blocks


def test_an_end_token_ends_a_choice_and_is_part_of_its_log() -> None:
    bench = Bench()
    probe = make_request("probe", LONG, max_tokens=8)
    end = expected_output(probe)[3]
    request = make_request("r", LONG, max_tokens=8, end_token_ids=(end,))
    bench.add(request)
    bench.finish()
    assert bench.output(request) == expected_output(request)
    assert bench.output(request)[-1] == end
    assert request.choices[0].finish_reason is FinishReason.STOP


def test_a_long_prompt_is_computed_in_chunks_while_others_go_on() -> None:
    bench = Bench(max_chunk=7)
    short, long = make_request("short", [1, 2], max_tokens=8), make_request("long", LONG, arrival=1)
    bench.add(short)
    bench.step()
    bench.add(long)
    counts = []
    for _ in range(3):
        plan = bench.step()
        assert plan is not None
        counts.append(list(plan.counts))
    assert counts == [[1, 7], [1, 7], [1, 6]]


def test_every_running_choice_gets_a_token_however_long_the_prompts_before_it() -> None:
    bench = Bench(make_capacity(max_step_tokens=10, max_slots=3))
    first, second = make_request("first", LONG * 3), make_request("second", [3, 4], arrival=1, max_tokens=9)
    bench.add(second)
    bench.step()
    bench.add(first)
    plan = bench.step()
    assert plan is not None
    assert sorted(plan.counts) == [1, 9]


def test_priority_and_then_arrival_decide_who_is_admitted() -> None:
    bench = Bench(make_capacity(max_slots=1))
    requests = [
        make_request("low", [1], priority=1),
        make_request("late", [1], arrival=2),
        make_request("early", [1], arrival=1),
    ]
    bench.add(*requests)
    bench.finish()
    assert list(bench.ends()) == ["early", "late", "low"]


def test_a_prompt_seen_before_is_computed_only_where_it_differs() -> None:
    bench = Bench()
    first, second = make_request("first", LONG), make_request("second", [*LONG[:16], 99, 98], arrival=1)
    bench.add(first)
    bench.finish()
    computed = bench.executor.num_tokens_computed
    bench.add(second)
    bench.step()
    assert second.num_cached_tokens == 16
    assert bench.executor.num_tokens_computed - computed == 2


def test_the_same_prompt_again_computes_one_token_in_a_copy_of_its_last_block() -> None:
    bench = Bench()
    first, second = make_request("first", LONG), make_request("second", LONG, arrival=1)
    bench.add(first)
    bench.finish()
    bench.add(second)
    plan = bench.step()
    assert plan is not None
    assert second.num_cached_tokens == len(LONG) - 1
    assert (list(plan.starts), list(plan.counts)) == ([len(LONG) - 1], [1])
    assert len(plan.copies) == 2
    bench.finish()
    assert bench.output(second) == expected_output(second)


def test_running_requests_share_blocks_too() -> None:
    bench = Bench()
    first, second = make_request("first", LONG, max_tokens=9), make_request("second", LONG, arrival=1, max_tokens=9)
    bench.add(first)
    bench.step()
    bench.add(second)
    bench.step()
    tables = [choice.block_table for choice in bench.scheduler.running]
    assert tables[0][:4] == tables[1][:4], "the full blocks before the last token are the same"
    bench.finish()
    assert bench.output(second) == expected_output(second)


def test_tenants_do_not_share_blocks() -> None:
    bench = Bench()
    bench.add(make_request("first", LONG, tenant="a"))
    bench.finish()
    other = make_request("other", LONG, arrival=1, tenant="b")
    bench.add(other)
    bench.finish()
    assert other.num_cached_tokens == 0


def test_without_a_cache_everything_is_computed_and_nothing_else_changes() -> None:
    bench = Bench(cache=NoPrefixCache())
    requests = [make_request(f"r{i}", LONG, arrival=i) for i in range(3)]
    bench.add(*requests)
    bench.finish()
    assert [bench.output(request) for request in requests] == [expected_output(request) for request in requests]
    assert all(request.num_cached_tokens == 0 for request in requests)


def test_old_prefixes_are_evicted_from_their_ends_first() -> None:
    bench = Bench(make_capacity(num_blocks=8))
    bench.add(make_request("old", LONG, max_tokens=1))
    bench.finish()
    bench.add(make_request("new", list(range(50, 65)), arrival=1, max_tokens=1))
    bench.finish()
    again = make_request("again", LONG, arrival=2, max_tokens=1)
    bench.add(again)
    bench.step()
    assert 0 < again.num_cached_tokens < len(LONG) - 1, "the beginning survived, the end did not"


def test_a_preempted_choice_keeps_its_place_and_gives_the_same_tokens() -> None:
    bench = Bench(make_capacity(num_blocks=8, block_size=4))
    requests = [make_request(f"r{i}", [i] * 8, arrival=i, max_tokens=12) for i in range(3)]
    bench.add(*requests)
    bench.finish()
    assert bench.scheduler.num_preemptions > 0
    assert [bench.output(request) for request in requests] == [expected_output(request) for request in requests]
    assert list(bench.ends()) == ["r0", "r1", "r2"]
    assert bench.num_free_blocks == 8


def test_a_preempted_choice_resumes_through_the_blocks_that_survived() -> None:
    def num_tokens_computed(cache: PrefixCache) -> int:
        bench = Bench(make_capacity(num_blocks=8), cache=cache)
        requests = [make_request(f"r{i}", [i] * 8, arrival=i, max_tokens=12) for i in range(2)]
        bench.add(*requests)
        bench.finish()
        assert bench.scheduler.num_preemptions > 0
        assert [bench.output(request) for request in requests] == [expected_output(request) for request in requests]
        assert requests[1].num_cached_tokens == 0, "usage tells of the first admission"
        return bench.executor.num_tokens_computed

    assert num_tokens_computed(ChainedPrefixCache()) < num_tokens_computed(NoPrefixCache())


def test_admission_leaves_the_running_room_to_grow() -> None:
    bench = Bench(make_capacity(num_blocks=6, block_size=4))
    first, second = make_request("first", [1] * 12, max_tokens=8), make_request("second", [2] * 12, arrival=1)
    bench.add(first, second)
    bench.step()
    assert [choice.request for choice in bench.scheduler.running] == [first]
    bench.finish()
    assert bench.scheduler.num_preemptions == 0


@pytest.mark.parametrize("num_blocks", range(5, 12))
def test_progress_with_any_number_of_blocks_that_fits_the_largest(num_blocks: int) -> None:
    bench = Bench(make_capacity(num_blocks=num_blocks, block_size=4))
    requests = [make_request(f"r{i}", [i] * (4 + i), arrival=i, max_tokens=12) for i in range(4)]
    bench.add(*requests)
    bench.finish()
    assert [bench.output(request) for request in requests] == [expected_output(request) for request in requests]


def test_choices_share_the_prompt_and_copy_only_its_last_block() -> None:
    bench = Bench()
    request = make_request("r", LONG[:18], num_choices=3, max_tokens=6)
    bench.add(request)
    bench.step()
    assert [choice.state for choice in request.choices] == [
        ChoiceState.RUNNING,
        ChoiceState.WAITING,
        ChoiceState.WAITING,
    ]
    plan = bench.step()
    assert plan is not None
    assert list(plan.counts) == [1, 1, 1]
    assert len(plan.copies) == 4
    assert len({tuple(choice.block_table[:4]) for choice in request.choices}) == 1
    assert len({choice.block_table[4] for choice in request.choices}) == 3
    bench.finish()
    assert [bench.output(request, i) for i in range(3)] == [expected_output(request, i) for i in range(3)]
    assert bench.ends() == {"r": Outcome.COMPLETED}


def test_choices_run_even_if_the_first_ends_with_its_first_token() -> None:
    bench = Bench()
    request = make_request("r", LONG, num_choices=3, max_tokens=1)
    bench.add(request)
    bench.finish()
    assert [bench.output(request, i) for i in range(3)] == [expected_output(request, i) for i in range(3)]


def test_the_next_step_is_planned_before_the_last_ones_tokens_are_known() -> None:
    bench = Bench()
    request = make_request("r", LONG, max_tokens=4)
    bench.add(request)
    plans = [bench.plan() for _ in range(5)]
    assert [plan.starts[0] if plan else None for plan in plans] == [0, 20, 21, 22, None]
    for _ in range(4):
        bench.run()
    assert bench.output(request) == expected_output(request)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_planning_ahead_gives_the_same_tokens_however_choices_end(depth: int) -> None:
    bench = Bench(make_capacity(num_blocks=9, max_slots=2))
    probe = make_request("probe", LONG, max_tokens=8)
    ends_early = make_request("early", LONG, max_tokens=8, end_token_ids=(expected_output(probe)[2],))
    others = [make_request(f"r{i}", [i] * 9, arrival=i, max_tokens=9, num_choices=2) for i in range(1, 4)]
    bench.add(ends_early, *others)
    bench.finish_pipelined(depth)
    assert bench.output(ends_early) == expected_output(ends_early)
    for request in others:
        assert [bench.output(request, i) for i in range(2)] == [expected_output(request, i) for i in range(2)]
    assert bench.num_free_blocks == 9


def test_a_result_out_of_turn_is_refused_and_changes_nothing() -> None:
    bench = Bench()
    bench.add(make_request("r", LONG))
    with pytest.raises(StepMismatch, match="result of step 1, expected none"):
        bench.scheduler.apply(StepResult(1, array("i", [1])))
    bench.plan()
    with pytest.raises(StepMismatch, match="result of step 2, expected 1"):
        bench.scheduler.apply(StepResult(2, array("i", [1])))
    with pytest.raises(StepMismatch, match="sampled 2 tokens, expected 1"):
        bench.scheduler.apply(StepResult(1, array("i", [1, 2])))
    bench.run()
    bench.finish()
    assert bench.ends() == {"r": Outcome.COMPLETED}


def test_illegal_moves_raise_and_change_nothing() -> None:
    choice: Choice = make_request("r", LONG).choices[0]
    with pytest.raises(IllegalTransition, match="choice 0 of r cannot go from WAITING to PREEMPTED"):
        choice.move_to(ChoiceState.PREEMPTED)
    assert choice.state is ChoiceState.WAITING
    choice.move_to(ChoiceState.FINISHED)
    for state in ChoiceState:
        with pytest.raises(IllegalTransition):
            choice.move_to(state)


def test_a_request_needs_a_prompt_and_something_to_generate() -> None:
    with pytest.raises(ValueError, match="needs a prompt"):
        make_request("r", [])
    with pytest.raises(ValueError, match="at least one token"):
        make_request("r", LONG, max_tokens=0)
