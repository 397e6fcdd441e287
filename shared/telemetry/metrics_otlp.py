"""Metrics in OpenTelemetry's terms, sent over OTLP/HTTP. Needs the extra `telemetry`.

Owns the translation and one exporter, which reads its endpoint, headers and time limit from OpenTelemetry's own
variables. Sending blocks: do it in a thread. Numbers are cumulative since the start of the process; a backend that
wants differences gets them from a Collector.
"""

import logging
import os
from collections.abc import Iterator, Mapping

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from shared.telemetry.metrics import Family, Histogram, HistogramPoint, Kind, Labels, Snapshot

log = logging.getLogger(__name__)

_CUMULATIVE = sdk.AggregationTemporality.CUMULATIVE
_SCOPE = InstrumentationScope("shoal")
_DEFAULT_TIME_LIMIT_S = 10.0


class OtlpExporter:
    """Sends snapshots to one endpoint."""

    def __init__(self, resource: Mapping[str, str], started_ns: int) -> None:
        """`resource` says whose metrics they are; `started_ns` since when they count, in Unix time."""
        self._resource = Resource(dict(resource))
        self._started_ns = started_ns
        self._words = _LastWords()
        self._exporter = OTLPMetricExporter(timeout=time_limit_s(os.environ))

    def export(self, snapshot: Snapshot, now_ns: int) -> str | None:
        """Send a snapshot of the moment `now_ns`. Blocks until it has arrived, or is given up: then tells why."""
        metrics = list(_metrics(snapshot, self._started_ns, now_ns))
        data = sdk.MetricsData([sdk.ResourceMetrics(self._resource, [sdk.ScopeMetrics(_SCOPE, metrics, "")], "")])
        if self._exporter.export(data) is sdk.MetricExportResult.SUCCESS:
            return None
        return self._words.take()

    def close(self) -> None:
        """Send nothing more; what is being sent is given up."""
        self._exporter.shutdown()


def time_limit_s(environ: Mapping[str, str]) -> float:
    """How long sending may take. The library takes for seconds what its specification, and so our traces, take for
    milliseconds."""
    for name in ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"):
        if text := environ.get(name, "").strip():
            try:
                limit_ms = float(text)
            except ValueError:
                limit_ms = 0.0
            if 0 < limit_ms < float("inf"):
                return limit_ms / 1000
            log.warning("a time limit is no positive number", extra={name: text})
    return _DEFAULT_TIME_LIMIT_S


class _LastWords(logging.Handler):
    """Keeps what the exporter would log: it would say the same again and again."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""
        logger = logging.getLogger(OTLPMetricExporter.__module__)
        logger.handlers[:] = [self]
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self._text = record.getMessage()

    def take(self) -> str:
        text, self._text = self._text, ""
        return text


def _metrics(snapshot: Snapshot, started_ns: int, now_ns: int) -> Iterator[sdk.Metric]:
    for family in snapshot:
        instrument = family.instrument
        data = _data(family, started_ns, now_ns)
        yield sdk.Metric(instrument.name, instrument.help, instrument.unit, data)


def _data(family: Family, started_ns: int, now_ns: int) -> sdk.DataT:
    instrument = family.instrument
    if isinstance(instrument, Histogram):
        return sdk.Histogram(
            [
                sdk.HistogramDataPoint(
                    attributes=_attributes(instrument.labels, labels),
                    start_time_unix_nano=started_ns,
                    time_unix_nano=now_ns,
                    count=point.count,
                    sum=point.total,
                    bucket_counts=point.counts,
                    explicit_bounds=instrument.bounds,
                    min=point.lowest,
                    max=point.highest,
                )
                for labels, point in family.points.items()
                if isinstance(point, HistogramPoint)
            ],
            _CUMULATIVE,
        )
    points = [
        sdk.NumberDataPoint(_attributes(instrument.labels, labels), started_ns, now_ns, number)
        for labels, number in family.points.items()
        if not isinstance(number, HistogramPoint)
    ]
    if instrument.kind is Kind.GAUGE:
        return sdk.Gauge(points)
    return sdk.Sum(points, _CUMULATIVE, is_monotonic=instrument.kind is Kind.COUNTER)


def _attributes(names: Labels, values: Labels) -> dict[str, str]:
    """A label that is empty is none."""
    return {name: value for name, value in zip(names, values, strict=True) if value}
