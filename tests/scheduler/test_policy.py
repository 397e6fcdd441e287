"""How a step's tokens are shared out."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.scheduler.core.policy import StepLimits, share_budget


@pytest.mark.parametrize(
    ("needs", "max_tokens", "max_chunk", "shares"),
    [
        ([], 10, 10, []),
        ([1, 1, 1], 10, 10, [1, 1, 1]),
        ([20, 1, 1], 10, 10, [8, 1, 1]),
        ([1, 20, 1], 10, 5, [1, 5, 1]),
        ([20, 20], 10, 10, [9, 1]),
        ([4, 20], 10, 10, [4, 6]),
        ([0, 3], 10, 10, [0, 3]),
        ([1, 1, 1], 2, 10, [1, 1, 0]),
    ],
)
def test_everyone_goes_on_and_the_first_get_the_rest(
    needs: list[int], max_tokens: int, max_chunk: int, shares: list[int]
) -> None:
    assert share_budget(needs, StepLimits(max_tokens, max_chunk)) == shares


@given(st.lists(st.integers(0, 50)), st.integers(1, 60), st.integers(1, 60))
def test_shares_stay_within_needs_chunks_and_budget(needs: list[int], max_tokens: int, max_chunk: int) -> None:
    shares = share_budget(needs, StepLimits(max_tokens, max_chunk))
    assert all(0 <= share <= min(need, max_chunk) for share, need in zip(shares, needs, strict=True))
    assert sum(shares) <= max_tokens
    wanted = sum(min(need, max_chunk) for need in needs)
    assert sum(shares) == min(wanted, max_tokens), "tokens are left over though somebody needs them"
    if len(needs) <= max_tokens:
        assert all(share > 0 for share, need in zip(shares, needs, strict=True) if need), "someone cannot go on"


def test_a_step_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        StepLimits(0, 1)
