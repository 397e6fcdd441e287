"""A collector for OTLP over HTTP that keeps the last metrics that it was sent."""

import asyncio
import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

PATIENCE_S = 20.0


class Received:
    """One export."""

    def __init__(self, request: ExportMetricsServiceRequest) -> None:
        (whole,) = request.resource_metrics
        self.resource = {each.key: each.value.string_value for each in whole.resource.attributes}
        self.metrics: dict[str, Metric] = {
            metric.name: metric for scope in whole.scope_metrics for metric in scope.metrics
        }


class Collector:
    """Listens while its context lasts."""

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self.num_exports = 0
        self.received: Received
        self._port = port

    async def until(self, num_exports: int) -> None:
        """Return when it was sent so many."""
        async with asyncio.timeout(PATIENCE_S):
            while self.num_exports < num_exports:  # noqa: ASYNC110  # it happens in another thread
                await asyncio.sleep(0.01)

    def __enter__(self) -> Self:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/metrics"
                outer.received = Received(ExportMetricsServiceRequest.FromString(body))
                outer.num_exports += 1
                answer = ExportMetricsServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
