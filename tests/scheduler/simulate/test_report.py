"""The figures: fairness as it is defined, percentiles, and sums over requests."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.simulate.report import fairness, jain, max_min_shares, percentile, sum_up
from services.scheduler.simulate.simulation import Served
from services.scheduler.simulate.trace import TraceRequest

_demands = st.dictionaries(st.text(max_size=3), st.floats(0, 1e6), min_size=1, max_size=8)


def _served(tenant: str, arrived_s: float, *token_times: float, num_prompt: int = 2, num_cached: int = 0) -> Served:
    request = TraceRequest(0.0, array("i", [1] * num_prompt), array("i", [1] * len(token_times)), tenant)
    return Served(request, arrived_s, num_cached, array("d", token_times), has_ended=True)


@given(_demands, st.floats(0, 1e6))
def test_fair_shares_are_all_there_is_or_all_that_is_wanted(demands: dict[str, float], total: float) -> None:
    shares = max_min_shares(total, demands)
    assert sum(shares.values()) == pytest.approx(min(total, sum(demands.values())))


@given(_demands, st.floats(0, 1e6))
def test_whoever_gets_less_than_wanted_gets_as_much_as_anybody(demands: dict[str, float], total: float) -> None:
    shares = max_min_shares(total, demands)
    for name, share in shares.items():
        assert share <= demands[name]
        if share < demands[name]:
            assert share == pytest.approx(max(shares.values()))


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=9))
def test_jains_index_is_between_one_over_n_and_one(values: list[float]) -> None:
    assert 1 / len(values) - 1e-9 <= jain(values) <= 1 + 1e-9


def test_jains_index_of_equals_is_one_and_of_one_who_has_all_is_one_over_n() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1)
    assert jain([5.0, 0.0, 0.0, 0.0]) == pytest.approx(1 / 4)
    assert jain([0.0, 0.0]) == 1


def test_two_tenants_that_are_served_alike_are_served_fairly() -> None:
    served = [_served(tenant, at, at + 0.5, at + 1) for tenant in "ab" for at in range(20)]
    assert fairness(served) == pytest.approx(1)


def test_a_tenant_that_waits_while_another_is_served_is_not() -> None:
    alike = [_served("a", at, at + 0.5, at + 1) for at in range(20)]
    assert fairness([*alike, *(_served("b", at, 500.0) for at in range(20))]) < 0.7


def test_a_tenant_that_wants_little_and_gets_it_is_served_fairly() -> None:
    much = [_served("a", at, at + 0.5, at + 1) for at in range(20)]
    assert fairness([*much, _served("b", 0.0, 0.5)]) == pytest.approx(1, abs=0.01)


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 3.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.99) == 4.0
    assert percentile([], 0.5) == 0


def test_figures_are_sums_over_all_requests() -> None:
    served = [_served("a", 0.0, 1.0, 1.5, num_cached=1), _served("a", 2.0, 4.0, 4.25, 6.0)]
    report = sum_up(served, num_preemptions=3, wall_s=9.0)
    assert report.throughput_tok_s == pytest.approx(5 / 6)
    assert (report.ttft_p50_ms, report.ttft_p99_ms) == (2000, 2000)
    assert report.itl_p99_ms == pytest.approx(1750)
    assert report.hit_rate == pytest.approx(1 / 4)
    assert (report.jain, report.preemptions, report.wall_s) == (1, 3, 9)
