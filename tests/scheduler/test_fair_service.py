"""What a tenant gets while another floods the executor, and what weights are worth. Time is counted in steps."""

from itertools import count
from statistics import mean

import pytest

from services.scheduler.core.prefix_cache import NoPrefixCache
from services.scheduler.core.request import Request
from tests.scheduler.driver import Bench, expected_output, make_capacity, make_request

NUM_REQUESTS = 24
NUM_AT_ONCE = 3


def steady(bench: Bench, tenant: str, *, num_requests: int, first_arrival: int) -> dict[str, int]:
    """The latency in steps of a tenant's requests, of which a few are open at any time."""
    numbers = count(first_arrival)
    began: dict[str, int] = {}
    requests: list[Request] = []
    while len(began) < num_requests or not all(name in bench.ended_in_step for name in began):
        num_open = sum(name not in bench.ended_in_step for name in began)
        while num_open < NUM_AT_ONCE and len(began) < num_requests:
            number = next(numbers)
            request = make_request(
                f"{tenant}{number}", [number % 50] * 20, arrival=number, max_tokens=16, tenant=tenant
            )
            began[request.request_id] = bench.num_steps
            requests.append(request)
            bench.add(request)
            num_open += 1
        assert bench.step() is not None
    for request in requests:
        assert bench.output(request) == expected_output(request)
    return {name: bench.ended_in_step[name] - began[name] for name in began}


_arrivals = count()


def flood(num_requests: int, *, tenant: str = "flood", num_tokens: int = 40) -> list[Request]:
    """Many requests of one tenant at once."""
    return [
        make_request(
            f"{tenant}{i}", [i % 50, i // 50] * 10, arrival=next(_arrivals), max_tokens=num_tokens, tenant=tenant
        )
        for i in range(num_requests)
    ]


def test_a_flood_of_one_tenant_leaves_another_nearly_the_latency_of_half_an_executor_of_its_own() -> None:
    half = Bench(make_capacity(num_blocks=64, max_slots=4, max_step_tokens=64))
    alone = steady(half, "quiet", num_requests=NUM_REQUESTS, first_arrival=100_000)
    whole = Bench(make_capacity(num_blocks=128, max_slots=8, max_step_tokens=128))
    whole.add(*flood(300))
    for _ in range(10):
        whole.step()
    beside = steady(whole, "quiet", num_requests=NUM_REQUESTS, first_arrival=100_000)
    assert len(whole.scheduler.waiting) > 100, "the flood was there all the time"
    assert mean(beside.values()) <= 1.5 * mean(alone.values())
    assert max(beside.values()) <= 2 * max(alone.values())


def test_many_small_tenants_do_not_starve_one_nor_one_them() -> None:
    bench = Bench(make_capacity(num_blocks=128, max_slots=8, max_step_tokens=128))
    for number in range(10):
        bench.add(*flood(10, tenant=f"small{number}-"))
    one = steady(bench, "one", num_requests=6, first_arrival=100_000)
    assert max(one.values()) < 20 * 11, "eleven tenants, each turn takes about 20 steps of a slot"


@pytest.mark.parametrize(("weight", "low", "high"), [(1.0, 0.85, 1.15), (3.0, 2.5, 3.5)])
def test_tenants_that_always_have_work_are_served_in_proportion_to_their_weights(
    weight: float, low: float, high: float
) -> None:
    bench = Bench(make_capacity(num_blocks=128, max_slots=8), tenant_weights={"gold": weight})
    bench.add(*flood(200, tenant="gold", num_tokens=10), *flood(200, tenant="plain", num_tokens=10))
    for _ in range(200):
        bench.step()
    assert len(bench.scheduler.waiting) > 100
    ended = [name[:4] for name in bench.ended_in_step]
    assert low <= ended.count("gold") / ended.count("plai") <= high


def test_a_tenant_with_long_prompts_and_one_with_long_outputs_are_served_alike() -> None:
    """Counters weigh an output token twice; in them the two stay close."""
    bench = Bench(make_capacity(num_blocks=400, max_slots=8, max_step_tokens=40))
    prompts = [make_request(f"p{i}", [i % 50, i // 50] * 40, arrival=i, max_tokens=2, tenant="p") for i in range(60)]
    outputs = [make_request(f"o{i}", [i % 50, i // 50], arrival=60 + i, max_tokens=60, tenant="o") for i in range(60)]
    bench.add(*prompts, *outputs)
    for _ in range(100):
        bench.step()
    served = [bench.shares.served(tenant) for tenant in "po"]
    assert bench.scheduler.waiting.tenants == {"o", "p"}
    assert max(served) <= 1.5 * min(served)


def test_priority_outranks_fairness_and_the_low_ones_get_the_rest() -> None:
    bench = Bench(make_capacity(max_slots=2))
    served_most = [make_request(f"high{i}", [i] * 8, arrival=i, max_tokens=8, tenant="a") for i in range(6)]
    served_least = make_request("low", [40] * 8, arrival=6, max_tokens=8, tenant="b", priority=1)
    bench.add(*served_most, served_least)
    bench.finish()
    assert list(bench.ended_in_step)[-1] == "low"


def test_a_tenant_is_charged_once_for_each_token_computed_and_not_for_those_found_or_computed_again() -> None:
    bench = Bench(make_capacity(max_slots=1), cache=NoPrefixCache(), max_chunk=8)
    bench.add(make_request("r", [1] * 20, max_tokens=6, priority=1))
    for _ in range(5):
        bench.step()
    bench.add(make_request("high", [2] * 4, arrival=1, max_tokens=1, tenant="b"))
    bench.finish()
    assert bench.scheduler.num_preemptions == 1
    assert bench.executor.num_tokens_computed > 20 + 5 + 4, "some were computed again"
    assert bench.shares.served("a") == 20 + 2 * 5, "an output token counts twice; the last one is not computed"

    cached = Bench()
    for number in range(2):
        cached.add(make_request(f"r{number}", list(range(20)), arrival=number, max_tokens=1))
        cached.finish()
    assert cached.shares.served("a") == 20 + 1, "the second found all but its last token"


@pytest.mark.parametrize("has_pause", [True, False])
def test_a_moment_without_requests_gives_nobody_credit_for_the_time_before_it(has_pause: bool) -> None:
    """Tenant a worked all day; b comes with a flood, after a moment in which nobody was there, or without one."""
    bench = Bench(make_capacity(num_blocks=256, max_slots=4, max_step_tokens=64))
    bench.add(*flood(100, tenant="a", num_tokens=20))
    if not has_pause:
        bench.add(make_request("stays", [7] * 8, arrival=90_000, max_tokens=1000, tenant="a"))
    while len(bench.ended_in_step) < 100:
        bench.step()
    bench.add(*flood(100, tenant="b", num_tokens=20))
    began = bench.num_steps
    mine = [make_request(f"mine{i}", [9] * 8, arrival=100_000 + i, max_tokens=20, tenant="a") for i in range(10)]
    bench.add(*mine)
    while "mine9" not in bench.ended_in_step:
        bench.step()
    assert bench.num_steps - began < 200, "ten requests on half of four slots; the flood alone takes 500 steps"
