"""Spans over OTLP/HTTP to a real receiver: nothing is lost or changed, and what does not arrive has a reason."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)

from shared.actor import Identity
from shared.cli.mesh.ports import free_port
from shared.clock import FakeClock
from shared.config import MeshConfig
from shared.ids import InstanceId, Service
from shared.messages import SpanEvent, TraceContext
from shared.telemetry import otlp
from shared.telemetry.export import Loss
from shared.telemetry.otlp import OtlpSender
from shared.telemetry.otlp_settings import OtlpSettings
from shared.telemetry.settings import tracing_of
from shared.telemetry.tracing import Tracing
from tests.shared.telemetry.collector import PATIENCE_S, Collector, collecting
from tests.shared.telemetry.spans import CONTEXT, UNSAMPLED, request_id, span_of

IDENTITY = Identity(Service.SCHEDULER, InstanceId("scheduler-0a1b"), "scheduler-1")
RESOURCE = {"service.name": "shoal-scheduler", "service.instance.id": "scheduler-0a1b"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def sender(collector: Collector, **settings: Any) -> OtlpSender:
    return OtlpSender(OtlpSettings(collector.traces_url, **settings), RESOURCE, "1.2.3")


def test_a_span_arrives_as_it_was(collector: Collector) -> None:
    context = TraceContext(CONTEXT.trace_id, CONTEXT.span_id, True, "vendor=1,other=2")
    attributes: dict[str, Any] = {"text": "é", "is": True, "count": 7, "share": 0.5, "all": ("stop", "length")}
    event = SpanEvent("resumed", 1_200_000_000, {"how": "socket"})
    span = span_of(1, "chat tiny", context, attributes=attributes, events=(event,), links=(UNSAMPLED,), is_server=True)
    assert sender(collector).send([span]) is None
    (told,) = collector.spans
    assert (told.name, told.kind, told.is_error, told.state) == ("chat tiny", "SERVER", False, "vendor=1,other=2")
    assert (told.trace_id, told.parent_id) == (CONTEXT.trace_id.hex(), CONTEXT.span_id.hex())
    assert told.span_id == span.span_id.hex()
    assert (told.start_ns, told.end_ns) == (1_000_000_000, 1_500_000_000)
    assert told.attributes == attributes | {"all": ["stop", "length"], "shoal.request.id": request_id(1)}
    assert told.events == ("resumed",)
    assert told.links == ((UNSAMPLED.trace_id.hex(), UNSAMPLED.span_id.hex()),)
    assert told.resource == RESOURCE
    assert told.scope == ("shoal", "1.2.3")
    assert collector.headers[0]["content-type"] == "application/x-protobuf"
    assert collector.headers[0]["user-agent"] == "shoal/1.2.3"


def test_what_is_at_the_top_of_a_trace_has_no_parent_and_an_error_is_a_status(collector: Collector) -> None:
    top = TraceContext(CONTEXT.trace_id, b"", is_sampled=True)
    assert sender(collector).send([span_of(1, context=top, attributes={"error.type": "stalled"})]) is None
    (told,) = collector.spans
    assert (told.parent_id, told.kind, told.is_error) == ("", "INTERNAL", True)


def test_a_collector_gets_the_headers_that_it_wants(collector: Collector) -> None:
    assert sender(collector, headers={"api-key": "secret"}).send([span_of(1)]) is None
    assert collector.headers[0]["api-key"] == "secret"


def test_spans_travel_compressed_if_that_is_wished_for(collector: Collector) -> None:
    assert sender(collector, has_gzip=True).send([span_of(1), span_of(2)]) is None
    assert len(collector.spans) == 2
    assert collector.headers[0]["content-encoding"] == "gzip"


def test_what_a_collector_refuses_is_lost_at_once(collector: Collector) -> None:
    collector.status = 403
    assert sender(collector).send([span_of(1), span_of(2)]) == Loss(2, "status 403")
    assert len(collector.paths) == 1


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_collector_that_may_take_them_later_is_asked_again(collector: Collector, status: int) -> None:
    collector.first_statuses = [status]
    assert sender(collector).send([span_of(1)]) is None
    assert len(collector.spans) == 1
    assert len(collector.paths) == 2


class _Time(threading.Event):
    """In the place of `time` and of what ends a pause: a pause takes no time, and the clock says that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.monotonic = (clock := FakeClock()).now
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._clock.advance(timeout)
        return self.is_set()


def test_it_is_asked_no_longer_than_there_is_time(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    collector.status = 503
    time, patient = _Time(), sender(collector, timeout_s=20.0)
    monkeypatch.setattr(otlp, "time", time)
    patient._is_given_up = time
    assert patient.send([span_of(1)]) == Loss(1, "status 503")
    assert len(collector.paths) == 5, "at 0, 1, 3, 7 and 15 s, each pause a fifth longer or shorter"
    assert time.monotonic() < 20.0


def test_a_collector_that_does_not_answer_is_waited_for_no_longer_than_that(collector: Collector) -> None:
    collector.delay_s = 3600
    loss = sender(collector, timeout_s=0.2).send([span_of(1)])
    assert loss is not None
    assert "timed out" in loss.reason


def test_giving_up_ends_the_wait_for_another_try(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_FIRST_PAUSE_S", 3600.0)
    collector.status, patient = 503, sender(collector, timeout_s=7200)
    with ThreadPoolExecutor() as threads:
        sending = threads.submit(patient.send, [span_of(1)])
        assert collector.was_asked.wait(PATIENCE_S)
        patient.give_up()
        assert sending.result(PATIENCE_S) == Loss(1, "status 503")
    assert len(collector.paths) == 1


def test_nobody_listening_has_a_reason() -> None:
    settings = OtlpSettings(f"http://127.0.0.1:{free_port()}/v1/traces", timeout_s=0.1)
    loss = OtlpSender(settings, RESOURCE, "0").send([span_of(1)])
    assert loss is not None
    assert "refused" in loss.reason


def test_what_a_collector_takes_only_in_part_is_counted_by_its_own_word(collector: Collector) -> None:
    partial = ExportTracePartialSuccess(rejected_spans=2, error_message="too old")
    collector.answer = ExportTraceServiceResponse(partial_success=partial)
    assert sender(collector).send([span_of(number) for number in range(5)]) == Loss(2, "too old")


def _tracing(endpoint: str, **settings: Any) -> Tracing:
    return tracing_of(IDENTITY, MeshConfig(**settings), {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})


def test_spans_go_from_a_service_to_the_collector_that_its_environment_names(collector: Collector) -> None:
    tracing = _tracing(collector.url)
    tracing.record(span_of(1))
    tracing.record(span_of(2, context=UNSAMPLED))
    tracing.close(10.0)
    (told,) = collector.spans
    assert (told.service, told.resource["service.instance.id"]) == ("shoal-scheduler", "scheduler-0a1b")
    assert told.resource["service.version"]
    assert told.attributes["shoal.request.id"] == request_id(1)
    assert collector.paths == ["/v1/traces"]


def test_the_environment_has_the_last_word_on_what_a_process_is(collector: Collector) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_SERVICE_NAME": "llm"}
    environ["OTEL_RESOURCE_ATTRIBUTES"] = "deployment.environment.name=test"
    tracing = tracing_of(IDENTITY, MeshConfig(), environ)
    tracing.record(span_of(1))
    tracing.close(10.0)
    resource = collector.spans[0].resource
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("llm", "test")
    assert (resource["service.instance.id"], resource["shoal.instance.name"]) == ("scheduler-0a1b", "scheduler-1")


def test_nothing_is_exported_where_no_share_of_requests_is_to_be(collector: Collector) -> None:
    tracing = _tracing(collector.url, trace_sample_ratio=0.0)
    assert tracing.exporter is None
    assert tracing.store.max_requests == 1000


def test_a_service_that_neither_keeps_nor_exports_follows_nobody() -> None:
    assert not tracing_of(IDENTITY, MeshConfig(trace_store_requests=0), {}).is_on


def test_spans_of_many_requests_arrive_in_batches(collector: Collector) -> None:
    tracing = _tracing(collector.url)
    for number in range(1300):
        tracing.record(span_of(number))
    tracing.close(20.0)
    assert len(collector.spans) == 1300
    assert len(collector.paths) < 20
