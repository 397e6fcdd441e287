"""What tests of the gateway's spans share: a trace of a client's, and what is kept of a request."""

from shared.ids import RequestId, Service
from shared.messages import Span, TraceContext
from tests.gateway.harness import Harness

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}
PARENT = TraceContext(bytes.fromhex(TRACE_ID), bytes.fromhex(SPAN_ID), is_sampled=True, state="vendor=1")


def spans(harness: Harness, request_id: str, name: str | None = None) -> list[Span]:
    """What is kept of a request."""
    kept = harness.tracing.store.find(RequestId(request_id))
    return [] if kept is None else [span for span in kept.spans if name in (None, span.name)]


def only(harness: Harness, request_id: str) -> Span:
    """The one span of a request."""
    (span,) = spans(harness, request_id)
    assert span.is_server
    assert 0 < span.start_ns <= span.end_ns
    return span


def going_on(harness: Harness, request_id: str) -> list[str]:
    """The names of a request's spans that are open."""
    (open_spans,) = harness.tracing.open_spans
    found = list(open_spans(RequestId(request_id)))
    assert all(span.end_ns == 0 for span in found)
    return [span.name for span in found]


async def scheduler_leaves(harness: Harness) -> None:
    harness.fake.silent.add(Service.SCHEDULER)
    await harness.fake.announce(Service.SCHEDULER, harness.fake.scheduler_id, is_leaving=True)
    await harness.settle()
