"""How many tokens of prompts fit beside running outputs: learned from the times of steps."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.scheduler.core.budget import PromptBudget, StepLimits
from services.scheduler.core.step_times import StepTimes


class Machine:
    """A budget and the times that it is made of."""

    def __init__(self, limits: StepLimits) -> None:
        self.times = StepTimes()
        self.budget = PromptBudget(limits, self.times)


def run(machine: Machine, *, plain_s: float, token_s: float, num_steps: int = 60, noise: float = 0.0) -> list[int]:
    """Steps beside eight outputs on a machine with these times, most of them full; the budgets in turn."""
    draw = random.Random(1)
    budgets, budget = [], machine.budget
    for step in range(num_steps):
        num_tokens = budget.num_prompt_tokens(8)
        num_tokens = num_tokens if step % 4 else num_tokens // 3
        duration_s = (plain_s + token_s * num_tokens) * draw.uniform(1 - noise, 1 + noise)
        machine.times.observe(8, num_tokens, duration_s)
        budgets.append(budget.num_prompt_tokens(8))
    return budgets


@pytest.mark.parametrize(("plain_s", "token_s", "ideal"), [(0.02, 0.0002, 100), (0.05, 0.001, 50), (0.1, 0.0005, 200)])
def test_a_step_with_prompts_takes_at_most_twice_one_without(plain_s: float, token_s: float, ideal: int) -> None:
    budgets = run(Machine(StepLimits(4096, 4096)), plain_s=plain_s, token_s=token_s)
    assert budgets[-1] == pytest.approx(ideal, rel=0.05)


def test_a_target_in_seconds_is_kept_instead() -> None:
    budgets = run(Machine(StepLimits(4096, 4096, target_step_s=0.05)), plain_s=0.02, token_s=0.0002)
    assert budgets[-1] == pytest.approx(150, rel=0.05)


def test_noise_moves_the_budget_only_a_little() -> None:
    budgets = run(Machine(StepLimits(4096, 4096)), plain_s=0.02, token_s=0.0002, num_steps=300, noise=0.15)
    settled = budgets[40:]
    assert 60 < sum(settled) / len(settled) < 140
    assert min(settled) >= 16


def test_the_budget_follows_when_tokens_become_dearer() -> None:
    machine = Machine(StepLimits(4096, 4096))
    assert run(machine, plain_s=0.02, token_s=0.0002)[-1] > 90
    assert run(machine, plain_s=0.02, token_s=0.001)[-1] == pytest.approx(20, rel=0.25)


def test_without_running_outputs_a_step_is_as_large_as_it_may_be() -> None:
    assert Machine(StepLimits(512, 512)).budget.num_prompt_tokens(0) == 512


def test_prompts_go_on_however_slow_they_are() -> None:
    budgets = run(Machine(StepLimits(512, 512)), plain_s=0.001, token_s=1.0)
    assert min(budgets) == 16


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 512), st.floats()), max_size=50))
def test_any_times_leave_a_budget_within_the_step(steps: list[tuple[int, int, float]]) -> None:
    machine = Machine(StepLimits(512, 512))
    for num_rows, num_tokens, duration_s in steps:
        machine.times.observe(num_rows, num_tokens, duration_s)
        assert 16 <= machine.budget.num_prompt_tokens(8) <= 504
        assert machine.budget.num_prompt_tokens(0) == 512


def test_limits_that_leave_no_room_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        StepLimits(0, 1)
    with pytest.raises(ValueError, match="must be given time"):
        StepLimits(1, 1, max_slowdown=1.0)


def test_a_few_fast_outputs_leave_prompts_the_time_that_readers_do_not_mind() -> None:
    limits = StepLimits(4096, 4096, target_step_s=0.06)
    budgets = run(Machine(limits), plain_s=0.004, token_s=0.0004)
    assert budgets[-1] == pytest.approx(140, rel=0.1)


def test_outputs_that_take_longer_than_the_target_by_themselves_are_slowed_down_no_more_than_allowed() -> None:
    limits = StepLimits(4096, 4096, target_step_s=0.06)
    budgets = run(Machine(limits), plain_s=0.08, token_s=0.0004)
    assert budgets[-1] == pytest.approx(200, rel=0.1)
