"""The queue of those that wait: its order, and that nobody waits for ever."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.scheduler.core.fairness import FairShares
from services.scheduler.core.request import Choice
from services.scheduler.core.waiting import WaitingQueue
from tests.scheduler.driver import make_request


class Bench:
    """A queue and the counters that it goes by."""

    def __init__(self, max_wait_tokens: int = 1000) -> None:
        self.shares = FairShares()
        self.queue = WaitingQueue(self.shares, max_wait_tokens)
        self.num_arrivals = 0

    def add(self, name: str, tenant: str = "a", priority: int = 0) -> Choice:
        self.num_arrivals += 1
        request = make_request(name, [1], arrival=self.num_arrivals, priority=priority, tenant=tenant)
        self.shares.opened(tenant)
        self.queue.add(request.choices[0])
        return request.choices[0]

    def take(self) -> str:
        choice = next(self.queue.in_order())
        self.queue.remove(choice)
        self.queue.check_invariants()
        return choice.request.request_id

    def order(self) -> list[str]:
        return [choice.request.request_id for choice in self.queue.in_order()]


def test_priority_comes_first_then_the_tenant_with_least_then_arrival() -> None:
    bench = Bench()
    bench.add("a1")
    bench.add("a2")
    bench.add("b1", tenant="b")
    bench.add("low", tenant="c", priority=1)
    bench.add("high", priority=-1)
    bench.shares.charge("a", 10)
    assert bench.order() == ["high", "b1", "a1", "a2", "low"]
    assert [bench.take() for _ in range(5)] == ["high", "b1", "a1", "a2", "low"]
    assert list(bench.queue.in_order()) == []


def test_turns_go_round_when_each_turn_is_charged() -> None:
    bench = Bench()
    for number in range(3):
        bench.add(f"a{number}", tenant="a")
    for number in range(3):
        bench.add(f"b{number}", tenant="b")
    taken = []
    for _ in range(6):
        taken.append(bench.take())
        bench.shares.charge(taken[-1][0], 7)
    assert taken == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_one_that_comes_back_is_the_first_of_its_tenant_again() -> None:
    bench = Bench()
    first = bench.add("first")
    bench.add("second")
    bench.queue.remove(first)
    bench.queue.add(first)
    assert bench.order() == ["first", "second"]


def test_who_waited_too_long_goes_before_everybody_longest_first() -> None:
    bench = Bench(max_wait_tokens=100)
    bench.add("low", priority=9)
    bench.queue.pass_tokens(50)
    bench.add("middle", priority=5)
    bench.queue.pass_tokens(49)
    bench.add("high", priority=-9)
    assert bench.order() == ["high", "middle", "low"]
    bench.queue.pass_tokens(1)
    assert bench.order() == ["low", "high", "middle"]
    bench.queue.pass_tokens(50)
    assert bench.order() == ["low", "middle", "high"]


def test_waiting_adds_up_over_interruptions() -> None:
    bench = Bench(max_wait_tokens=100)
    low = bench.add("low", priority=9)
    bench.queue.pass_tokens(60)
    bench.queue.remove(low)
    bench.queue.pass_tokens(1000)
    bench.queue.add(low)
    bench.add("high")
    assert bench.order() == ["high", "low"]
    bench.queue.pass_tokens(40)
    assert bench.order() == ["low", "high"]


def test_taking_out_one_that_is_not_there_is_an_error() -> None:
    bench = Bench()
    choice = bench.add("a")
    bench.queue.remove(choice)
    with pytest.raises(ValueError, match="choice 0 of a does not wait here"):
        bench.queue.remove(choice)
    assert choice not in bench.queue


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "take", "drop", "pass"]), st.integers(0, 3), st.integers(-1, 1)), max_size=80
    )
)
def test_any_sequence_keeps_the_queues_in_step(moves: list[tuple[str, int, int]]) -> None:
    bench = Bench(max_wait_tokens=20)
    present: list[Choice] = []
    for move, number, priority in moves:
        if move == "add":
            present.append(bench.add(f"r{bench.num_arrivals}", tenant="abcd"[number], priority=priority))
        elif move == "pass":
            bench.queue.pass_tokens(number * 5)
        elif present:
            choice = next(bench.queue.in_order()) if move == "take" else present[number % len(present)]
            bench.queue.remove(choice)
            present.remove(choice)
        bench.queue.check_invariants()
        assert set(bench.queue) == set(present)
        assert set(bench.queue.in_order()) == set(present), "the order leaves somebody out"


def test_nobody_waits_for_more_than_the_limit_and_what_waited_before_it() -> None:
    """A steady stream of better priorities: the low one is next once its limit has passed."""
    bench = Bench(max_wait_tokens=500)
    bench.add("low", priority=9)
    num_tokens = 0
    for number in range(1000):
        bench.add(f"high{number}")
        if bench.take() == "low":
            break
        bench.queue.pass_tokens(10)
        num_tokens += 10
    assert num_tokens == 500
