"""A transport of each kind, for what both promise."""

from collections.abc import AsyncIterator

import pytest

from shared.transport import Transport
from shared.transport.memory import MemoryBroker, MemoryTransport
from shared.transport.nats import NatsTransport


@pytest.fixture(params=["memory", "nats"])
async def transport(request: pytest.FixtureRequest) -> AsyncIterator[Transport]:
    """One that is connected: in memory, and to a real server."""
    if request.param == "memory":
        transport: Transport = MemoryTransport(MemoryBroker())
    else:
        transport = NatsTransport(request.getfixturevalue("nats_url"), name="test")
    await transport.connect()
    yield transport
    await transport.close()
