"""Spans in OpenTelemetry's terms, over OTLP/HTTP. The only module that needs its packages (the extra `telemetry`).

Endpoint, headers, timeout, compression and certificates are read from the standard `OTEL_EXPORTER_OTLP_*` variables by
OpenTelemetry's own exporter, and `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` by its resource.
"""

import logging
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from shared.messages import AttributeValue, Span, TraceContext
from shared.telemetry import names

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)


class OtlpSender:
    """Sends spans to the collector that the environment names."""

    def __init__(self, resource: Mapping[str, str], version: str) -> None:
        """`resource` is what this process says of itself, where the environment does not say it."""
        self._resource = Resource.create(resource).merge(OTELResourceDetector().detect())
        self._scope = InstrumentationScope("shoal", version)
        self._words = _LastWords()
        self._exporter = OTLPSpanExporter()

    def send(self, spans: Sequence[Span]) -> str | None:
        """Why the collector did not take them; None if it did. Tries again for as long as the exporter's timeout
        allows."""
        sdk_spans = [self._in_sdk_terms(span) for span in spans]
        if self._exporter.export(sdk_spans) is SpanExportResult.SUCCESS:
            return None
        return self._words.take()

    def give_up(self) -> None:
        """Try no more."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _in_sdk_terms(self, span: Span) -> ReadableSpan:
        context = span.context
        attributes: dict[str, AttributeValue] = dict(span.attributes)
        if span.request_id:
            attributes[names.REQUEST_ID] = span.request_id
        return ReadableSpan(
            name=span.name,
            context=_sdk_context(context, span.span_id, is_remote=False),
            parent=_sdk_context(context, context.span_id, is_remote=True) if context.span_id else None,
            resource=self._resource,
            attributes=attributes,
            events=[Event(event.name, event.attributes, event.at_ns) for event in span.events],
            links=[Link(_sdk_context(link, link.span_id, is_remote=True)) for link in span.links],
            kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            status=_ERROR if names.ERROR_TYPE in attributes else _UNSET,
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )


class _LastWords(logging.Handler):
    """Keeps what the exporter logs to itself: it would say the same with every batch."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""
        logger = logging.getLogger(OTLPSpanExporter.__module__)
        logger.handlers[:] = [self]
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self._text = record.getMessage()

    def take(self) -> str:
        """The latest."""
        text, self._text = self._text, ""
        return text or "nobody says why"


def _sdk_context(context: TraceContext, span_id: bytes, *, is_remote: bool) -> SpanContext:
    return SpanContext(
        trace_id=int.from_bytes(context.trace_id),
        span_id=int.from_bytes(span_id),
        is_remote=is_remote,
        trace_flags=_SAMPLED,
        trace_state=TraceState.from_header([context.state]) if context.state else None,
    )
