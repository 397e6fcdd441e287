"""How a step's tokens are shared out, and who gives way to whom."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.scheduler.core.policy import share_prompt_tokens


@pytest.mark.parametrize(
    ("needs", "budget", "max_chunk", "shares"),
    [
        ([], 10, 10, []),
        ([3], 10, 10, [3]),
        ([20], 10, 10, [10]),
        ([20], 10, 4, [4]),
        ([20, 20], 10, 10, [10, 0]),
        ([100, 4], 10, 10, [6, 4]),
        ([100, 50], 10, 10, [5, 5]),
        ([4, 100], 10, 10, [4, 6]),
        ([2, 100, 3], 10, 10, [2, 5, 3]),
        ([100, 100, 1], 11, 5, [5, 5, 1]),
    ],
)
def test_the_first_gets_half_and_the_shortest_the_rest(
    needs: list[int], budget: int, max_chunk: int, shares: list[int]
) -> None:
    assert share_prompt_tokens(needs, budget, max_chunk) == shares


@given(st.lists(st.integers(1, 50)), st.integers(0, 60), st.integers(1, 60))
def test_shares_stay_within_needs_chunks_and_budget(needs: list[int], budget: int, max_chunk: int) -> None:
    shares = share_prompt_tokens(needs, budget, max_chunk)
    assert all(0 <= share <= min(need, max_chunk) for share, need in zip(shares, needs, strict=True))
    wanted = sum(min(need, max_chunk) for need in needs)
    assert sum(shares) == min(wanted, budget), "tokens are left over though somebody needs them"
    if needs and budget:
        assert shares[0] >= min(needs[0], max_chunk, budget - budget // 2), "the first does not get on"
        shortest = needs.index(min(needs))
        assert shares[shortest] >= min(needs[shortest], max_chunk, budget // 2), "the shortest waits for longer ones"
