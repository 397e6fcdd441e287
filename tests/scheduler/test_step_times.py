"""How long steps take, learned from steps."""

from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.scheduler.core.step_times import StepTimes


def times_of(
    *, base_s: float, row_s: float, token_s: float, rows: tuple[int, int], tokens: tuple[int, int], noise: float = 0.0
) -> StepTimes:
    """What was learned from steps with rows and tokens in these ranges."""
    times, chance = StepTimes(), Random(0)
    for _ in range(100):
        num_rows, num_tokens = chance.randint(*rows), chance.randint(*tokens)
        exact = base_s + row_s * num_rows + token_s * num_tokens
        times.observe(num_rows, num_tokens, exact * chance.uniform(1 - noise, 1 + noise))
    return times


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_three_parts_are_told_apart_where_steps_differ(noise: float) -> None:
    time = times_of(base_s=0.004, row_s=0.001, token_s=0.0004, rows=(1, 30), tokens=(0, 200), noise=noise).time
    assert time is not None
    assert time.base_s == pytest.approx(0.004, abs=0.0005 + 0.06 * noise)
    assert time.row_s == pytest.approx(0.001, rel=0.05 + 4 * noise)
    assert time.prompt_token_s == pytest.approx(0.0004, rel=0.05 + 4 * noise)


def test_steps_that_are_alike_are_split_as_usual_and_add_up() -> None:
    time = times_of(base_s=0.004, row_s=0.001, token_s=0.0, rows=(6, 6), tokens=(0, 0)).time
    assert time is not None
    assert time.of_rows(6) == pytest.approx(0.010, rel=0.01)
    assert time.row_s == pytest.approx(0.001, rel=0.05)


def test_a_machine_that_changes_is_followed() -> None:
    times = times_of(base_s=0.004, row_s=0.001, token_s=0.0004, rows=(1, 30), tokens=(0, 200))
    chance = Random(1)
    for _ in range(100):
        num_rows, num_tokens = chance.randint(1, 30), chance.randint(0, 200)
        times.observe(num_rows, num_tokens, 0.01 + 0.002 * num_rows + 0.001 * num_tokens)
    assert times.time is not None
    assert times.time.row_s == pytest.approx(0.002, rel=0.1)
    assert times.time.prompt_token_s == pytest.approx(0.001, rel=0.1)


def test_times_that_make_no_sense_teach_nothing() -> None:
    times = StepTimes()
    for duration_s in (-1.0, 0.0, 5e-324, float("nan"), float("inf"), 1e9):
        assert not times.observe(5, 3, duration_s)
    assert not times.observe(0, 3, 0.1)
    assert times.time is None


@given(
    st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 65_536), st.floats(1e-9, 3599)), min_size=1, max_size=60)
)
def test_whatever_was_observed_no_part_is_negative_and_rows_and_tokens_take_some_time(
    steps: list[tuple[int, int, float]],
) -> None:
    times = StepTimes()
    for step in steps:
        times.observe(*step)
        time = times.time
        assert time is not None
        assert time.base_s >= 0
        assert 0 < time.row_s < float("inf")
        assert 0 < time.prompt_token_s < float("inf")
