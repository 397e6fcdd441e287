"""The detokenizer's part of a request's trace: one span for each time that the request is opened here, to its end.

A request is opened again when all of it is said again, or when it was forgotten meanwhile.
"""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from shared.ids import RequestId, client_request_id
from shared.messages import Attributes, RequestOpened, Span, TraceContext
from shared.telemetry import names
from shared.telemetry.tracing import Tracing, new_span_id


class _Begun(NamedTuple):
    opened: RequestOpened
    context: TraceContext
    span_id: bytes
    start_ns: int


class DetokenizerSpans:
    """Makes the spans of one detokenizer."""

    def __init__(self, tracing: Tracing, unix_time_ns: Callable[[], int] = time.time_ns) -> None:
        self._tracing = tracing
        self._unix_time_ns = unix_time_ns
        self._begun: dict[RequestId, _Begun] = {}
        tracing.open_spans.append(self.open_spans)

    def opened(self, opened: RequestOpened) -> None:
        """A request is open from now on."""
        context = opened.trace
        if context is not None and self._tracing.follows(context):
            self._begun[opened.request_id] = _Begun(opened, context, new_span_id(), self._unix_time_ns())

    def ended(self, request_id: RequestId, num_tokens: int, outcome: str, error_code: str | None = None) -> None:
        """It is open no more, after so many tokens of all its choices."""
        if request_id in self._begun:
            ending: Attributes = {names.TEXT_TOKENS: num_tokens, names.OUTCOME: outcome}
            self._end(request_id, ending | ({names.ERROR_TYPE: error_code} if error_code is not None else {}))

    def leave(self) -> None:
        """This detokenizer leaves: another one decodes what is open here, from the beginning."""
        for request_id in list(self._begun):
            self._end(request_id, {names.OUTCOME: "handed_over"})

    def open_spans(self, request_id: RequestId) -> Iterator[Span]:
        """What is open of a client request."""
        for begun in self._begun.values():
            if client_request_id(begun.opened.request_id) == request_id:
                yield _span(begun, 0, {})

    def _end(self, request_id: RequestId, ending: Attributes) -> None:
        self._tracing.record(_span(self._begun.pop(request_id), self._unix_time_ns(), ending))


def _span(begun: _Begun, end_ns: int, ending: Attributes) -> Span:
    opened = begun.opened
    attributes: Attributes = {
        names.ATTEMPT: opened.attempt,
        names.REPLAY: opened.replay,
        names.SCHEDULER: opened.scheduler_id,
    }
    request_id, context = opened.request_id, begun.context
    return Span(request_id, "detokenize", begun.span_id, context, begun.start_ns, end_ns, attributes | ending)
