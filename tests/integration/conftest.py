"""A tiny model, runners that have it loaded, a mesh of real services around one, and a collector of their traces."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.executor.config import ExecutorConfig
from services.executor.model_runner import ModelRunner
from tests.integration.in_process import InProcessMesh, in_process_mesh, load_runner
from tests.integration.traces import Exports
from tests.shared.telemetry.collector import Collector, collecting
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights. Read only."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    """Few slots and little memory."""
    return load_runner(folder, ExecutorConfig(max_slots=4, threads=1, kv_cache_mb=16))


@pytest.fixture(scope="module")
def runners(folder: Path) -> list[ModelRunner]:
    """One for each of two executors."""
    return [load_runner(folder, ExecutorConfig(max_slots=16, threads=1, kv_cache_mb=32)) for _ in range(2)]


@pytest.fixture
async def mesh(folder: Path, runner: ModelRunner) -> AsyncIterator[InProcessMesh]:
    """One of each service, in this process."""
    async with in_process_mesh(folder, runner) as mesh:
        yield mesh


@pytest.fixture
def collector() -> Iterator[Collector]:
    """Takes what services export."""
    with collecting() as collector:
        yield collector


@pytest.fixture
def exports(collector: Collector) -> Exports:
    """Exporters to it, one for each service."""
    return Exports(collector)
