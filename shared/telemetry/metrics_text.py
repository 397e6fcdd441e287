"""Metrics in Prometheus's text formats. Owns the names there; needs the extra `telemetry`."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from shared.telemetry.metrics import Family, Histogram, HistogramPoint, Kind, Snapshot

_SUFFIXES: Final = {"s": "seconds", "By": "bytes"}
"""Of the names, for the units that have one."""


def render(snapshot: Snapshot, resource: Mapping[str, str], accept: str = "") -> tuple[bytes, str]:
    """A page and its content type: the one that `accept`, an HTTP header, likes best. `resource` says whose it is."""
    encode, content_type = choose_encoder(accept)
    registry = CollectorRegistry()
    registry.register(_Page(snapshot, resource))
    return encode(registry), content_type


def text_name(name: str) -> str:
    """The name of a metric or a label as Prometheus writes it, less the suffix for a unit."""
    return name.replace(".", "_")


class _Page(Collector):
    def __init__(self, snapshot: Snapshot, resource: Mapping[str, str]) -> None:
        self._snapshot = snapshot
        self._resource = {text_name(name): value for name, value in resource.items()}

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that a registry does not collect only to learn the names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Every family once."""
        yield InfoMetricFamily("target", "Whose metrics these are", value=self._resource)
        for family in self._snapshot:
            yield metric_of(family)


def metric_of(family: Family) -> Metric:
    """A family as Prometheus knows it, with its name and the numbers that it has."""
    instrument = family.instrument
    name, unit = text_name(instrument.name), _SUFFIXES.get(instrument.unit, "")
    labels = [text_name(label) for label in instrument.labels]
    if isinstance(instrument, Histogram):
        histogram = HistogramMetricFamily(name, instrument.help, labels=labels, unit=unit)
        bounds = [*map(str, map(float, instrument.bounds)), "+Inf"]
        for values, point in family.points.items():
            assert isinstance(point, HistogramPoint)
            buckets = list(zip(bounds, accumulate(point.counts), strict=True))
            histogram.add_metric(values, buckets, point.total)
        return histogram
    kind = CounterMetricFamily if instrument.kind is Kind.COUNTER else GaugeMetricFamily
    metric = kind(name, instrument.help, labels=labels, unit=unit)
    for values, number in family.points.items():
        assert not isinstance(number, HistogramPoint)
        metric.add_metric(values, number)
    return metric
