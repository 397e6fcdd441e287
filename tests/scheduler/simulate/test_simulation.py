"""The simulator: deterministic, complete, and telling policies apart where they differ."""

from itertools import pairwise

import pytest

from services.scheduler.simulate.policies import POLICIES, SHOAL
from services.scheduler.simulate.report import first_token_times, of_modest_tenants, percentile, with_short_prompts
from services.scheduler.simulate.simulation import Served, Simulation, WentWrong
from services.scheduler.simulate.step_times import CPU, GPU, MODEL, Profile
from services.scheduler.simulate.trace import MAX_OUTPUT_TOKENS, TRACES
from shared.messages import ExecutorCapacity, Outcome
from tests.scheduler.simulate.scenes import figures, make_trace, simulate


def _p99_to_first_token(served: list[Served]) -> float:
    return percentile(first_token_times(served), 0.99)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_times_of_all_tokens(policy: str) -> None:
    trace = make_trace("mixed", requests=100)
    runs = [[(each.arrived_s, each.token_times) for each in simulate(trace, policy, seed=5)] for _ in range(2)]
    assert runs[0] == runs[1]


def test_another_seed_places_at_random_otherwise() -> None:
    trace = make_trace("mixed", requests=100)
    runs = [[each.token_times for each in simulate(trace, "random-placement", seed=seed)] for seed in (1, 2)]
    assert runs[0] != runs[1]


@pytest.mark.parametrize("kind", TRACES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_gets_all_its_tokens_in_order_and_after_it_arrived(kind: str, policy: str) -> None:
    trace = make_trace(kind, requests=60)
    served = simulate(trace, policy, executors=2)
    assert sorted(map(id, trace)) == sorted(id(each.request) for each in served)
    for each in served:
        assert len(each.token_times) == min(len(each.request.output) + 1, MAX_OUTPUT_TOKENS)
        assert each.has_ended
        assert each.arrived_s < each.token_times[0]
        assert list(each.token_times) == sorted(each.token_times)


def test_a_turn_comes_after_the_answer_before_it_and_the_time_to_think() -> None:
    trace = make_trace("sessions", requests=60)
    by_request = {id(each.request): each for each in simulate(trace)}
    followed = [request for request in trace if request.follows is not None]
    assert followed
    for request in followed:
        assert request.follows is not None
        before = by_request[id(trace[request.follows])]
        assert by_request[id(request)].arrived_s == pytest.approx(before.token_times[-1] + request.arrives_s)


def test_a_lone_request_takes_as_long_as_its_steps() -> None:
    trace = make_trace("poisson", requests=1)
    [served] = simulate(trace, executors=1)
    gaps = [after - before for before, after in pairwise(served.token_times)]
    times = CPU.step_times
    for number, gap in enumerate(gaps):
        num_context_tokens = len(trace[0].prompt) + number + 1
        assert gap == pytest.approx(times.base_s + times.row_s + times.context_token_s * num_context_tokens)


def test_a_faster_executor_is_faster() -> None:
    trace = make_trace("poisson", requests=60)
    slow = Simulation(trace, SHOAL, CPU, num_executors=1, seed=0).run()
    fast = Simulation(trace, SHOAL, GPU, num_executors=1, seed=0).run()
    assert _p99_to_first_token(fast) < _p99_to_first_token(slow) / 5


def test_blocks_that_run_short_show_as_preemptions_and_everybody_is_served() -> None:
    small = ExecutorCapacity(
        MODEL, num_blocks=520, block_size=16, max_slots=64, max_model_len=8192, max_step_tokens=512
    )
    profile = Profile("small", "few blocks", small, CPU.step_times)
    simulation = Simulation(make_trace("poisson", requests=150, per_second=50), SHOAL, profile, num_executors=1, seed=0)
    simulation.run()
    assert simulation.num_preemptions > 0


def test_a_request_that_ends_otherwise_than_completed_stops_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(make_trace("poisson", requests=3), SHOAL, CPU, num_executors=1, seed=0)
    fleet = simulation._fleet
    apply = fleet.apply

    def apply_and_cancel(*args: object) -> list[object]:
        events = [*apply(*args)]  # type: ignore[arg-type]
        request = fleet.get(next(iter(fleet._requests), ""))  # type: ignore[arg-type]
        return [*events, *(fleet.cancel(request.request_id) if request else ())]

    monkeypatch.setattr(fleet, "apply", apply_and_cancel)
    with pytest.raises(WentWrong, match=Outcome.CANCELLED):
        simulation.run()


# What each policy buys.


def test_without_a_cache_nothing_is_found_and_first_tokens_come_later() -> None:
    trace = make_trace("sessions")
    with_cache, without = figures(trace), figures(trace, "no-cache")
    assert without.hit_rate == 0
    assert with_cache.hit_rate > 0.6
    assert with_cache.ttft_p50_ms < without.ttft_p50_ms / 2


def test_conversations_find_their_prefix_where_they_are_placed_for_it() -> None:
    trace = make_trace("sessions")
    aware, random = figures(trace), figures(trace, "random-placement")
    assert aware.hit_rate > random.hit_rate + 0.1
    assert aware.ttft_p50_ms < random.ttft_p50_ms
    assert aware.ttft_p99_ms < random.ttft_p99_ms


def test_a_flood_leaves_other_tenants_their_share() -> None:
    trace = make_trace("tenants", requests=500, per_second=9)
    fair, in_order = figures(trace), figures(trace, "fcfs")
    assert fair.jain > in_order.jain + 0.05
    assert fair.jain > 0.95


def test_modest_tenants_hardly_wait_while_one_floods() -> None:
    trace = make_trace("tenants", requests=500, per_second=9)
    waits = {policy: _p99_to_first_token(of_modest_tenants(simulate(trace, policy))) for policy in ("shoal", "fcfs")}
    assert waits["shoal"] < waits["fcfs"] / 3


def test_short_prompts_do_not_wait_for_long_ones() -> None:
    trace = make_trace("long-tail", per_second=6)
    waits = {policy: _p99_to_first_token(with_short_prompts(simulate(trace, policy))) for policy in ("shoal", "fcfs")}
    assert waits["shoal"] < waits["fcfs"] / 2
