"""Bounds on how long anyone waits: queued, with a prompt that others' prompts push aside, or for a prefix.

The bound that the core gives, in tokens computed on the executor: whoever was passed over while `max_wait_tokens` were
computed goes before everybody else, and gives way to nobody, from then on.
"""

from services.scheduler.core.request import Request
from shared.messages import StepPlan
from tests.scheduler.driver import Bench, expected_output, make_capacity, make_request

MAX_WAIT = 1000


def steps_of(bench: Bench, request: Request, stream: list[Request], max_steps: int) -> list[StepPlan]:
    """Steps until a request has ended, with one more of a stream queued before each."""
    plans: list[StepPlan] = []
    while request.request_id not in bench.ends():
        assert len(plans) < max_steps, "still waits"
        bench.add(stream[len(plans)])
        plan = bench.step()
        assert plan is not None
        plans.append(plan)
    return plans


def test_a_queued_low_priority_starts_once_the_bound_has_passed() -> None:
    """Better ones take both slots all the time."""
    bench = Bench(make_capacity(max_slots=2), max_wait_tokens=MAX_WAIT)
    stream = [make_request(f"high{i}", [i % 40] * 20, arrival=1 + i, max_tokens=2) for i in range(500)]
    bench.add(stream.pop(), stream.pop())
    bench.step()
    low = make_request("low", [41] * 8, arrival=0, max_tokens=4, priority=9)
    bench.add(low)
    plans = steps_of(bench, low, stream, 400)
    first = next(i for i, plan in enumerate(plans) if any(each.request_id == "low" for each in plan.assigned))
    num_tokens_before = sum(sum(plan.counts) for plan in plans[:first])
    longest = 20 + 2  # of those that held the slots
    assert MAX_WAIT <= num_tokens_before <= MAX_WAIT + 2 * longest
    assert len(plans) - first == 4, "once it runs it gives way to nobody"
    assert bench.output(low) == expected_output(low)


def test_a_prompt_that_better_ones_push_aside_in_every_step_goes_first_once_the_bound_has_passed() -> None:
    """It has a slot, but better and shorter prompts take all that a step can hold beside the outputs."""
    bench = Bench(make_capacity(num_blocks=1000, max_slots=64, max_step_tokens=256), max_wait_tokens=MAX_WAIT)
    bench.add(make_request("output", [40], max_tokens=900))
    bench.step()
    long = make_request("long", [41] * 640, arrival=1000, max_tokens=2, priority=9)
    bench.add(long)
    stream = [make_request(f"r{i}", [i % 40, i // 40] * 32, arrival=1 + i, max_tokens=1) for i in range(500)]
    plans = steps_of(bench, long, stream, 100)
    num_tokens = sum(sum(plan.counts) for plan in plans)
    assert num_tokens <= MAX_WAIT + 2 * 640 + 3 * 65, "after the bound at least half of each step is its own"


def test_a_request_does_not_wait_for_a_prefix_that_a_worse_priority_computes() -> None:
    """The low one gets nothing of a step while better prompts are there; who waits for it would not either."""
    bench = Bench(make_capacity(num_blocks=1000, max_slots=32, max_step_tokens=256))
    bench.add(make_request("output", [40], max_tokens=900))
    bench.step()
    prefix = [41] * 600
    low = make_request("low", [*prefix, 1], arrival=1, max_tokens=1, priority=9)
    bench.add(low)
    bench.step()
    high = make_request("high", [*prefix, 2], arrival=2, max_tokens=1)
    bench.add(high)
    stream = [make_request(f"r{i}", [i % 40, i // 40] * 32, arrival=3 + i, max_tokens=1) for i in range(500)]
    plans = steps_of(bench, high, stream, 100)
    assert len(plans) <= 2 * 600 / 64 + 3, "it has half of each step from the first on"


def test_requests_with_one_prefix_that_come_together_compute_it_once() -> None:
    bench = Bench(make_capacity(num_blocks=200, max_slots=8, max_step_tokens=64))
    requests = [make_request(f"r{i}", [*range(200), 40 + i], arrival=i, max_tokens=2) for i in range(8)]
    bench.add(*requests)
    bench.finish()
    assert bench.executor.num_tokens_computed == 201 + 7 * 1 + 8
    assert [request.num_cached_tokens for request in requests] == [0] + [200] * 7


def test_a_request_that_waited_in_the_queue_of_a_lost_executor_has_not_waited_for_nothing() -> None:
    bench = Bench(make_capacity(max_slots=1), max_wait_tokens=MAX_WAIT)
    low = make_request("low", [41] * 8, arrival=0, max_tokens=1, priority=9)
    bench.add(make_request("first", [1] * 4, arrival=1, max_tokens=40), low)
    for _ in range(30):
        bench.step()
    bench.scheduler.evacuate()
    num_waited = low.choices[0].num_tokens_waited
    assert num_waited == 4 + 29
    bench.scheduler.add(low)
    bench.scheduler.waiting.pass_tokens(MAX_WAIT - num_waited)
    assert bench.scheduler.waiting.is_overdue(low.choices[0])


def test_a_high_priority_is_served_at_once_even_if_all_low_ones_have_waited_beyond_the_bound() -> None:
    """Under a long overload everybody is overdue. They may hold half of the slots before better priorities, not all."""
    bench = Bench(make_capacity(num_blocks=256, max_slots=4), max_wait_tokens=MAX_WAIT)
    low = [make_request(f"low{i}", [i] * 8, arrival=i, max_tokens=30, priority=1) for i in range(60)]
    bench.add(*low)
    while not all(bench.scheduler.waiting.is_overdue(choice) for choice in bench.scheduler.waiting):
        bench.step()
    for _ in range(40):
        bench.step()
    assert len(bench.scheduler.waiting) > 20
    for number in range(5):
        high = make_request(f"high{number}", [40 + number] * 8, arrival=100 + number, max_tokens=5)
        bench.add(high)
        for _ in range(5):
            bench.step()
        assert bench.output(high) == expected_output(high), "a token in each step from the first on"


def test_who_waited_beyond_the_bound_gets_half_of_the_slots_however_many_better_ones_come() -> None:
    bench = Bench(make_capacity(num_blocks=256, max_slots=4), max_wait_tokens=MAX_WAIT)
    low = [make_request(f"low{i}", [i] * 8, arrival=i, max_tokens=10, priority=1) for i in range(20)]
    bench.add(*low)
    number = 0
    while not all(request.request_id in bench.ended_in_step for request in low):
        while len(bench.scheduler.waiting) < 40:
            bench.add(make_request(f"high{number}", [number % 40] * 8, arrival=100 + number, max_tokens=10))
            number += 1
        bench.step()
        assert bench.num_steps < MAX_WAIT / 4 + 20 / 2 * 10 * 1.5, "twenty, two at a time, ten steps each"
