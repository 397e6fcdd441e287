"""Reads metrics as Prometheus does: a page, parsed."""

import asyncio
import urllib.request
from collections.abc import Mapping

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from shared.telemetry.metrics import MetricsPage


class Page:
    """The metrics of one process at one moment."""

    def __init__(self, text: str) -> None:
        self.families: dict[str, Metric] = {family.name: family for family in text_string_to_metric_families(text)}
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        """The number with exactly these labels. Raises KeyError if there is none."""
        return self._samples[name, frozenset(labels.items())]

    def total(self, name: str, **labels: str) -> float:
        """The sum of all numbers of this name that have these labels, and perhaps others."""
        wanted = labels.items()
        return sum(value for (each, having), value in self._samples.items() if each == name and wanted <= having)

    def by(self, name: str, label: str) -> Mapping[str, float]:
        """The sums of all numbers of this name for each value of a label; without those that are 0."""
        sums: dict[str, float] = {}
        for (each, having), value in self._samples.items():
            if each == name and value:
                key = dict(having).get(label, "")
                sums[key] = sums.get(key, 0) + value
        return sums


async def fetch(url: str) -> tuple[int, str]:
    """The status and the body of a page."""
    return await asyncio.to_thread(_fetch, url)


async def scrape(address: str) -> Page:
    """The metrics that are shown at an address."""
    status, text = await fetch(f"{address}/metrics")
    assert status == 200, text
    return Page(text)


async def read(shown: MetricsPage | None) -> Page:
    """The metrics of this moment, without a port."""
    assert shown is not None
    body, _ = await shown.render()
    return Page(body.decode())


def _fetch(url: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
