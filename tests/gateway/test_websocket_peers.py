"""WebSocket peers that misbehave: each ends its own connection, and nothing more."""

import asyncio
import json
import os

import pytest
from aiohttp import WSMsgType

from tests.gateway.fake_mesh import PATIENCE_S
from tests.gateway.harness import CHAT, Harness, running_gateway
from tests.gateway.peers import Peer, connected, masked_frame, raw_socket
from tests.loop_time import let_pass

HEARTBEAT_S = 1000.0

# Peers that misbehave.


async def test_frame_of_the_wrong_kind_ends_the_connection(harness: Harness, peer: Peer) -> None:
    request = await peer.create(harness)
    if peer.is_binary:
        await peer.socket.send_str("{}")
    else:
        await peer.socket.send_bytes(b"{}")
    assert await peer.closed() == 1003
    await harness.until(lambda: harness.mesh.num_disconnects == 1)
    await harness.advance(31.0)
    assert await harness.fake.next_cancellation() == request.request_id


async def test_giant_frame_ends_its_connection_and_no_other() -> None:
    async with running_gateway(max_body_bytes=2000) as harness, connected(harness) as good, connected(harness) as bad:
        request = await good.create(harness)
        await bad.socket.send_str("x" * 5000)
        assert await bad.closed() == 1009
        await request.say("still here")
        assert (await good.receive())["text"] == "still here"


async def test_too_much_nonsense_ends_the_connection(harness: Harness) -> None:
    async with connected(harness) as peer:
        for _ in range(40):
            await peer.socket.send_str("nonsense")
        assert await peer.closed() == 1008


async def test_flood_that_is_not_read_stops_being_read_and_hurts_nobody(harness: Harness) -> None:
    async with raw_socket(harness) as (_, writer), connected(harness) as good:
        request = await good.create(harness)
        flooding = asyncio.create_task(_flood(writer, masked_frame(1, b'{"type":"ping"}') * 1000))
        await harness.until(lambda: max(harness.unsent()) > 1 << 16)
        for number in range(20):
            await request.say(str(number))
            assert (await good.receive())["text"] == str(number)
        most_unsent = max(harness.unsent())
        await harness.advance(29.0)
        assert max(harness.unsent()) == most_unsent, "what waits for it is bounded"
        await harness.advance(2.0)
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(flooding, PATIENCE_S)
        await harness.until(lambda: harness.gateway.server.num_connections == 1)
        await request.finish()
        assert (await good.receive())["type"] == "request.completed"


async def _flood(writer: asyncio.StreamWriter, data: bytes) -> None:
    while True:
        writer.write(data)
        await writer.drain()


async def test_half_open_peer_is_noticed_by_its_silence() -> None:
    async with running_gateway(heartbeat_s=HEARTBEAT_S) as harness, raw_socket(harness) as (reader, writer):
        writer.write(masked_frame(1, json.dumps({"type": "request.create", "id": "a", "body": CHAT}).encode()))
        request = await harness.fake.next_request()
        await request.accept()
        await let_a_ping_be_due(harness)
        assert harness.mesh.num_disconnects == 0
        let_pass(HEARTBEAT_S)  # and it has not answered
        await harness.until(lambda: harness.mesh.num_disconnects == 1)
        await asyncio.wait_for(reader.read(), PATIENCE_S)


async def test_peer_that_answers_pings_is_left_alone() -> None:
    async with running_gateway(heartbeat_s=HEARTBEAT_S) as harness, connected(harness, autoping=False) as peer:
        for _ in range(3):
            await let_a_ping_be_due(harness)
            assert (await peer.socket.receive(PATIENCE_S)).type is WSMsgType.PING
            await peer.socket.pong()
            await harness.settle()
            let_pass(0.75 * HEARTBEAT_S)  # longer than an answer may take
        await peer.send({"type": "ping"})
        assert await peer.receive() == {"type": "pong"}


async def let_a_ping_be_due(harness: Harness) -> None:
    """Let pass the time after which the gateway asks a peer that is silent, and let it ask."""
    let_pass(HEARTBEAT_S + 1.0)  # it rounds up to whole seconds
    await harness.settle()


@pytest.mark.parametrize(
    "data",
    [
        os.urandom(2000),
        b"\xff" * 100,
        b"\x81\xfe",
        b"\xf1\x80\x00\x00\x00\x00",
        b"\x81\x03abc",
    ],
)
async def test_garbage_ends_its_connection_and_no_other(harness: Harness, data: bytes) -> None:
    async with connected(harness) as good, raw_socket(harness) as (reader, writer):
        request = await good.create(harness)
        writer.write(data)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), PATIENCE_S)
        await harness.until(lambda: harness.gateway.server.num_connections == 1)
        await request.say("still here")
        assert (await good.receive())["text"] == "still here"


async def test_slow_reader_gets_longer_deltas_then_a_close_with_a_reason(harness: Harness) -> None:
    async with raw_socket(harness) as (reader, writer), connected(harness) as good:
        writer.write(masked_frame(1, json.dumps({"type": "request.create", "id": "a", "body": CHAT}).encode()))
        request = await harness.fake.next_request()
        await request.accept()
        other = await good.create(harness)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        while max(harness.unsent()) < 1 << 16:
            await request.say("x" * 10_000)
            await harness.settle()
        for _ in range(10):
            await request.say("x" * 10_000)
        await other.say("quick")
        assert (await good.receive())["text"] == "quick"
        await harness.advance(31.0)
        await harness.until(lambda: harness.mesh.num_disconnects == 1)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        received = await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert received.endswith(b"\x03\xf0the client reads too slowly")
