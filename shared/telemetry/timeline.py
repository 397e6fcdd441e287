"""What all instances have told of one request, put together: one timeline, in JSON's terms.

Owns that form, which `GET /v1/requests/{id}/trace` answers with and `shoal trace` draws. Times are milliseconds since
the first thing that is known; instances are trusted to have clocks that agree.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Final

import msgspec

from shared.ids import InstanceId, RequestId
from shared.messages import Attributes, Span, SpansFound, StepTaken
from shared.telemetry import names
from shared.telemetry.asking import Answers

_NS_OF_MS: Final = 1_000_000
_NAMING: Final = (names.SCHEDULER, names.EXECUTOR, names.DETOKENIZER)
"""Attributes that say who else has had to do with a request."""


class EventBody(msgspec.Struct):
    """A moment within a span."""

    name: str
    at_ms: float
    attributes: Attributes


class SpanBody(msgspec.Struct):
    """One phase of the request."""

    name: str
    instance: str
    """The name of who told of it."""
    instance_id: InstanceId
    span_id: str
    parent_span_id: str | None
    request_id: RequestId
    """Of the request to the mesh: a client's request with several prompts is several of these."""
    start_ms: float
    duration_ms: float | None
    """None while it goes on."""
    attributes: Attributes
    events: list[EventBody]


class StepBody(msgspec.Struct):
    """One step of an executor that the request took part in."""

    step_id: int
    start_ms: float
    duration_ms: float
    rows: int
    tokens: int
    drafts: int
    drafts_right: int


class StepsBody(msgspec.Struct):
    """All of them on one executor, and what was between them."""

    instance: str
    instance_id: InstanceId
    num_steps: int
    total_ms: float
    median_ms: float
    max_ms: float
    median_gap_ms: float
    """From the end of one to the start of the next."""
    max_gap_ms: float
    steps: list[StepBody] | msgspec.UnsetType = msgspec.UNSET


class InstancesBody(msgspec.Struct):
    """Who was asked."""

    answered: list[InstanceId]
    silent: list[InstanceId]
    """Alive, as far as is known, but not heard in time."""
    gone: list[InstanceId]
    """Named by what others tell, but not there any more: their part is missing."""


class Timeline(msgspec.Struct):
    """One request of a client."""

    request_id: RequestId
    trace_id: str
    started_at: str
    spans: list[SpanBody]
    """By start."""
    steps: list[StepsBody]
    instances: InstancesBody
    num_left_out: int
    """Spans and steps that were too many to be kept."""


def timeline_of(request_id: RequestId, answers: Answers, *, with_steps: bool = False) -> Timeline | None:
    """What is known of a client request; None if nothing is. `with_steps` has each step told of."""
    told = [(found, span) for found in answers.found for span in found.spans]
    if not told:
        return None
    zero_ns = min(span.start_ns for _, span in told)
    spans = [_span(found, span, zero_ns) for found, span in told]
    spans.sort(key=lambda span: (span.start_ms, span.parent_span_id is not None))
    return Timeline(
        request_id=request_id,
        trace_id=told[0][1].context.trace_id.hex(),
        started_at=datetime.fromtimestamp(zero_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
        spans=spans,
        steps=[_steps(found, zero_ns, with_steps=with_steps) for found in answers.found if found.steps],
        instances=InstancesBody(
            sorted(found.instance_id for found in answers.found),
            list(answers.silent),
            _gone(spans, [*(found.instance_id for found in answers.found), *answers.silent]),
        ),
        num_left_out=sum(found.num_left_out for found in answers.found),
    )


def _gone(spans: Iterable[SpanBody], known: Sequence[InstanceId]) -> list[InstanceId]:
    named = {span.attributes[name] for span in spans for name in _NAMING if name in span.attributes}
    return sorted(InstanceId(str(each)) for each in named if each not in known)


def _span(found: SpansFound, span: Span, zero_ns: int) -> SpanBody:
    parent_id = span.context.span_id
    return SpanBody(
        name=span.name,
        instance=found.name,
        instance_id=found.instance_id,
        span_id=span.span_id.hex(),
        parent_span_id=parent_id.hex() if parent_id else None,
        request_id=span.request_id,
        start_ms=_ms(span.start_ns - zero_ns),
        duration_ms=_ms(span.end_ns - span.start_ns) if span.end_ns else None,
        attributes=span.attributes,
        events=[EventBody(event.name, _ms(event.at_ns - zero_ns), event.attributes) for event in span.events],
    )


def _steps(found: SpansFound, zero_ns: int, *, with_steps: bool) -> StepsBody:
    durations = [step.duration_ns for step in found.steps]
    ends = [step.start_ns + step.duration_ns for step in found.steps]
    starts = [step.start_ns for step in found.steps[1:]]
    gaps = [max(0, start - end) for start, end in zip(starts, ends, strict=False)] or [0]
    body = StepsBody(
        instance=found.name,
        instance_id=found.instance_id,
        num_steps=len(durations),
        total_ms=_ms(sum(durations)),
        median_ms=_ms(median(durations)),
        max_ms=_ms(max(durations)),
        median_gap_ms=_ms(median(gaps)),
        max_gap_ms=_ms(max(gaps)),
    )
    if with_steps:
        body.steps = [_step(step, zero_ns) for step in found.steps]
    return body


def _step(step: StepTaken, zero_ns: int) -> StepBody:
    return StepBody(
        step.step_id,
        _ms(step.start_ns - zero_ns),
        _ms(step.duration_ns),
        step.num_rows,
        step.num_tokens,
        step.num_drafted,
        step.num_right,
    )


def _ms(ns: float) -> float:
    return round(ns / _NS_OF_MS, 3)
