"""A transport of each kind, for what both promise."""

from collections.abc import AsyncIterator

import pytest

from shared.transport import Transport
from shared.transport.memory import MemoryBroker, MemoryTransport
from shared.transport.nats import NatsTransport
from tests.shared.transport.receiver import PATIENCE_S


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is there is never too slow to be connected to, however busy the machine is."""
    monkeypatch.setattr("shared.transport.nats._CONNECT_WITHIN_S", PATIENCE_S)


@pytest.fixture
def patience_with_jetstream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is there answers in time, however busy the machine is."""
    monkeypatch.setattr("shared.transport.jetstream._TIMEOUT_S", PATIENCE_S)


@pytest.fixture(params=["memory", "nats"])
async def transport(request: pytest.FixtureRequest) -> AsyncIterator[Transport]:
    """One that is connected: in memory, and to a real server."""
    if request.param == "memory":
        transport: Transport = MemoryTransport(MemoryBroker())
    else:
        request.getfixturevalue("patience_with_jetstream")
        transport = NatsTransport(request.getfixturevalue("nats_url"), name="test")
    await transport.connect()
    yield transport
    await transport.close()
