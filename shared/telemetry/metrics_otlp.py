"""Metrics in OpenTelemetry's terms, sent over OTLP/HTTP. Needs the extra `telemetry`.

Owns the translation and one exporter, which is told where to send and how, but for certificates: these it finds in
OpenTelemetry's own variables. (It would also take `OTEL_EXPORTER_OTLP_TIMEOUT`, but for seconds.) Sending blocks: do it
in a thread. Numbers are cumulative since the start of the process; a backend that wants differences gets them from a
Collector.
"""

import logging
from collections.abc import Iterator, Mapping

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from shared.telemetry.metrics import Family, Histogram, HistogramPoint, Kind, Labels, Snapshot
from shared.telemetry.otlp_settings import OtlpSettings

_CUMULATIVE = sdk.AggregationTemporality.CUMULATIVE
_SCOPE = InstrumentationScope("shoal")


class OtlpExporter:
    """Sends snapshots to one endpoint."""

    def __init__(self, settings: OtlpSettings, resource: Mapping[str, str], started_ns: int) -> None:
        """`resource` says whose metrics they are; `started_ns` since when they count, in Unix time."""
        self._resource = Resource(dict(resource))
        self._started_ns = started_ns
        self._words = _LastWords()
        self._exporter = OTLPMetricExporter(
            settings.endpoint,
            headers=settings.headers,
            timeout=settings.timeout_s,
            compression=Compression.Gzip if settings.has_gzip else Compression.NoCompression,
        )

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
