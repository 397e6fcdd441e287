"""Spans and requests for tests."""

from typing import Any

from shared.ids import RequestId
from shared.messages import Span, TraceContext
from shared.telemetry.tracing import new_span_id

CONTEXT = TraceContext(bytes(range(16)), bytes(range(8)), is_sampled=True)
UNSAMPLED = TraceContext(bytes(range(16)), bytes(range(8)))


def request_id(number: int) -> RequestId:
    """The id of a client's request."""
    return RequestId(f"req-{number:032x}")


def span_of(number: int, name: str = "queue", context: TraceContext = CONTEXT, **fields: Any) -> Span:
    """A span of the request with this number."""
    values = {"start_ns": 1_000_000_000, "end_ns": 1_500_000_000} | fields
    return Span(request_id(number), name, new_span_id(), context, **values)
