"""Spans over OTLP/HTTP to a real receiver: nothing of them is lost or changed, and the environment is obeyed."""

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from shared.actor import Identity
from shared.config import MeshConfig
from shared.errors import ConfigError
from shared.ids import InstanceId, Service
from shared.messages import Span, SpanEvent, TraceContext
from shared.telemetry.otlp import OtlpSender
from shared.telemetry.settings import endpoint_in, tracing_of
from shared.telemetry.tracing import Tracing
from tests.telemetry.collector import Collector, collecting
from tests.telemetry.spans import CONTEXT, UNSAMPLED, request_id, span_of

IDENTITY = Identity(Service.SCHEDULER, InstanceId("scheduler-0a1b"), "scheduler-1")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        yield collector


def _sender() -> OtlpSender:
    return OtlpSender({"service.name": "shoal-scheduler", "service.instance.id": "scheduler-0a1b"}, "1.2.3")


def test_a_span_arrives_as_it_was(collector: Collector) -> None:
    context = TraceContext(CONTEXT.trace_id, CONTEXT.span_id, True, "vendor=1,other=2")
    attributes: dict[str, Any] = {"text": "é", "is": True, "count": 7, "share": 0.5, "all": ("stop", "length")}
    event = SpanEvent("resumed", 1_200_000_000, {"how": "socket"})
    span = span_of(1, "chat tiny", context, attributes=attributes, events=(event,), links=(UNSAMPLED,), is_server=True)
    assert _sender().send([span]) is None
    (told,) = collector.spans
    assert (told.name, told.kind, told.is_error, told.state) == ("chat tiny", "SERVER", False, "vendor=1,other=2")
    assert (told.trace_id, told.parent_id) == (CONTEXT.trace_id.hex(), CONTEXT.span_id.hex())
    assert told.span_id == span.span_id.hex()
    assert (told.start_ns, told.end_ns) == (1_000_000_000, 1_500_000_000)
    assert told.attributes == attributes | {"all": ["stop", "length"], "shoal.request.id": request_id(1)}
    assert told.events == ("resumed",)
    assert told.links == ((UNSAMPLED.trace_id.hex(), UNSAMPLED.span_id.hex()),)
    assert told.resource["service.name"] == "shoal-scheduler"
    assert told.resource["service.instance.id"] == "scheduler-0a1b"
    assert collector.paths == ["/v1/traces"]


def test_what_is_at_the_top_of_a_trace_has_no_parent_and_an_error_is_a_status(collector: Collector) -> None:
    top = TraceContext(CONTEXT.trace_id, b"", is_sampled=True)
    assert _sender().send([span_of(1, context=top, attributes={"error.type": "stalled"})]) is None
    (told,) = collector.spans
    assert (told.parent_id, told.kind, told.is_error) == ("", "INTERNAL", True)


def test_the_environment_names_service_resource_and_headers(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llm")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.name=ignored")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret,x-tenant=a%20b")
    assert _sender().send([span_of(1)]) is None
    (told,) = collector.spans
    assert told.service == "llm"
    assert told.resource["deployment.environment.name"] == "test"
    assert told.resource["service.instance.id"] == "scheduler-0a1b"
    assert collector.headers[0].items() >= {"api-key": "secret", "x-tenant": "a b"}.items()


def test_an_endpoint_for_traces_alone_is_used_as_it_is(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/somewhere/else")
    assert _sender().send([span_of(1)]) is None
    assert collector.paths == ["/somewhere/else"]


def test_what_a_collector_refuses_has_a_reason(collector: Collector) -> None:
    collector.status = 403
    trouble = _sender().send([span_of(1)])
    assert trouble is not None
    assert "403" in trouble


def test_nobody_listening_has_a_reason_too(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    assert _sender().send([span_of(1)])


def _tracing(environ: dict[str, str], **settings: Any) -> Tracing:
    return tracing_of(IDENTITY, MeshConfig(**settings), environ)


def test_spans_go_from_a_service_to_the_collector_that_its_environment_names(collector: Collector) -> None:
    tracing = _tracing({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url})
    with closing(_Closer(tracing)):
        tracing.record(span_of(1))
        tracing.record(span_of(2, context=UNSAMPLED))
    (told,) = collector.spans
    assert (told.service, told.resource["service.instance.id"]) == ("shoal-scheduler", "scheduler-0a1b")
    assert told.resource["service.version"]
    assert told.attributes["shoal.request.id"] == request_id(1)


class _Closer:
    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def close(self) -> None:
        self._tracing.close(10.0)


@pytest.mark.parametrize(
    ("environ", "settings"),
    [
        ({}, {}),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, {}),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "TRUE"}, {}),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"}, {}),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, {"trace_sample_ratio": 0.0}),
    ],
)
def test_nothing_is_exported_without_an_endpoint_or_where_that_is_switched_off(
    environ: dict[str, str], settings: dict[str, Any]
) -> None:
    tracing = _tracing(environ, **settings)
    assert tracing.exporter is None
    assert tracing.store.max_requests == 1000


def test_a_service_that_neither_keeps_nor_exports_follows_nobody() -> None:
    assert not _tracing({}, trace_store_requests=0).is_on


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT='collector:4318': must be"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://"}, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT='http://': must be"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:port"}, "OTEL_EXPORTER_OTLP_ENDPOINT='http://a:port': Port"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL='grpc': spans are exported as http/protobuf only",
        ),
    ],
)
def test_an_endpoint_that_is_none_is_the_operators_to_mend(environ: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        endpoint_in(environ)
    assert str(caught.value).startswith(complaint)


def test_a_password_in_an_endpoint_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        endpoint_in({"OTEL_EXPORTER_OTLP_ENDPOINT": "ftp://me:secret@collector"})
    assert "secret" not in str(caught.value)


def test_a_protocol_for_traces_outweighs_the_general_one() -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    }
    assert endpoint_in(environ) == "http://127.0.0.1:9"


def test_spans_of_many_requests_arrive_in_batches(collector: Collector) -> None:
    tracing = _tracing({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url})
    for number in range(1300):
        tracing.record(span_of(number))
    began = time.monotonic()
    tracing.close(20.0)
    assert time.monotonic() - began < 20.0
    assert len(collector.spans) == 1300
    assert len(collector.paths) < 20


def test_the_spans_of_a_batch_may_be_of_several_kinds(collector: Collector) -> None:
    links = tuple(TraceContext(bytes([number]) * 16, bytes([number]) * 8, True) for number in range(1, 33))
    spans: list[Span] = [span_of(1), span_of(2, "step", links=links)]
    assert _sender().send(spans) is None
    assert [len(told.links) for told in collector.spans] == [0, 32]
