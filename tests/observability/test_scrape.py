"""What queries ask for, in the text that real services show: the five of them in one process, after some requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.samples import Sample

from services.executor.config import ExecutorConfig
from shared.ids import Service
from shared.telemetry.metering import Metering, MetricsSettings, metering
from tests.integration.in_process import MODEL, InProcessMesh, in_process_mesh, load_runner
from tests.observability.metrics_table import promised
from tests.observability.queries import all_queries, asked_for
from tests.shared.telemetry.scrape import Page
from tests.tiny_models import make_tiny_model

_ONLY_IF_IT_HAPPENS: Final = {
    "shoal_gateway_resumptions_total",
    "shoal_scheduler_executors_lost_total",
    "shoal_scheduler_replays_total",
}
"""Counters whose labels say what went wrong: no series before it did. That they exist, tests of their services show."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture
async def pages(folder: Path) -> AsyncIterator[list[Page]]:
    """What Prometheus would read of each service."""
    runner = load_runner(folder, ExecutorConfig(max_slots=4, threads=1, kv_cache_mb=16))
    async with in_process_mesh(folder, runner) as mesh, AsyncExitStack() as stack:
        shown = []
        for actor in mesh.actors:
            tracing = mesh.tracings[actor.identity.service]
            shown.append(await stack.enter_async_context(metering(actor, MetricsSettings(), tracing.instruments())))
        await _some_requests(mesh)
        yield [await _page(each) for each in shown]


async def _page(shown: Metering) -> Page:
    """The page of a service, once its event loop's lag has been measured, a quarter of a second after its start."""
    assert shown.page is not None
    async with asyncio.timeout(20):
        while True:
            page = Page((await shown.page.render())[0].decode())
            if any(sample.name == "shoal_loop_lag_seconds_count" for sample in _samples([page])):
                return page


async def _some_requests(mesh: InProcessMesh) -> None:
    prompt = [5 + number % 300 for number in range(200)]
    for _ in range(2):
        await mesh.complete(prompt=prompt, max_tokens=20, temperature=0)
    await mesh.stream_all([{"prompt": "Hello", "max_tokens": 20, "ignore_eos": True}] * 3)
    body: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": -1}
    async with mesh.session.post(f"{mesh.url}/v1/completions", json=body) as answer:
        assert answer.status == 400
    async with mesh.session.post(f"{mesh.url}/tokenize", json={"model": MODEL, "prompt": "Hello"}) as answer:
        assert answer.status == 200
    await mesh.until_idle()


async def test_every_series_that_a_query_asks_for_is_shown(pages: list[Page]) -> None:
    assert len(pages) == len(Service)
    shown = {sample.name for sample in _samples(pages)}
    asked = {name for query in all_queries() for name in asked_for(query)}
    assert asked - shown == _ONLY_IF_IT_HAPPENS


async def test_every_series_has_the_labels_that_are_promised(pages: list[Page]) -> None:
    known = promised()
    for sample in _samples(pages):
        if sample.name in known:
            assert set(sample.labels) - {"le"} == known[sample.name].labels, sample.name


def _samples(pages: list[Page]) -> list[Sample]:
    return [sample for page in pages for family in page.families.values() for sample in family.samples]
