"""Virtual token counters: who was served how much, and what a pause is worth."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.scheduler.core.fairness import FairShares


def test_a_charge_counts_by_the_weight_of_the_tenant() -> None:
    shares = FairShares({"double": 2.0})
    for tenant in ("double", "plain"):
        shares.opened(tenant)
    for tenant in ("double", "plain"):
        shares.charge(tenant, 100)
    assert (shares.served("double"), shares.served("plain")) == (50.0, 100.0)


def test_a_newcomer_starts_with_those_who_had_least() -> None:
    shares = FairShares()
    for tenant in ("a", "b"):
        shares.opened(tenant)
    shares.charge("a", 500)
    shares.charge("b", 300)
    shares.opened("new")
    assert shares.served("new") == 300.0


def test_a_pause_saves_up_nothing_and_forgives_nothing() -> None:
    shares = FairShares()
    shares.opened("stays")
    shares.opened("pauses")
    shares.charge("pauses", 50)
    shares.closed("pauses")
    shares.charge("stays", 40)
    shares.opened("pauses")
    assert shares.served("pauses") == 50, "what it had is not forgotten"
    shares.closed("pauses")
    shares.charge("stays", 1000)
    shares.opened("pauses")
    assert shares.served("pauses") == 1040, "the others did not wait for it"


def test_who_comes_when_nobody_is_there_starts_with_whoever_left_last() -> None:
    """Otherwise a moment without requests would give every newcomer the whole past of the others for free."""
    shares = FairShares()
    shares.opened("a")
    shares.charge("a", 1000)
    shares.closed("a")
    shares.opened("b")
    assert shares.served("b") == 1000
    shares.opened("a")
    assert shares.served("a") == 1000
    shares.closed("a")
    shares.charge("b", 5)
    shares.closed("b")
    shares.opened("c")
    assert shares.served("c") == 1005


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_weights_must_be_positive(weight: float) -> None:
    with pytest.raises(ValueError, match="the weight of tenant a must be positive"):
        FairShares({"a": weight})


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 100)), min_size=1, max_size=200))
def test_serving_whoever_had_least_keeps_counters_close(turns: list[tuple[str, int]]) -> None:
    shares = FairShares()
    for tenant in "abcd":
        shares.opened(tenant)
    for _, tokens in turns:
        least = min("abcd", key=shares.served)
        shares.charge(least, tokens)
    served = [shares.served(tenant) for tenant in "abcd"]
    assert max(served) - min(served) <= 100, "further apart than one turn"


def test_counters_of_tenants_that_never_come_back_are_forgotten() -> None:
    shares = FairShares()
    shares.opened("stays")
    for number in range(5000):
        tenant = f"passing-{number}"
        shares.opened(tenant)
        shares.charge(tenant, 1)
        shares.closed(tenant)
        shares.charge("stays", 5)
    assert len(shares) < 2000


def test_counters_of_tenants_that_are_away_take_bounded_room_though_they_were_served_most() -> None:
    shares = FairShares()
    shares.opened("stays")
    for number in range(5000):
        tenant = f"passing-{number}"
        shares.opened(tenant)
        shares.charge(tenant, 1000)
        shares.closed(tenant)
    assert len(shares) < 2000
    shares.opened("passing-4999")
    assert shares.served("passing-4999") == 1000, "those that left last are remembered"
