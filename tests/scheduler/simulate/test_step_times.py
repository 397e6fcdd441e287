"""The line through measured steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.simulate.step_times import CPU, CPU_STEPS, MeasuredStep, StepTimes, fit
from shared.messages import StepPlan, int32s

_POINTS = [(1, 0, 50), (8, 0, 400), (8, 0, 8000), (32, 0, 3000), (1, 255, 256), (9, 128, 900), (1, 511, 4000)]
_seconds = st.floats(1e-6, 1.0)


def _predicted(times: StepTimes, rows: int, prompt: int, context: int) -> float:
    return times.base_s + times.row_s * rows + times.prompt_token_s * prompt + times.context_token_s * context


@given(st.builds(StepTimes, _seconds, _seconds, _seconds, _seconds))
def test_steps_on_a_line_give_that_line_back(line: StepTimes) -> None:
    fitted = fit([MeasuredStep(*point, _predicted(line, *point) * 1e3) for point in _POINTS])
    for point in _POINTS:
        assert _predicted(fitted, *point) == pytest.approx(_predicted(line, *point), rel=1e-3)


@pytest.mark.parametrize(
    "steps", [[], [MeasuredStep(1, 0, 10, 5.0)], [MeasuredStep(n, 0, n, 5.0) for n in range(1, 9)]]
)
def test_steps_that_are_too_much_alike_are_refused(steps: list[MeasuredStep]) -> None:
    with pytest.raises(ValueError, match="do not tell"):
        fit(steps)


def test_the_measured_executor_is_close_to_a_line() -> None:
    """The line is off by up to 18 % where a small batch is between two sizes of kernel; figures mean no more."""
    for *shape, milliseconds in CPU_STEPS:
        assert _predicted(CPU.step_times, *map(int, shape)) * 1e3 == pytest.approx(milliseconds, rel=0.2)


def test_a_plan_takes_what_its_rows_tokens_and_contexts_take() -> None:
    plan = StepPlan(1, slots=int32s([0, 1]), starts=int32s([100, 50]), counts=int32s([1, 20]))
    times = StepTimes(1.0, 0.1, 0.01, 0.001)
    assert times.seconds(plan) == pytest.approx(1.0 + 2 * 0.1 + 19 * 0.01 + 171 * 0.001)


def test_a_request_takes_its_part_of_the_steps_that_it_shares() -> None:
    times = StepTimes(1.0, 0.1, 0.01, 0.001)
    assert times.request_seconds(100, 10, 5) == pytest.approx(100 * 0.01 + 10 * (1.0 / 5 + 0.1 + 105 * 0.001))
