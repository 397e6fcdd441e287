"""Traces: what travels with a request so that every hop can tell its part, and the question for what they told.

A message about a request carries its `TraceContext`, or None if nobody wants to know; messages are batched, so a header
could speak for one request only. Spans stay with the process that made them. Who wants those of a request asks all
instances (`SpansWanted`), and gets an answer from each (`SpansFound`), on subjects of their own.
"""

from shared.ids import InstanceId, RequestId
from shared.messages.base import Message

AttributeValue = str | bool | int | float | tuple[str, ...]
Attributes = dict[str, AttributeValue]


class TraceContext(Message, frozen=True, gc=False):
    """A place in a trace, as in the W3C's Trace Context: what is done for the request is told below it."""

    trace_id: bytes
    """16 bytes, not all of them 0."""
    span_id: bytes
    """8 bytes: the span that what follows belongs to. Empty at the very top of a trace."""
    is_sampled: bool = False
    """Whether the spans of this trace are to be exported."""
    state: str = ""
    """What other systems want to have passed on with it (`tracestate`)."""


class SpanEvent(Message, frozen=True, gc=False):
    """Something that happened within a span, at one moment."""

    name: str
    at_ns: int
    """Since 1970, like all times of spans."""
    attributes: Attributes = {}


class Span(Message, frozen=True, gc=False):
    """One phase of one request, or one step of an executor."""

    request_id: RequestId
    """Of the request to the mesh that it is about; empty for a step."""
    name: str
    span_id: bytes
    context: TraceContext
    """Its trace, and the span above it."""
    start_ns: int
    end_ns: int
    """0 while it goes on."""
    attributes: Attributes = {}
    events: tuple[SpanEvent, ...] = ()
    links: tuple[TraceContext, ...] = ()
    """Spans of other traces that it has to do with."""
    is_server: bool = False
    """Whether it answers somebody outside of the mesh."""


class StepTaken(Message, frozen=True, gc=False):
    """One step of an executor, without the requests in it."""

    step_id: int
    start_ns: int
    duration_ns: int
    num_rows: int
    num_tokens: int
    """Computed in it, guesses included."""
    num_drafted: int = 0
    """Of these, tokens guessed ahead."""
    num_right: int = 0
    """Guesses that were right."""


class SpansWanted(Message, frozen=True):
    """Anybody → all instances: what do you know of this request?"""

    query_id: str
    asker_id: InstanceId
    request_id: RequestId
    """Of the client's request: those to the mesh that it became are meant too."""


class SpansFound(Message, frozen=True):
    """An instance → who asked: all that I know of it, which may be nothing."""

    query_id: str
    instance_id: InstanceId
    name: str
    """Of the instance, for people."""
    owner: str | None = None
    """Whose request it is (`SubmitRequest.owner`); None if this instance was never told."""
    spans: tuple[Span, ...] = ()
    steps: tuple[StepTaken, ...] = ()
    """Those that the request took part in, in order."""
    num_left_out: int = 0
    """Spans and steps that there was no room for."""
