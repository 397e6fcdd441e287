"""Spans as OTLP over HTTP. The only module that needs OpenTelemetry's packages, and of these its protocol alone.

OpenTelemetry's own exporter was three to four times as expensive: every span becomes an object of its SDK first. Here
the protocol's messages are filled in directly, in the exporter's thread, which shares a lock with the one that serves.
"""

import gzip
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Final

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Status
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanProto

from shared.messages import Attributes, AttributeValue, Span
from shared.telemetry import names
from shared.telemetry.export import Loss
from shared.telemetry.otlp_settings import OtlpSettings

_RETRYABLE: Final = (429, 502, 503, 504)
_FIRST_PAUSE_S: Final = 1.0
_SAMPLED: Final = 0x01
_PARENT_IS_REMOTE: Final = 0x300
"""That it is known whether the span above is of another process, and that it is."""
_ERROR: Final = Status(code=Status.STATUS_CODE_ERROR)


class OtlpSender:
    """Sends spans to a collector."""

    def __init__(self, settings: OtlpSettings, resource: Mapping[str, str], version: str) -> None:
        """`resource` says whose spans they are; `version` which Shoal this is."""
        self._settings = settings
        self._resource = Resource(attributes=_pairs(resource))
        self._scope = InstrumentationScope(name="shoal", version=version)
        headers = {"Content-Type": "application/x-protobuf", "User-Agent": f"shoal/{version}"}
        if settings.has_gzip:
            headers["Content-Encoding"] = "gzip"
        self._headers = headers | dict(settings.headers)
        handlers = [urllib.request.HTTPSHandler(context=settings.tls)] if settings.tls is not None else []
        self._opener = urllib.request.build_opener(*handlers)
        self._is_given_up = threading.Event()

    def send(self, spans: Sequence[Span]) -> Loss | None:
        """What did not arrive, and why; None if all did. Tries again where that may help, as long as there is time."""
        payload = self.encode(spans)
        deadline = time.monotonic() + self._settings.timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            trouble, may_help = self._post(payload, max(0.001, deadline - time.monotonic()), len(spans))
            if trouble is None or not may_help:
                return trouble
            wait_s = pause_s * random.uniform(0.8, 1.2)
            if time.monotonic() + wait_s >= deadline or self._is_given_up.wait(wait_s):
                return trouble
            pause_s *= 2

    def give_up(self) -> None:
        """Try no more."""
        self._is_given_up.set()

    def encode(self, spans: Sequence[Span]) -> bytes:
        """The bytes that say these spans."""
        scope = ScopeSpans(scope=self._scope, spans=[_span(span) for span in spans])
        request = ExportTraceServiceRequest(
            resource_spans=[ResourceSpans(resource=self._resource, scope_spans=[scope])]
        )
        payload = request.SerializeToString()
        return gzip.compress(payload, compresslevel=1) if self._settings.has_gzip else payload

    def _post(self, payload: bytes, timeout_s: float, num_spans: int) -> tuple[Loss | None, bool]:
        """What one try lost, and whether another one may do better."""
        request = urllib.request.Request(self._settings.endpoint, payload, self._headers, method="POST")
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                return _rejected(response.read()), False
        except urllib.error.HTTPError as error:
            with error:
                return Loss(num_spans, f"status {error.code}"), error.code in _RETRYABLE
        except OSError as error:  # no connection, or none any more, or none in time
            return Loss(num_spans, str(getattr(error, "reason", error)) or type(error).__name__), True


def _rejected(body: bytes) -> Loss | None:
    """What a collector says that it has taken only in part."""
    try:
        partial = ExportTraceServiceResponse.FromString(body).partial_success
    except DecodeError:
        return None
    if not partial.rejected_spans:
        return None
    return Loss(partial.rejected_spans, partial.error_message or "the collector rejected them")


def _span(span: Span) -> SpanProto:
    context = span.context
    attributes = _pairs(span.attributes)
    if span.request_id:
        attributes.append(KeyValue(key=names.REQUEST_ID, value=AnyValue(string_value=span.request_id)))
    told = SpanProto(
        trace_id=context.trace_id,
        span_id=span.span_id,
        parent_span_id=context.span_id,
        trace_state=context.state,
        flags=_SAMPLED | _PARENT_IS_REMOTE if context.span_id else _SAMPLED,
        name=span.name,
        kind=SpanProto.SPAN_KIND_SERVER if span.is_server else SpanProto.SPAN_KIND_INTERNAL,
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=attributes,
    )
    if span.links:
        told.links.extend([SpanProto.Link(trace_id=link.trace_id, span_id=link.span_id) for link in span.links])
    for event in span.events:
        told.events.add(name=event.name, time_unix_nano=event.at_ns, attributes=_pairs(event.attributes))
    if names.ERROR_TYPE in span.attributes:
        told.status.CopyFrom(_ERROR)
    return told


def _pairs(attributes: Mapping[str, AttributeValue] | Attributes) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in attributes.items()]


def _value(value: AttributeValue) -> AnyValue:
    match value:
        case str():
            return AnyValue(string_value=value)
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case tuple():
            return AnyValue(array_value=ArrayValue(values=[AnyValue(string_value=each) for each in value]))
