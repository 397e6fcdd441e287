"""The scheduler's part of requests' traces: waiting, prompts by chunk, decoding, and every interruption.

Looks at what the service does anyway: submissions, plans on their way out, results, ends. The core knows nothing of it.
What a step costs here does not grow with the outputs that go on in it: only what enters, leaves or has a prompt to
compute is looked at.

| span | from | to |
|---|---|---|
| `queue` | the submission's arrival | the plan with its first step |
| `prefill`, for each step | the executor's start on the step | its result |
| `decode` | the first token | the end |
| `preempted` | the plan that takes its slot away | the plan that gives it another |
| `migration` | the loss of its executor | the plan that gives it a slot elsewhere |
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from msgspec.structs import replace

from services.scheduler.core.fleet import Fleet
from services.scheduler.streams import Stream
from services.scheduler.traced import Chunk, Seat, Seats, Traced, Wait, joined
from shared.clock import Clock
from shared.errors import RequestError
from shared.ids import InstanceId, RequestId, client_request_id
from shared.messages import Attributes, RequestClosed, SlotAssignment, Span, StepPlan, StepResult, SubmitTokens
from shared.telemetry import names
from shared.telemetry.tracing import Tracing, new_span_id

_MAX_CHUNK_SPANS: Final = 64
"""Chunks of one request that have spans of their own; those that follow share one."""
_NS: Final = 1_000_000_000


class _Planned(NamedTuple):
    sent_ns: int
    chunks: list[Chunk]


class SchedulerSpans:
    """Makes the spans of one scheduler."""

    def __init__(
        self, tracing: Tracing, fleet: Fleet, clock: Clock, unix_time_ns: Callable[[], int] = time.time_ns
    ) -> None:
        """`fleet` says what became of a choice that lost its slot; `clock` is what streams tell their times by."""
        self._tracing = tracing
        self._fleet = fleet
        self._clock = clock
        self._unix_time_ns = unix_time_ns
        self._traced: dict[RequestId, Traced] = {}
        self._seats: defaultdict[InstanceId, Seats] = defaultdict(Seats)
        self._planned: defaultdict[InstanceId, dict[int, _Planned]] = defaultdict(dict)
        """Of each executor, by step: those in which a request that is followed has a prompt to compute."""
        tracing.open_spans.append(self.open_spans)

    # Requests come and go.

    def opened(self, stream: Stream) -> None:
        """A request is queued."""
        context = stream.submission.trace
        if context is not None and self._tracing.follows(context):
            self._traced[stream.request_id] = Traced(stream, context, sum(stream.num_tokens()))

    def refused(self, message: SubmitTokens, error: RequestError) -> None:
        """A submission was not let in."""
        if message.trace is not None and self._tracing.follows(message.trace):
            now_ns = self._unix_time_ns()
            attributes: Attributes = {names.ATTEMPT: message.attempt, names.ERROR_TYPE: error.code}
            span = Span(message.request_id, "queue", new_span_id(), message.trace, now_ns, now_ns, attributes)
            self._tracing.record(span, message.owner)

    def started(self, stream: Stream) -> None:
        """A request has its first step."""
        if (traced := self._traced.get(stream.request_id)) is not None:
            now_ns = self._unix_time_ns()
            self._record(traced, traced.queue(self._at(stream.came_at, now_ns), now_ns, {}))

    def closed(self, stream: Stream, closed: RequestClosed) -> None:
        """A request has ended."""
        ending: Attributes = {names.OUTCOME: closed.outcome.value}
        if closed.error is not None:
            ending[names.ERROR_TYPE] = closed.error.code
        self._end(stream, ending)

    def given_up(self, stream: Stream) -> None:
        """An attempt ends here without a word: the request goes on as another one."""
        self._end(stream, {names.OUTCOME: "given_up"})

    def leave(self) -> None:
        """This scheduler leaves: what goes on goes on elsewhere."""
        for traced in list(self._traced.values()):
            self._end(traced.stream, {names.OUTCOME: "handed_over"})

    # Steps.

    def planned(self, executor_id: InstanceId, plan: StepPlan) -> StepPlan:
        """The plan as it is to be sent: it names the traces that the requests in it belong to."""
        if not self._tracing.is_on:
            return plan
        seats = self._seats[executor_id]
        for slot in plan.released:
            if (seat := seats.free(slot)) is not None and self._goes_on(seat):
                self._wait(seat, "preempted", {names.EXECUTOR: executor_id})
        if plan.assigned:
            assigned = [self._seated(executor_id, seats, assignment) for assignment in plan.assigned]
            plan = replace(plan, assigned=tuple(assigned))
        if chunks := seats.chunks_in(plan):
            self._planned[executor_id][plan.step_id] = _Planned(self._unix_time_ns(), chunks)
        return plan

    def completed(self, executor_id: InstanceId, result: StepResult) -> None:
        """The result of a step has come."""
        planned = self._planned[executor_id].pop(result.step_id, None)
        if planned is None:
            return
        end_ns = self._unix_time_ns()
        start_ns = max(planned.sent_ns, end_ns - round(result.duration_s * _NS))
        for chunk in planned.chunks:
            self._record_chunk(chunk, chunk.span(executor_id, result.step_id, start_ns, end_ns))

    def executor_lost(self, executor_id: InstanceId, reason: str) -> None:
        """An executor is about to be held no longer: what runs there will wait for another place."""
        end_ns = self._unix_time_ns()
        for step_id, planned in self._planned.pop(executor_id, {}).items():
            for chunk in planned.chunks:
                span = chunk.span(executor_id, step_id, planned.sent_ns, end_ns)
                span.attributes[names.ERROR_TYPE] = reason
                self._record_chunk(chunk, span)
        for seat in self._seats.pop(executor_id, Seats()).seats.values():
            if self._goes_on(seat):
                self._wait(seat, "migration", {names.EXECUTOR: executor_id, names.REASON: reason})

    # For those who ask.

    def open_spans(self, request_id: RequestId) -> Iterator[Span]:
        """What goes on of a client request."""
        now_ns = self._unix_time_ns()
        for traced in self._traced.values():
            stream = traced.stream
            if client_request_id(stream.request_id) != request_id:
                continue
            if stream.first_step_at is None:
                yield traced.queue(self._at(stream.came_at, now_ns), 0, {})
            if traced.rest is not None:
                yield traced.rest
            for wait in traced.waits.values():
                yield traced.wait(wait, 0, {})
            if stream.first_token_at is not None:
                yield traced.decode(self._at(stream.first_token_at, now_ns), 0, {})

    # Steps of these.

    def _end(self, stream: Stream, ending: Attributes) -> None:
        traced = self._traced.pop(stream.request_id, None)
        if traced is None:
            return
        now_ns = self._unix_time_ns()
        if stream.first_step_at is None:
            self._record(traced, traced.queue(self._at(stream.came_at, now_ns), now_ns, ending))
        if traced.rest is not None:
            self._record(traced, traced.rest)
        for wait in traced.waits.values():
            self._record(traced, traced.wait(wait, now_ns, ending))
        if stream.first_token_at is not None:
            self._record(traced, traced.decode(self._at(stream.first_token_at, now_ns), now_ns, ending))

    def _at(self, moment: float, now_ns: int) -> int:
        """A moment of the clock as nanoseconds since 1970, if it is `now_ns` now."""
        return now_ns - round((self._clock.now() - moment) * _NS)

    def _goes_on(self, seat: Seat) -> bool:
        """Whether a choice has more to do."""
        request_id = seat.traced.stream.request_id
        request = self._fleet.get(request_id)
        is_current = self._traced.get(request_id) is seat.traced
        return is_current and request is not None and not request.choices[seat.choice].is_finished

    def _wait(self, seat: Seat, name: str, attributes: Attributes) -> None:
        if seat.traced.has_several_choices:
            attributes[names.CHOICE] = seat.choice
        seat.traced.waits[seat.choice] = Wait(name, new_span_id(), self._unix_time_ns(), attributes)

    def _seated(self, executor_id: InstanceId, seats: Seats, assignment: SlotAssignment) -> SlotAssignment:
        """A choice gets a slot; the assignment as it is to be sent."""
        traced = self._traced.get(assignment.request_id)
        if traced is None:
            return assignment
        traced.executor_id = executor_id
        seats.take(assignment.slot, Seat(traced, assignment.choice_index), len(assignment.token_ids))
        if (wait := traced.waits.pop(assignment.choice_index, None)) is not None:
            self._record(traced, traced.wait(wait, self._unix_time_ns(), {}))
        context = traced.context
        return replace(assignment, trace=replace(context, state="") if context.state else context)

    def _record_chunk(self, chunk: Chunk, span: Span) -> None:
        """Record the span of a chunk. If its request has too many, it becomes part of one that tells of the rest."""
        traced = chunk.seat.traced
        traced.num_chunks += 1
        if traced.num_chunks < _MAX_CHUNK_SPANS:
            self._record(traced, span)
        elif traced.rest is None:
            traced.rest = span
        else:
            traced.rest = joined(traced.rest, span, traced.num_chunks - _MAX_CHUNK_SPANS + 1)

    def _record(self, traced: Traced, span: Span) -> None:
        self._tracing.record(span, traced.stream.submission.owner)
