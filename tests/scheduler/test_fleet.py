"""Several executors: placement, the lobby, and executors that are lost."""

import pytest

from services.scheduler.core.budget import StepLimits
from services.scheduler.core.fairness import FairShares
from services.scheduler.core.fleet import MAX_LOSSES, Fleet, NeverFits
from services.scheduler.core.prefix_cache import ChainedPrefixCache
from services.scheduler.core.scheduler import Scheduler
from shared.ids import RequestId
from shared.messages import ExecutorCapacity, Outcome
from tests.scheduler.driver import expected_output, make_capacity, make_request
from tests.scheduler.herd import LONG, A, B, Herd


def test_requests_spread_over_equal_executors(herd: Herd) -> None:
    herd.attach(A)
    herd.attach(B)
    for i in range(4):
        herd.fleet.add(make_request(f"r{i}", [i] * 8, arrival=i))
    assert [len(scheduler.waiting) for scheduler in herd.fleet.schedulers.values()] == [2, 2]


def test_a_request_goes_where_its_prefix_is(herd: Herd) -> None:
    herd.attach(A)
    herd.attach(B)
    herd.fleet.add(make_request("first", [9] * 8))
    herd.fleet.add(make_request("second", LONG, arrival=1))
    herd.finish()
    again = make_request("again", LONG, arrival=2)
    herd.fleet.add(again)
    assert [len(scheduler.waiting) for scheduler in herd.fleet.schedulers.values()] == [0, 1]
    herd.finish()
    assert again.num_cached_tokens == len(LONG) - 1


def test_a_request_waits_in_the_lobby_for_an_executor_of_its_model(herd: Herd) -> None:
    herd.attach(A, make_capacity(model="another"))
    request = make_request("r", LONG)
    herd.fleet.add(request)
    assert not herd.step()
    assert herd.fleet.waiting().num_choices == 1
    herd.attach(B)
    herd.finish()
    assert herd.tokens[request.request_id] == expected_output(request)


def test_a_request_in_the_lobby_can_be_cancelled(herd: Herd) -> None:
    request = make_request("r", LONG, num_choices=2)
    herd.fleet.add(request)
    herd.take(herd.fleet.cancel(request.request_id))
    assert herd.ends[request.request_id].outcome is Outcome.CANCELLED
    assert herd.fleet.waiting().num_choices == 0


def test_a_request_that_never_fits_is_refused_with_both_numbers(herd: Herd) -> None:
    herd.attach(A, make_capacity(num_blocks=4, block_size=4))
    with pytest.raises(NeverFits, match="24 tokens of prompt and output cannot fit; at most 16 can"):
        herd.fleet.add(make_request("r", LONG, max_tokens=4))
    assert herd.fleet.num_requests == 0


def test_a_request_for_which_only_a_larger_executor_has_room_goes_there(herd: Herd) -> None:
    herd.attach(A, make_capacity(num_blocks=4, block_size=4))
    herd.attach(B)
    for i in range(3):
        herd.fleet.add(make_request(f"r{i}", LONG, arrival=i))
    assert [len(scheduler.waiting) for scheduler in herd.fleet.schedulers.values()] == [0, 3]


def test_what_a_lost_executor_had_goes_on_elsewhere_with_the_same_tokens(herd: Herd) -> None:
    herd.attach(A)
    requests = [make_request(f"r{i}", [i] * 9, arrival=i, max_tokens=10, num_choices=1) for i in range(3)]
    for request in requests:
        herd.fleet.add(request)
    for _ in range(4):
        herd.step()
    herd.lose(A)
    assert herd.fleet.waiting().num_choices == 3
    herd.attach(B)
    herd.finish()
    for request in requests:
        assert herd.tokens[request.request_id] == expected_output(request)


def test_tokens_that_were_in_flight_on_a_lost_executor_are_computed_again(herd: Herd) -> None:
    herd.attach(A)
    request = make_request("r", LONG, max_tokens=6)
    herd.fleet.add(request)
    herd.step()
    assert herd.fleet.schedule(A) is not None
    herd.lose(A)
    herd.attach(B)
    herd.finish()
    assert herd.tokens[request.request_id] == expected_output(request)


def test_a_request_that_loses_too_many_executors_fails(herd: Herd) -> None:
    request = make_request("r", LONG, max_tokens=20)
    herd.fleet.add(request)
    for _ in range(MAX_LOSSES):
        assert not herd.ends
        herd.attach(A)
        assert herd.fleet.schedule(A) is not None
        herd.lose(A)
    end = herd.ends[request.request_id]
    assert end.outcome is Outcome.FAILED
    assert end.reason == "3 executors in a row died while they ran this request"


def test_losses_count_only_without_a_token_in_between_and_while_it_ran(herd: Herd) -> None:
    running, waiting = make_request("running", LONG, max_tokens=20), make_request("waiting", LONG, arrival=1)
    herd.fleet.add(running)
    herd.fleet.add(waiting)
    for _ in range(2 * MAX_LOSSES):
        herd.attach(A, make_capacity(max_slots=1))
        herd.step()
        herd.lose(A)
    assert not herd.ends
    herd.attach(A)
    herd.finish()
    assert {end.outcome for end in herd.ends.values()} == {Outcome.COMPLETED}


def test_executors_that_leave_in_good_order_are_no_losses(herd: Herd) -> None:
    request = make_request("r", LONG, max_tokens=20)
    herd.fleet.add(request)
    for _ in range(2 * MAX_LOSSES):
        herd.attach(A)
        herd.fleet.schedule(A)
        del herd.executors[A]
        herd.take(herd.fleet.remove_executor(A, has_died=False))
    assert not herd.ends


def test_executors_with_running_outputs_get_less_than_idle_ones(herd: Herd) -> None:
    herd.attach(A)
    herd.attach(B)
    for number in range(12):
        herd.fleet.add(make_request(f"r{number}", [number] * 6, arrival=number, max_tokens=100))
        herd.step()
    assert min(len(scheduler.running) for scheduler in herd.fleet.schedulers.values()) >= 5


def test_a_draining_executor_gets_nothing_new_and_finishes_what_it_runs(herd: Herd) -> None:
    herd.attach(A, make_capacity(max_slots=2))
    requests = [make_request(f"r{number}", [number] * 6, arrival=number, max_tokens=8) for number in range(5)]
    for request in requests:
        herd.fleet.add(request)
    herd.step()
    herd.take(herd.fleet.drain_executor(A))
    assert [len(s.running) for s in herd.fleet.schedulers.values()] == [2]
    assert [len(s.waiting) for s in herd.fleet.schedulers.values()] == [0]
    assert herd.fleet.waiting().num_choices == 3, "in the lobby"
    herd.attach(B)
    herd.fleet.add(make_request("late", [9], arrival=9))
    herd.finish()
    assert herd.tokens[requests[0].request_id] == expected_output(requests[0])
    assert len(herd.ends) == 6
    assert herd.executors[B].num_rows_run > 0


def test_an_executor_with_nothing_left_takes_over_what_waits_elsewhere(herd: Herd) -> None:
    herd.attach(A, make_capacity(max_slots=1))
    for number in range(6):
        herd.fleet.add(make_request(f"r{number}", [number] * 6, arrival=number, max_tokens=8))
    herd.step()
    herd.attach(B, make_capacity(max_slots=1))
    herd.finish()
    assert len(herd.ends) == 6
    assert herd.executors[B].num_rows_run > 10


def test_an_executor_for_whose_plans_a_request_is_too_large_refuses_it(herd: Herd) -> None:
    def small_plans(capacity: ExecutorCapacity, shares: FairShares) -> Scheduler:
        limits = StepLimits(capacity.max_step_tokens, 64, max_plan_bytes=28_000)
        return Scheduler(capacity, limits, ChainedPrefixCache(), shares)

    fleet = Fleet(small_plans)
    fleet.add_executor(A, make_capacity(num_blocks=1000))
    limit = fleet.max_total_tokens("model")
    assert limit is not None
    assert 100 < limit < 4000, "its cache would hold 4000"
    with pytest.raises(NeverFits):
        fleet.add(make_request("r", [1] * limit, max_tokens=4))
    fleet.add(make_request("r", [1] * (limit - 4), max_tokens=4))


def test_an_executor_that_is_too_small_for_what_waits_fails_it_with_both_numbers(herd: Herd) -> None:
    request = make_request("r", LONG, max_tokens=4)
    herd.fleet.add(request)
    herd.attach(A, make_capacity(num_blocks=4, block_size=4))
    assert herd.ends[request.request_id].outcome is Outcome.FAILED
    assert "24 tokens" in str(herd.ends[request.request_id].reason)


def test_stopping_what_has_ended_or_never_was_does_nothing(herd: Herd) -> None:
    herd.attach(A)
    request = make_request("r", LONG)
    herd.fleet.add(request)
    herd.finish()
    assert herd.fleet.stop(request.request_id, 0, 1) == []
    assert herd.fleet.stop(RequestId("unknown"), 0, 1) == []
    assert herd.fleet.cancel(RequestId("unknown")) == []


@pytest.mark.parametrize("how", ["lost", "drained"])
def test_what_waited_on_an_executor_with_another_block_size_finds_and_leaves_the_right_blocks(
    herd: Herd, how: str
) -> None:
    """Its blocks' keys were made for the size that it waited for."""
    herd.attach(A, make_capacity(max_slots=1, block_size=6))
    first = make_request("first", LONG * 7, max_tokens=9)
    second = make_request("second", [*LONG[:12], 30, 31, 32, 33], arrival=1, max_tokens=2)
    herd.fleet.add(first)
    herd.fleet.add(second)
    for _ in range(3):
        herd.step()
    assert second.choices[0].key_chain is not None, "it was looked at"
    herd.attach(B, make_capacity(block_size=4))
    if how == "lost":
        herd.lose(A)
    else:
        herd.take(herd.fleet.drain_executor(A))
    third = make_request("third", list(second.prompt), arrival=2, max_tokens=2)
    herd.finish()
    herd.fleet.add(third)
    herd.finish()
    assert third.num_cached_tokens == 15, "all of its prompt but the last token, in blocks of four"
    for request in (first, second, third):
        assert herd.tokens[request.request_id] == expected_output(request)
