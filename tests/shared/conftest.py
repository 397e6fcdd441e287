"""An actor on a broker in memory, for the tests of all that every service has."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from shared import subjects
from shared.transport.memory import MemoryBroker
from tests.shared.acting import World


@pytest.fixture
async def world(memory_broker: MemoryBroker) -> AsyncIterator[World]:
    """An actor that has not started, and somebody who hears its beats."""
    world = World(memory_broker)
    async with AsyncExitStack() as stack:
        for transport in (world.transport, world.other):
            await transport.connect()
            stack.push_async_callback(transport.close)
        await world.other.subscribe(subjects.PRESENCE, world.beats)
        yield world
