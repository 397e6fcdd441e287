"""A gateway with default settings for the tests that need no others."""

from collections.abc import AsyncIterator

import pytest

from tests.gateway.harness import Harness, running_gateway
from tests.gateway.peers import Peer, connected


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    """A running gateway and a fake mesh that serves one model."""
    async with running_gateway() as harness:
        yield harness


@pytest.fixture(params=["shoal.v1.json", "shoal.v1.msgpack"])
async def peer(request: pytest.FixtureRequest, harness: Harness) -> AsyncIterator[Peer]:
    """A peer of each encoding."""
    async with connected(harness, request.param) as peer:
        assert peer.socket.protocol == request.param
        yield peer
