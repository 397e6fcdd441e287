"""The gateway's part of requests' traces: the span that all others are below, from a client's request to its last word.

There is one for each request of a client, from its first byte, or its frame, until both have happened: all that the
mesh does for it has ended, and nobody is being told of it any more. So it goes on while a connection is broken, and
whoever resumes the request here is part of it. A gateway that takes a request over begins one of its own, `resume`,
below the first. Requests that are refused have a span too.

| span | from | to |
|---|---|---|
| `chat MODEL`, `text_completion MODEL` | the request | its last word |
| `resume MODEL` | the arrival from another gateway | the last word |
| `resubmission` | the loss of its scheduler, or its refusal | the acceptance by another one |
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from services.gateway.drafts import Draft
from services.gateway.open_request import OpenRequest
from services.gateway.span_attributes import of_answer, of_draft
from services.gateway.streams import Stream
from shared.ids import RequestId, client_request_id
from shared.messages import Attributes, ErrorInfo, Span, SpanEvent, TraceContext
from shared.telemetry import names
from shared.telemetry.tracing import Tracing, new_span_id

_MAX_EVENTS: Final = 64


class _Retry(NamedTuple):
    """A request to the mesh is looking for another scheduler."""

    span_id: bytes
    since_ns: int
    attributes: Attributes


@dataclass(slots=True, eq=False)
class _Following:
    """One request of a client. Times are nanoseconds since 1970."""

    request_id: RequestId
    name: str
    context: TraceContext
    span_id: bytes
    start_ns: int
    attributes: Attributes
    owner: str | None = None
    streams: list[Stream] = field(default_factory=list)
    events: list[SpanEvent] = field(default_factory=list)
    retries: dict[RequestId, _Retry] = field(default_factory=dict)
    num_going_on: int = 0
    """Requests to the mesh that have not ended."""
    num_readers: int = 0
    """Since the beginning."""
    is_read: bool = True
    """Whether somebody is being told of it."""
    is_stream: bool = True

    @property
    def below(self) -> TraceContext:
        """Where what is done for it belongs."""
        return TraceContext(self.context.trace_id, self.span_id, self.context.is_sampled, self.context.state)

    def span(self, end_ns: int, ending: Attributes) -> Span:
        answer = of_answer(self.streams, self.start_ns, is_stream=self.is_stream)
        return Span(
            self.request_id,
            self.name,
            self.span_id,
            self.context,
            self.start_ns,
            end_ns,
            self.attributes | answer | ending,
            tuple(self.events),
            is_server=True,
        )

    def retry_span(self, request_id: RequestId, retry: _Retry, end_ns: int, more: Attributes) -> Span:
        attributes = retry.attributes | more
        return Span(request_id, "resubmission", retry.span_id, self.below, retry.since_ns, end_ns, attributes)


class GatewaySpans:
    """Makes the spans of one gateway. Everything is said by the id of a request, and ignored where none is followed."""

    def __init__(self, tracing: Tracing, unix_time_ns: Callable[[], int] = time.time_ns) -> None:
        self.address: tuple[str, int] | None = None
        """Where clients come in, once that is known."""
        self._tracing = tracing
        self._unix_time_ns = unix_time_ns
        self._following: dict[RequestId, _Following] = {}
        tracing.open_spans.append(self.open_spans)

    # Requests begin.

    def begin(self, request_id: RequestId, name: str, parent: TraceContext | None) -> None:
        """A client asks for something, perhaps within a trace of its own."""
        context = self._tracing.begin(parent)
        if context is None or not self._tracing.follows(context):
            return
        attributes: Attributes = {}
        if self.address is not None:
            attributes[names.SERVER_ADDRESS], attributes[names.SERVER_PORT] = self.address
        self._following[request_id] = _Following(
            request_id, name, context, new_span_id(), self._unix_time_ns(), attributes
        )

    def asked(self, request_id: RequestId, draft: Draft, tenant: str) -> TraceContext | None:
        """It is known what the client asks for; where the mesh's work for it belongs, if it is followed."""
        following = self._following.get(request_id)
        if following is None:
            return None
        endpoint = draft.answer.endpoint
        following.name, following.is_stream = f"{endpoint.operation} {draft.model}", draft.answer.is_stream
        following.attributes |= of_draft(draft) | {
            names.TENANT: tenant,
            names.RESPONSE_ID: endpoint.answer_id(request_id),
        }
        return following.below

    def admitted(self, streams: Sequence[Stream], owner: str) -> None:
        """It has become requests to the mesh."""
        if (following := self._following.get(streams[0].request_id)) is not None:
            following.owner = owner
            following.streams = list(streams)
            following.num_going_on = len(streams)

    def refused(self, request_id: RequestId, error: ErrorInfo | None, owner: str | None) -> None:
        """Nothing was done for it. `error` is what the client was told; None if it left before. Means nothing about a
        request that was admitted."""
        following = self._following.get(request_id)
        if following is None or following.streams:
            return
        following.owner = owner
        ending: Attributes = {names.OUTCOME: "refused", names.ERROR_TYPE: "client_disconnected"}
        if error is not None:
            ending |= {names.ERROR_TYPE: error.code, names.HTTP_STATUS: error.status}
        self._end(following, ending)

    def adopted(self, request: OpenRequest) -> None:
        """A request has come from another gateway."""
        context = request.spec.trace
        if context is None or not self._tracing.follows(context):
            return
        key = client_request_id(request.request_id)
        following = self._following.get(key)
        if following is None:
            model, now_ns = request.spec.model, self._unix_time_ns()
            attributes: Attributes = {names.REQUEST_MODEL: model, names.RESPONSE_MODEL: model}
            following = _Following(key, f"resume {model}", context, new_span_id(), now_ns, attributes)
            following.owner, following.is_read = request.spec.owner, False
            self._following[key] = following
        following.streams.append(request.stream)
        following.num_going_on += 1

    # They are read.

    def attached(self, streams: Sequence[Stream]) -> None:
        """A client is being told of it, for the first time or again."""
        if (following := self._following.get(streams[0].request_id)) is None:
            return
        following.is_read = True
        following.num_readers += 1
        is_resumed = following.num_readers > 1 or following.name.startswith("resume ")
        if is_resumed and len(following.events) < _MAX_EVENTS:
            following.events.append(SpanEvent("resumed", self._unix_time_ns()))

    def left(self, streams: Sequence[Stream]) -> None:
        """Nobody is being told of it any more: everything was said, or the connection is gone."""
        if streams and (following := self._following.get(streams[0].request_id)) is not None:
            following.is_read = False
            self._end_if_over(following)

    # The mesh takes, loses and ends them.

    def retried(self, request: OpenRequest, reason: str) -> None:
        """A request to the mesh has no scheduler any more, and is to get another one."""
        following = self._following.get(client_request_id(request.request_id))
        if following is None:
            return
        self._end_retry(following, request.request_id, {names.ERROR_TYPE: reason})
        attributes: Attributes = {names.ATTEMPT: request.attempt, names.REASON: reason}
        following.retries[request.request_id] = _Retry(new_span_id(), self._unix_time_ns(), attributes)

    def taken(self, request: OpenRequest) -> None:
        """A scheduler has accepted it."""
        if request.attempt > 1 and (following := self._following.get(client_request_id(request.request_id))):
            scheduler_id = request.scheduler_id
            self._end_retry(following, request.request_id, {names.SCHEDULER: scheduler_id} if scheduler_id else {})

    def ended(self, request: OpenRequest) -> None:
        """A request to the mesh has ended for its client."""
        following = self._following.get(client_request_id(request.request_id))
        if following is None:
            return
        attributes = following.attributes
        attributes[names.ATTEMPT] = request.attempt
        if request.num_submissions > 1:
            attributes[names.NUM_SUBMISSIONS] = request.num_submissions
        for name, instance_id in ((names.SCHEDULER, request.scheduler_id), (names.DETOKENIZER, request.detokenizer_id)):
            if instance_id is not None:
                attributes[name] = instance_id
        following.num_going_on -= 1
        self._end_if_over(following)

    def moved(self, request: OpenRequest) -> None:
        """Its client follows it at another gateway."""
        if (following := self._following.get(client_request_id(request.request_id))) is not None:
            self._end(following, {names.OUTCOME: "moved"})

    def leave(self) -> None:
        """This gateway leaves: what goes on goes on elsewhere."""
        for following in list(self._following.values()):
            self._end(following, {names.OUTCOME: "handed_over"})

    # For those who ask.

    def context_of(self, request_id: RequestId) -> TraceContext | None:
        """The trace that a request belongs to, if it is followed here."""
        following = self._following.get(client_request_id(request_id))
        return following.context if following is not None else None

    def owner_of(self, request_id: RequestId) -> str | None:
        """Whose request it is, if it goes on here."""
        following = self._following.get(request_id)
        return following.owner if following is not None else None

    def open_spans(self, request_id: RequestId) -> Iterator[Span]:
        """What goes on of a client request."""
        if (following := self._following.get(request_id)) is not None:
            yield following.span(0, {})
            for mesh_id, retry in following.retries.items():
                yield following.retry_span(mesh_id, retry, 0, {})

    # Steps of these.

    def _end_if_over(self, following: _Following) -> None:
        if following.num_going_on == 0 and not following.is_read:
            self._end(following, {})

    def _end(self, following: _Following, ending: Attributes) -> None:
        del self._following[following.request_id]
        for request_id in list(following.retries):
            self._end_retry(following, request_id, {names.ERROR_TYPE: "not_taken"})
        if following.events:
            ending[names.NUM_RESUMPTIONS] = len(following.events)
        self._tracing.record(following.span(self._unix_time_ns(), ending), following.owner)

    def _end_retry(self, following: _Following, request_id: RequestId, ending: Attributes) -> None:
        if (retry := following.retries.pop(request_id, None)) is not None:
            span = following.retry_span(request_id, retry, self._unix_time_ns(), ending)
            self._tracing.record(span, following.owner)
