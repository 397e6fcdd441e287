"""A cluster of NATS servers loses one in the middle of streams: nothing is lost, and the mesh serves again at once."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import pytest

from services.executor.model_runner import ModelRunner
from shared import subjects
from shared.codec import Decoder
from shared.errors import BucketUnavailable, LedgerUnavailable
from shared.ids import Service
from shared.messages import USAGE_LEDGER, Outcome, UsageRecord
from shared.transport.nats import NatsTransport
from tests.integration.cast import Cast, Streamed, cast
from tests.integration.disturbed import check_same, undisturbed, until_begun
from tests.nats_cluster import NatsCluster, Node
from tests.standstills import Standstills

Kept = TypeVar("Kept")
Choose = Callable[[NatsCluster], Awaitable[Node]]

READY_WITHIN_S: Final = 5.0
RECORDED_WITHIN_S: Final = 30.0
"""A stream of JetStream that has lost its leader takes some seconds to find another one, and more on a busy machine."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    cluster = NatsCluster(tmp_path)
    cluster.start()
    yield cluster
    cluster.stop()


async def busiest(cluster: NatsCluster) -> Node:
    """The server that most are connected to."""
    node = max(cluster.nodes, key=lambda node: node.num_clients())
    assert node.num_clients() >= 3
    return node


async def leader(cluster: NatsCluster) -> Node:
    """The server that the others of the usage records follow."""
    return await asyncio.to_thread(cluster.leader_of, USAGE_LEDGER)


async def until_ready(mesh: Cast, number: int) -> float:
    """The seconds until a gateway says that it can serve."""
    began = time.monotonic()
    await mesh.until_ready(number)
    return time.monotonic() - began


@pytest.fixture
async def reader(cluster: NatsCluster) -> AsyncIterator[NatsTransport]:
    """Somebody who looks at what the cluster keeps."""
    transport = NatsTransport(cluster.url, name="reader")
    await transport.connect()
    yield transport
    await transport.close()


async def records(reader: NatsTransport, num_wanted: int) -> list[UsageRecord]:
    """The usage records, when there are enough of them, or time is over."""
    decoder: Decoder[UsageRecord] = Decoder(UsageRecord)
    found: list[UsageRecord] = []
    deadline = time.monotonic() + RECORDED_WITHIN_S
    while len(found) < num_wanted and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        with contextlib.suppress(LedgerUnavailable):
            entries = reader.ledger(USAGE_LEDGER, subjects.USAGE).entries()
            found = [decoder.decode(payload) async for payload in entries]
    return found


async def patiently(act: Callable[[], Awaitable[Kept]]) -> Kept:
    """What `act` gives as soon as the cluster can: it has no leader at first, and again after it has lost one."""
    deadline = time.monotonic() + RECORDED_WITHIN_S
    while True:
        try:
            return await act()
        except BucketUnavailable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("choose", [busiest, leader])
async def test_a_server_of_the_cluster_that_is_killed_costs_nobody_anything(
    folder: Path, runners: list[ModelRunner], cluster: NatsCluster, reader: NatsTransport, choose: Choose
) -> None:
    ready_s: list[float] = []

    async def disturb(streamed: list[Streamed]) -> None:
        await until_begun(streamed, 300)
        victim = await choose(cluster)
        victim.kill()
        ready_s.extend(await asyncio.gather(*(until_ready(mesh, number) for number in range(2))))

    async with cast(folder, runners, lambda name: NatsTransport(cluster.url, name=name)) as mesh:
        bodies, expected = await undisturbed(mesh)
        check_same(bodies[:1], await mesh.stream_all(bodies[:1]), expected[:1])
        assert await records(reader, num_requests(mesh)), "there is no stream of JetStream to lose yet"
        await patiently(lambda: reader.bucket("kept").put("key", b"value"))
        async with Standstills() as standstills:
            streamed = await mesh.stream_all(bodies, disturb)
        check_same(bodies, streamed, expected)
        assert max(ready_s) < READY_WITHIN_S + standstills.total_s
        new = await mesh.stream_all(bodies[:1])
        check_same(bodies[:1], new, expected[:1])
        await mesh.until_nothing_is_left()
        check_records(await records(reader, num_requests(mesh)), num_requests(mesh))
        assert await patiently(lambda: reader.bucket("kept").entries()) == {"key": b"value"}


def num_requests(mesh: Cast) -> int:
    """Requests that clients have made, as the gateways count them."""
    return sum(one.status.num_requests for one in mesh.of(Service.GATEWAY))


def check_records(written: Sequence[UsageRecord], num_requests: int) -> None:
    """Every request was recorded once, with how it ended."""
    assert len({record.request_id for record in written}) == len(written) == num_requests
    assert {record.outcome for record in written} == {Outcome.COMPLETED}
    assert all(sum(record.usage.num_output_tokens) for record in written)
