"""A scheduler service on an in-memory broker, and a fleet without one."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from services.scheduler.config import SchedulerConfig
from tests.scheduler.harness import Mesh
from tests.scheduler.herd import Herd


@pytest.fixture
def max_payload(request: pytest.FixtureRequest) -> int:
    size: int = getattr(request, "param", 1 << 20)
    return size


@pytest.fixture
async def mesh(request: pytest.FixtureRequest, max_payload: int) -> AsyncIterator[Mesh]:
    mesh = Mesh(getattr(request, "param", SchedulerConfig()), max_payload)
    for peer in (mesh.executor, mesh.detokenizer, mesh.gateway):
        await peer.start()
    await mesh.transport.connect()
    async with mesh.service as service:
        running = asyncio.create_task(service.run())
        yield mesh
        service.drain(0)
        await running
    for peer in (mesh.executor, mesh.detokenizer, mesh.gateway):
        await peer.transport.close()
    await mesh.transport.close()


@pytest.fixture
def herd() -> Iterator[Herd]:
    """A fleet on fake executors; none yet."""
    herd = Herd()
    yield herd
    herd.fleet.check_invariants()
