"""The baselines' own parts."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.policy import share_prompt_tokens
from services.scheduler.simulate.policies import RandomPlacement, share_in_order
from tests.scheduler.driver import Bench, make_request


@given(st.lists(st.integers(1, 400), max_size=9), st.integers(0, 600), st.integers(1, 256))
def test_in_order_nobody_gets_a_token_before_those_ahead_have_theirs(
    needs: list[int], budget: int, max_chunk: int
) -> None:
    shares = share_in_order(needs, budget, max_chunk)
    assert sum(shares) == min(budget, sum(min(need, max_chunk) for need in needs))
    for at, share in enumerate(shares):
        assert 0 <= share <= min(needs[at], max_chunk)
        if share:
            assert all(shares[k] == min(needs[k], max_chunk) for k in range(at))


@given(st.lists(st.integers(1, 400), max_size=9), st.integers(0, 600), st.integers(1, 256))
def test_both_ways_to_share_spend_the_same(needs: list[int], budget: int, max_chunk: int) -> None:
    assert sum(share_in_order(needs, budget, max_chunk)) == sum(share_prompt_tokens(needs, budget, max_chunk))


def test_random_placement_uses_all_executors_and_moves_nobody() -> None:
    schedulers = [Bench().scheduler for _ in range(4)]
    placement = RandomPlacement(Random(1))
    request = make_request("a", [1, 2, 3])
    assert {id(placement.choose(request, schedulers)) for _ in range(100)} == set(map(id, schedulers))
    assert not placement.should_move(request, schedulers[0], schedulers[1])
