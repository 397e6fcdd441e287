"""A collector as OpenTelemetry has them: takes OTLP over HTTP, in a thread of its own, whatever its test waits for."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanProto

PATIENCE_S = 30.0


@dataclass(frozen=True)
class Told:
    """A span as it arrived."""

    resource: dict[str, Any]
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty: it is at the top of its trace."""
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    is_error: bool
    state: str
    scope: tuple[str, str]
    """Name and version of what told it."""

    @property
    def service(self) -> str:
        """Who told it."""
        return str(self.resource["service.name"])


class Metrics:
    """One export of metrics."""

    def __init__(self, request: ExportMetricsServiceRequest) -> None:
        (whole,) = request.resource_metrics
        self.resource = _values(whole.resource.attributes)
        self.named: dict[str, Metric] = {
            metric.name: metric for scope in whole.scope_metrics for metric in scope.metrics
        }


class Collector:
    """What arrived, and how it answers."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.first_statuses: list[int] = []
        """Those of its next answers to spans, before `status` is that of all."""
        self.answer = ExportTraceServiceResponse()
        """What it says to the spans that it takes."""
        self.delay_s = 0.0
        self.was_asked = threading.Event()
        """It has been sent spans, whatever it answers."""
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.metrics: list[Metrics] = []
        """What it was sent of metrics, export by export."""
        self._spans: list[Told] = []
        self._lock = threading.Lock()

    @property
    def traces_url(self) -> str:
        """Where spans are posted to."""
        return f"{self.url}/v1/traces"

    @property
    def metrics_url(self) -> str:
        """Where metrics are posted to."""
        return f"{self.url}/v1/metrics"

    @property
    def spans(self) -> list[Told]:
        """All spans so far."""
        with self._lock:
            return list(self._spans)

    def named(self, name: str, **attributes: Any) -> list[Told]:
        """Those with this name, by start."""
        found = [span for span in self.spans if span.name == name and attributes.items() <= span.attributes.items()]
        return sorted(found, key=lambda span: span.start_ns)

    async def until(self, condition: Callable[[], object]) -> None:
        """Return when something is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, [(span.name, span.attributes) for span in self.spans]
            await asyncio.sleep(0.02)

    async def take_spans(self, request: web.Request) -> web.Response:
        """POST of spans, to any path but that of metrics."""
        await asyncio.sleep(self.delay_s)
        body = await request.read()  # also takes compression off
        with self._lock:
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
            self.paths.append(request.path)
            self.was_asked.set()
            status = self.first_statuses.pop(0) if self.first_statuses else self.status
            if status == 200:
                self._spans += _told(ExportTraceServiceRequest.FromString(body))
        return web.Response(status=status, body=self.answer.SerializeToString() if status == 200 else b"")

    async def take_metrics(self, request: web.Request) -> web.Response:
        """POST /v1/metrics."""
        self.metrics.append(Metrics(ExportMetricsServiceRequest.FromString(await request.read())))
        return web.Response()


def _told(request: ExportTraceServiceRequest) -> Iterator[Told]:
    for of_resource in request.resource_spans:
        resource = _values(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield Told(
                    resource=resource,
                    name=span.name,
                    kind=SpanProto.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=_values(span.attributes),
                    events=tuple(event.name for event in span.events),
                    links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                    is_error=span.status.code == 2,
                    state=span.trace_state,
                    scope=(of_scope.scope.name, of_scope.scope.version),
                )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs if isinstance(pair, KeyValue)}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind or "")


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens, for as long as the context lasts."""
    collector, loop, is_up = Collector(), asyncio.new_event_loop(), threading.Event()

    async def serve() -> web.AppRunner:
        application = web.Application(client_max_size=1 << 26)
        application.add_routes(
            [web.post("/v1/metrics", collector.take_metrics), web.post("/{path:.*}", collector.take_spans)]
        )
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def run() -> None:
        runner = loop.run_until_complete(serve())
        is_up.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, name="collector", daemon=True)
    thread.start()
    assert is_up.wait(PATIENCE_S)
    try:
        yield collector
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
