"""docs/metrics.md says what there is: every metric of every service, its type, its labels and its buckets."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.executor.model_runner import ModelRunner
from shared.ids import Service
from shared.telemetry.metrics import Family, Histogram, Instrument, Kind
from shared.telemetry.metrics_process import LoopLag, actor_instruments, process_instruments
from shared.telemetry.metrics_text import metric_of, text_name
from tests.integration.in_process import InProcessMesh, in_process_mesh

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
OF_REQUESTS = {"gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"}
"""What the document calls `the three`."""


@pytest.fixture
async def instruments(folder: Path, runner: ModelRunner) -> AsyncIterator[list[Instrument]]:
    """Those of all services together."""
    async with in_process_mesh(folder, runner) as mesh:
        yield all_instruments(mesh)


def all_instruments(mesh: InProcessMesh) -> list[Instrument]:
    own = [instrument for actor in mesh.actors for instrument in actor.instruments()]
    of_all = [*actor_instruments(mesh.gateway), LoopLag().histogram, *process_instruments(0.0)]
    return [*own, *of_all, *mesh.tracings[Service.GATEWAY].instruments()]


def rows(num_cells: int) -> list[list[str]]:
    """The rows of all tables with so many columns, without their headings."""
    lines = [line.strip("|").split("|") for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line] for line in lines if len(line) == num_cells]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def kind_of(instrument: Instrument) -> str:
    if isinstance(instrument, Histogram):
        return "histogram"
    return "counter" if instrument.kind is Kind.COUNTER else "gauge"


async def test_every_metric_is_documented_with_name_type_and_labels(instruments: list[Instrument]) -> None:
    expected = {}
    for instrument in instruments:
        shown = metric_of(Family(instrument, {})).name + "_total" * (kind_of(instrument) == "counter")
        expected[instrument.name] = shown, kind_of(instrument), set(map(text_name, instrument.labels))
    documented = {}
    for name, shown, kind, labels, _ in rows(5):
        three = OF_REQUESTS if labels.startswith("the three") else set()
        documented[quoted(name)[0]] = quoted(shown)[0], kind, three | set(quoted(labels))
    assert documented == expected


async def test_no_metric_has_two_meanings(instruments: list[Instrument]) -> None:
    names = [instrument.name for instrument in instruments]
    assert sorted(names) == sorted(set(names))
    assert all(instrument.help and not instrument.help.endswith(".") for instrument in instruments)


async def test_buckets_are_those_that_are_documented(instruments: list[Instrument]) -> None:
    documented = {}
    for names, bounds in rows(2):
        for name in quoted(names):
            if name.startswith(("gen_ai.", "http.", "shoal.")):
                documented[name] = [float(bound) for bound in re.findall(r"[\d.]+", bounds)]
    assert documented == {each.name: list(each.bounds) for each in instruments if isinstance(each, Histogram)}
