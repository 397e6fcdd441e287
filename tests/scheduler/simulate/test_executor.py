"""The simulated executor: time adds up, and plans that no executor could follow are refused."""

from array import array

import pytest

from services.scheduler.simulate.executor import END_TOKEN, ImpossiblePlan, SimulatedExecutor
from services.scheduler.simulate.step_times import CPU
from shared.ids import RequestId
from shared.messages import SlotAssignment, StepPlan, int32s
from shared.sampling import SamplingParams

_OUTPUT = array("i", [7, 8])


def _executor() -> SimulatedExecutor:
    return SimulatedExecutor(CPU, {RequestId("a"): _OUTPUT})


def _assignment(num_known: int = 3, *, num_prompt: int = 3) -> SlotAssignment:
    tokens = int32s(range(num_known))
    return SlotAssignment(0, RequestId("a"), 0, tokens, num_prompt, SamplingParams(seed=0), int32s([0]))


def _plan(step_id: int, start: int, count: int, *assigned: SlotAssignment, released: bool = False) -> StepPlan:
    return StepPlan(
        step_id,
        released=int32s([0] if released else []),
        assigned=assigned,
        slots=int32s([0]),
        starts=int32s([start]),
        counts=int32s([count]),
        num_new_blocks=int32s([0]),
        sampled_rows=int32s([0]),
    )


def test_it_says_what_the_trace_has_it_say_and_then_the_end() -> None:
    executor = _executor()
    results = [executor.run(_plan(1, 0, 3, _assignment()), 0.0)[1]]
    results += [executor.run(_plan(step, step + 1, 1), 0.0)[1] for step in (2, 3, 4)]
    assert [result.token_ids[0] for result in results] == [7, 8, END_TOKEN, END_TOKEN]
    assert executor.num_sampled_tokens == 4


def test_a_choice_that_comes_back_goes_on_where_it_was() -> None:
    executor = _executor()
    executor.run(_plan(1, 0, 3, _assignment()), 0.0)
    _, result = executor.run(_plan(2, 0, 4, _assignment(4), released=True), 0.0)
    assert list(result.token_ids) == [8]


def test_steps_run_one_after_the_other() -> None:
    executor = _executor()
    first_s, first = executor.run(_plan(1, 0, 3, _assignment()), 10.0)
    second_s, second = executor.run(_plan(2, 3, 1), 10.0)
    third_s, third = executor.run(_plan(3, 4, 1), 100.0)
    assert first_s == 10.0 + first.duration_s
    assert second_s == pytest.approx(first_s + second.duration_s)
    assert third_s == 100.0 + third.duration_s


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(_plan(3, 3, 1), id="a step is missing"),
        pytest.param(_plan(2, 3, 1, _assignment()), id="the slot is taken"),
        pytest.param(_plan(2, 4, 1), id="computes a token that is not known"),
        pytest.param(_plan(2, 2, 1), id="samples before all is computed"),
        pytest.param(_plan(2, 3, 513), id="too many tokens"),
        pytest.param(_plan(2, 3, 0), id="no tokens"),
    ],
)
def test_a_plan_that_no_executor_could_follow_is_refused(plan: StepPlan) -> None:
    executor = _executor()
    executor.run(_plan(1, 0, 3, _assignment()), 0.0)
    with pytest.raises(ImpossiblePlan):
        executor.run(plan, 0.0)
