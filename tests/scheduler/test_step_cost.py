"""What steps cost: a line through steps with prompts and steps without, whatever an executor was doing lately."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.scheduler.core.budget import StepShape
from services.scheduler.core.step_cost import StepCosts

STEP_S, TOKEN_S = 0.018, 0.0005


def observe(costs: StepCosts, num_rows: int, num_prompt_tokens: int, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        duration_s = STEP_S + TOKEN_S * (num_rows + num_prompt_tokens)
        costs.observe(StepShape(num_rows, num_prompt_tokens), duration_s)


@pytest.mark.parametrize("num_rows", [1, 30])
def test_an_hour_of_outputs_alone_does_not_make_tokens_dear(num_rows: int) -> None:
    costs = StepCosts()
    observe(costs, 0, 200)
    observe(costs, num_rows, 0, num_steps=100_000)
    assert costs.cost == pytest.approx((STEP_S, TOKEN_S))


def test_before_both_kinds_were_seen_all_of_the_time_is_the_tokens() -> None:
    costs = StepCosts()
    assert costs.cost is None
    observe(costs, 0, 100)
    assert costs.cost == pytest.approx((0.0, (STEP_S + 100 * TOKEN_S) / 100))


def test_the_line_follows_the_machine() -> None:
    costs = StepCosts()
    observe(costs, 0, 200)
    observe(costs, 4, 0, num_steps=50)
    for _ in range(60):
        costs.observe(StepShape(4, 0), 0.1)
        costs.observe(StepShape(4, 96), 0.2)
    assert costs.cost == pytest.approx((0.1 - 4 * 0.1 / 96, 0.1 / 96), rel=0.05)


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 512), st.floats()), max_size=60))
def test_any_times_give_costs_that_can_be_compared(steps: list[tuple[int, int, float]]) -> None:
    costs = StepCosts()
    for num_rows, num_tokens, duration_s in steps:
        if num_rows + num_tokens:
            costs.observe(StepShape(num_rows, num_tokens), duration_s)
    if costs.cost is not None:
        assert 0 <= costs.cost.step_s < 3600
        assert 0 < costs.cost.token_s < 3600
