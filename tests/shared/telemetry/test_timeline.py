"""Answers of all instances become one timeline: in order, with who is missing, and what steps took and left between."""

from typing import Any

import msgspec
import pytest

from shared.ids import InstanceId
from shared.messages import Span, SpanEvent, SpansFound, StepTaken, TraceContext
from shared.telemetry.asking import Answers
from shared.telemetry.timeline import timeline_of
from tests.shared.telemetry.spans import CONTEXT, request_id, span_of

REQUEST = request_id(1)
MS = 1_000_000
ZERO = 1_700_000_000_000 * MS


def _found(service: str, *spans: Span, **fields: Any) -> SpansFound:
    return SpansFound("q", InstanceId(f"{service}-0a"), f"{service}-1", spans=spans, **fields)


def _span(name: str, start_ms: float, end_ms: float | None, **fields: Any) -> Span:
    end_ns = 0 if end_ms is None else ZERO + round(end_ms * MS)
    return span_of(1, name, start_ns=ZERO + round(start_ms * MS), end_ns=end_ns, **fields)


def _step(number: int, start_ms: float, duration_ms: float) -> StepTaken:
    return StepTaken(number, ZERO + round(start_ms * MS), round(duration_ms * MS), 3, 40, 7, 2)


def test_nothing_known_is_no_timeline() -> None:
    answers = Answers((_found("gateway"), _found("executor")), ())
    assert timeline_of(REQUEST, answers) is None


def test_spans_stand_in_the_order_of_their_starts_from_the_first_on() -> None:
    top = TraceContext(CONTEXT.trace_id, b"", True)
    root = _span("chat tiny", 0, 20.5, context=top, events=(SpanEvent("resumed", ZERO + 7 * MS, {"n": 1}),))
    answers = Answers(
        (_found("scheduler", _span("decode", 9, None), _span("queue", 0, 1.25)), _found("gateway", root)), ()
    )
    timeline = timeline_of(REQUEST, answers)
    assert timeline is not None
    assert timeline.trace_id == CONTEXT.trace_id.hex()
    assert timeline.started_at == "2023-11-14T22:13:20.000+00:00"
    first, second, third = timeline.spans
    assert (first.name, first.start_ms, first.duration_ms, first.parent_span_id) == ("chat tiny", 0, 20.5, None)
    assert [(event.name, event.at_ms, event.attributes) for event in first.events] == [("resumed", 7.0, {"n": 1})]
    assert (second.name, second.start_ms, second.duration_ms) == ("queue", 0, 1.25)
    assert second.parent_span_id == CONTEXT.span_id.hex()
    assert (third.name, third.start_ms, third.duration_ms) == ("decode", 9, None)
    assert (third.instance, third.instance_id) == ("scheduler-1", "scheduler-0a")


def test_steps_are_summed_up_and_told_one_by_one_only_if_asked_for() -> None:
    steps = (_step(7, 10, 4), _step(8, 15, 6), _step(9, 21, 20), _step(10, 40.5, 5))
    answers = Answers((_found("executor", steps=steps), _found("gateway", _span("chat tiny", 0, 50))), ())
    brief, full = timeline_of(REQUEST, answers), timeline_of(REQUEST, answers, with_steps=True)
    assert brief is not None
    assert full is not None
    (summary,) = brief.steps
    assert summary.steps is msgspec.UNSET
    assert (summary.instance, summary.num_steps) == ("executor-1", 4)
    assert (summary.total_ms, summary.median_ms, summary.max_ms) == (35, 5.5, 20)
    assert (summary.median_gap_ms, summary.max_gap_ms) == (0, 1), "a clock that was set back leaves no gap below zero"
    assert not isinstance(listed := full.steps[0].steps, msgspec.UnsetType)
    assert [step.step_id for step in listed] == [7, 8, 9, 10]
    assert (listed[0].start_ms, listed[0].duration_ms) == (10, 4)
    assert (listed[0].rows, listed[0].tokens, listed[0].drafts, listed[0].drafts_right) == (3, 40, 7, 2)


def test_a_single_step_has_nothing_between() -> None:
    answers = Answers((_found("executor", _span("x", 0, 1), steps=(_step(1, 0, 4),)),), ())
    timeline = timeline_of(REQUEST, answers)
    assert timeline is not None
    assert timeline.steps[0].max_gap_ms == 0


def test_who_was_silent_and_who_is_gone_is_told() -> None:
    decode = _span("decode", 0, 1, attributes={"shoal.executor.id": "executor-dead"})
    detokenize = _span("detokenize", 0, 1, attributes={"shoal.scheduler.id": "scheduler-0a"})
    answers = Answers(
        (_found("scheduler", decode, num_left_out=2), _found("gateway", detokenize, num_left_out=3)),
        (InstanceId("tokenizer-frozen"),),
    )
    timeline = timeline_of(REQUEST, answers)
    assert timeline is not None
    assert timeline.instances.answered == ["gateway-0a", "scheduler-0a"]
    assert timeline.instances.silent == ["tokenizer-frozen"]
    assert timeline.instances.gone == ["executor-dead"]
    assert timeline.num_left_out == 5


@pytest.mark.parametrize("with_steps", [True, False])
def test_a_timeline_is_the_same_after_its_way_as_json(with_steps: bool) -> None:
    attributes = {"text": "é", "is": True, "count": 7, "share": 0.5, "all": ("stop", "length")}
    answers = Answers((_found("executor", _span("x", 0, None, attributes=attributes), steps=(_step(1, 0, 4),)),), ())
    timeline = timeline_of(REQUEST, answers, with_steps=with_steps)
    assert timeline is not None
    assert msgspec.json.decode(msgspec.json.encode(timeline), type=type(timeline)) == timeline
