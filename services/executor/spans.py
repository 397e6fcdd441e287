"""The executor's part of requests' traces: its steps, each with the requests that took part in it.

A step belongs to many requests, so it is a part of nobody's trace: it is exported as a trace of its own, with links to
theirs. Here the latest steps are kept, for whoever asks how a request came along. While the same choices go on from
step to step, steps share one list of them.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from services.executor.step_thread import StepFinished
from shared.ids import RequestId, client_request_id
from shared.messages import Attributes, Span, StepPlan, StepTaken, TraceContext, int32s
from shared.telemetry import names
from shared.telemetry.tracing import Tracing, new_span_id, new_trace_id

_STEPS_OF_A_REQUEST: Final = 16
"""So many steps are kept for each request that may be kept, all together."""
_MAX_LINKS: Final = 32
"""Of a step that is exported; a larger batch is told of in part."""
_NS: Final = 1_000_000_000


class _Row(NamedTuple):
    """A choice that is followed."""

    request_id: RequestId
    context: TraceContext


class _Step(NamedTuple):
    taken: StepTaken
    rows: tuple[_Row, ...]


class StepSpans:
    """Follows the steps of one executor."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._slots: dict[int, _Row] = {}
        self._rows: tuple[_Row, ...] = ()
        """Of the latest plan."""
        self._rows_of = int32s()
        """The slots that are in it."""
        self._planned: dict[tuple[int, int], tuple[_Row, ...]] = {}
        """The rows of each plan, by epoch and step."""
        self._steps: deque[_Step] = deque(maxlen=_STEPS_OF_A_REQUEST * tracing.store.max_requests)
        self._num_steps = 0
        """Since start; the last of them are in `_steps`."""
        self._entered: OrderedDict[RequestId, int] = OrderedDict()
        """How many steps there had been when each of the latest client requests came here."""
        tracing.steps_of = self.steps_of

    def reset(self) -> None:
        """All slots are empty, and what is planned will not be computed."""
        self._slots.clear()
        self._planned.clear()
        self._rows, self._rows_of = (), int32s()

    def planned(self, epoch: int, plan: StepPlan) -> None:
        """A plan will be carried out."""
        if not self._tracing.is_on:
            return
        for slot in plan.released:
            self._slots.pop(slot, None)
        for assignment in plan.assigned:
            if assignment.trace is not None and self._tracing.follows(assignment.trace):
                self._slots[assignment.slot] = _Row(assignment.request_id, assignment.trace)
                self._note(client_request_id(assignment.request_id))
        if plan.assigned or plan.released or plan.slots != self._rows_of:
            self._rows = tuple([row for slot in plan.slots if (row := self._slots.get(slot)) is not None])
            self._rows_of = plan.slots
        if self._rows:
            self._planned[epoch, plan.step_id] = self._rows

    def finished(self, message: StepFinished) -> None:
        """It was carried out."""
        result = message.result
        rows = self._planned.pop((message.epoch, result.step_id), None)
        if rows is None:
            return
        duration_ns = round(result.duration_s * _NS)
        taken = StepTaken(
            step_id=result.step_id,
            start_ns=message.ended_ns - duration_ns,
            duration_ns=duration_ns,
            num_rows=message.num_rows,
            num_tokens=message.num_tokens,
            num_drafted=sum(result.num_drafted),
            num_right=sum(result.num_tokens) - len(result.num_tokens),
        )
        self._steps.append(_Step(taken, rows))
        self._num_steps += 1
        if self._tracing.exporter is not None:
            self._export(message.epoch, taken, rows)

    def steps_of(self, request_id: RequestId) -> Iterator[StepTaken]:
        """The steps that a client request took part in, as far as they are kept, oldest first."""
        entered = self._entered.get(request_id)
        if entered is None:
            return
        num_forgotten = self._num_steps - len(self._steps)
        rows: tuple[_Row, ...] = ()
        is_in = False
        for step in islice(self._steps, max(0, entered - num_forgotten), None):
            if step.rows is not rows:
                rows = step.rows
                is_in = any(client_request_id(row.request_id) == request_id for row in rows)
            if is_in:
                yield step.taken

    def _note(self, request_id: RequestId) -> None:
        if request_id not in self._entered:
            self._entered[request_id] = self._num_steps
            if len(self._entered) > self._tracing.store.max_requests:
                self._entered.popitem(last=False)

    def _export(self, epoch: int, taken: StepTaken, rows: tuple[_Row, ...]) -> None:
        links = tuple([row.context for row in rows if row.context.is_sampled][:_MAX_LINKS])
        if not links:
            return
        attributes: Attributes = {
            names.STEP_EPOCH: epoch,
            names.STEP_ID: taken.step_id,
            names.STEP_ROWS: taken.num_rows,
            names.STEP_TOKENS: taken.num_tokens,
        }
        if taken.num_drafted:
            attributes |= {names.STEP_DRAFTS: taken.num_drafted, names.STEP_DRAFTS_RIGHT: taken.num_right}
        self._tracing.export(
            Span(
                request_id=RequestId(""),
                name="step",
                span_id=new_span_id(),
                context=TraceContext(new_trace_id(), b"", is_sampled=True),
                start_ns=taken.start_ns,
                end_ns=taken.start_ns + taken.duration_ns,
                attributes=attributes,
                links=links,
            )
        )
