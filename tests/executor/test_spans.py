"""What an executor tells of its steps: which requests took part in which, and links to their traces."""

import pytest

from services.executor.spans import StepSpans
from services.executor.step_thread import StepFinished
from shared.ids import RequestId
from shared.messages import RunStep, SlotAssignment, Span, StepCompleted, StepPlan, StepResult, TraceContext, int32s
from shared.sampling import SamplingParams
from shared.telemetry.store import SpanStore
from shared.telemetry.tracing import Tracing
from tests.executor.stage import Stage
from tests.shared.telemetry.spans import request_id

MS = 1_000_000
END = 1_700_000_000_000 * MS


def context(number: int, *, is_sampled: bool = True) -> TraceContext:
    return TraceContext(bytes([number]) * 16, bytes([number]) * 8, is_sampled)


def assignment(slot: int, number: int, *, suffix: str = "", trace: TraceContext | None = None) -> SlotAssignment:
    """The choice of a request with this number takes a slot."""
    name = RequestId(request_id(number) + suffix)
    return SlotAssignment(
        slot, name, 0, int32s([1]), 1, SamplingParams(seed=0), int32s([slot]), trace or context(number)
    )


class _Exporter:
    num_dropped = 0

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def offer(self, span: Span) -> None:
        self.spans.append(span)

    def close(self, within_s: float) -> None:
        pass


class _Steps:
    """Runs steps of 4 ms, one every 5 ms."""

    def __init__(self, *, keeps: int = 100, exporter: _Exporter | None = None) -> None:
        self.tracing = Tracing(SpanStore(keeps), exporter)
        self.spans = StepSpans(self.tracing)
        self.epoch = 1
        self._num_steps = 0

    def run(
        self,
        slots: list[int],
        assigned: tuple[SlotAssignment, ...] = (),
        released: tuple[int, ...] = (),
        *,
        finishes: bool = True,
    ) -> StepFinished:
        self._num_steps += 1
        plan = StepPlan(self._num_steps, released=int32s(released), assigned=assigned, slots=int32s(slots))
        self.spans.planned(self.epoch, plan)
        result = StepResult(plan.step_id, int32s(slots), duration_s=0.004)
        finished = StepFinished(self.epoch, 7, result, len(slots), END + 5 * MS * self._num_steps)
        if finishes:
            self.spans.finished(finished)
        return finished

    def of(self, number: int) -> list[int]:
        """The steps that a request took part in."""
        return [step.step_id for step in self.tracing.steps_of(request_id(number))]


def test_each_request_has_the_steps_that_it_took_part_in() -> None:
    steps = _Steps()
    steps.run([0], (assignment(0, 1),))
    steps.run([0, 1], (assignment(1, 2),))
    steps.run([1])
    steps.run([0, 1])
    steps.run([1], released=(0,))
    steps.run([0, 1], (assignment(0, 3),))
    assert [steps.of(number) for number in (1, 2, 3, 4)] == [[1, 2, 4], [2, 3, 4, 5, 6], [6], []]


def test_a_step_tells_when_it_was_how_long_it_took_and_how_much_it_was() -> None:
    steps = _Steps()
    plan = StepPlan(1, assigned=(assignment(0, 1), assignment(1, 2)), slots=int32s([0, 1]))
    steps.spans.planned(1, plan)
    result = StepResult(
        1, int32s([5, 6, 7, 8]), duration_s=0.0045, num_tokens=int32s([3, 1]), num_drafted=int32s([4, 1])
    )
    steps.spans.finished(StepFinished(1, 12, result, 2, END))
    (taken,) = steps.tracing.steps_of(request_id(1))
    assert (taken.step_id, taken.start_ns, taken.duration_ns) == (1, END - 4_500_000, 4_500_000)
    assert (taken.num_rows, taken.num_tokens, taken.num_drafted, taken.num_right) == (2, 12, 5, 2)


def test_the_prompts_of_one_request_are_one() -> None:
    steps = _Steps()
    steps.run([0], (assignment(0, 1),))
    steps.run([1], (assignment(1, 1, suffix="-1"),))
    assert steps.of(1) == [1, 2]


def test_a_request_that_nobody_follows_has_no_steps() -> None:
    steps = _Steps()
    untraced = SlotAssignment(0, request_id(1), 0, int32s([1]), 1, SamplingParams(seed=0), int32s([0]))
    steps.run([0], (untraced,))
    steps.run([0, 1], (assignment(1, 2),))
    assert (steps.of(1), steps.of(2)) == ([], [2])


def test_what_was_planned_in_an_epoch_that_is_over_is_not_told_of() -> None:
    steps = _Steps()
    late = steps.run([0], (assignment(0, 1),), finishes=False)
    steps.spans.reset()
    steps.epoch, steps._num_steps = 2, 0
    steps.run([0], (assignment(0, 2),), finishes=False)
    steps.spans.finished(late)
    assert (steps.of(1), steps.of(2)) == ([], [])


def test_the_latest_steps_are_kept_and_the_latest_requests_are_known() -> None:
    steps = _Steps(keeps=2)
    steps.run([0], (assignment(0, 1),))
    for _ in range(40):
        steps.run([0])
    assert steps.of(1) == list(range(10, 42)), "16 for each request"
    steps.run([0, 1], (assignment(1, 2),))
    steps.run([0, 1, 2], (assignment(2, 3),))
    assert steps.of(1) == [], "the oldest of three where two are kept"
    assert (steps.of(2), steps.of(3)) == ([42, 43], [43])


def test_where_nothing_is_kept_nor_exported_nothing_is_noted() -> None:
    steps = _Steps(keeps=0)
    steps.run([0], (assignment(0, 1),))
    assert steps.spans._slots == {}
    assert steps.of(1) == []


def test_a_step_is_exported_as_a_trace_of_its_own_with_links_to_those_of_its_requests() -> None:
    exporter = _Exporter()
    steps = _Steps(exporter=exporter)
    steps.run([0, 1, 2], (assignment(0, 1), assignment(1, 2, trace=context(2, is_sampled=False)), assignment(2, 3)))
    steps.run([0])
    first, second = exporter.spans
    assert first.name == second.name == "step"
    assert first.links == (context(1), context(3)), "those that are exported"
    assert second.links == (context(1),)
    assert first.context.span_id == b""
    assert len({first.context.trace_id, second.context.trace_id, context(1).trace_id}) == 3
    assert (second.start_ns, second.end_ns) == (END + 10 * MS - 4 * MS, END + 10 * MS)
    assert first.attributes == {
        "shoal.step.epoch": 1,
        "shoal.step.id": 1,
        "shoal.step.rows": 3,
        "shoal.step.tokens": 7,
    }
    assert steps.tracing.store.num_spans == 0, "of no request"


def test_a_step_of_which_no_request_is_exported_is_not_exported_either() -> None:
    exporter = _Exporter()
    steps = _Steps(exporter=exporter)
    steps.run([0], (assignment(0, 1, trace=context(1, is_sampled=False)),))
    assert exporter.spans == []
    assert steps.of(1) == [1]


def test_links_are_not_without_end() -> None:
    exporter = _Exporter()
    steps = _Steps(exporter=exporter)
    steps.run(list(range(100)), tuple(assignment(slot, slot + 1) for slot in range(100)))
    assert len(exporter.spans[0].links) == 32


async def test_the_actor_has_its_steps_told_of(stage: Stage) -> None:
    epoch = await stage.a.attach()
    plan = StepPlan(1, assigned=(assignment(0, 1),), slots=int32s([0]), counts=int32s([3]))
    await stage.a.tell(RunStep(epoch, plan))
    await stage.a.receive(StepCompleted)
    await stage.settle()
    (taken,) = stage.tracing.steps_of(request_id(1))
    assert (taken.num_rows, taken.num_tokens) == (1, 3)
    assert taken.duration_ns == pytest.approx(0.5e9)
    await stage.a.attach()
    plan = StepPlan(1, slots=int32s([0]), counts=int32s([1]))
    await stage.a.tell(RunStep(epoch + 1, plan))
    await stage.a.receive(StepCompleted)
    await stage.settle()
    assert len(list(stage.tracing.steps_of(request_id(1)))) == 1, "its slot is empty since"
