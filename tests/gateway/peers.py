"""Clients on WebSockets: one that speaks the protocol, and one whose bytes are the test's own."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgpack
from aiohttp import WSMsgType

from tests.gateway.fake_mesh import PATIENCE_S, FakeRequest
from tests.gateway.harness import CHAT, Harness
from tests.resets import reset

PATH = "/v1/stream"


class Peer:
    """A client on a WebSocket that speaks one of the two encodings."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.is_binary = socket.protocol == "shoal.v1.msgpack"

    async def send(self, message: Any) -> None:
        if self.is_binary:
            await self.socket.send_bytes(msgpack.packb(message))
        else:
            await self.socket.send_str(json.dumps(message))

    async def receive(self) -> Any:
        frame = await self.socket.receive(PATIENCE_S)
        assert frame.type is (WSMsgType.BINARY if self.is_binary else WSMsgType.TEXT), frame
        return msgpack.unpackb(frame.data) if self.is_binary else json.loads(frame.data)

    async def create(self, harness: Harness, name: str = "a", body: Any = CHAT, **fields: Any) -> FakeRequest:
        """Start a request and take its acceptance."""
        await self.send({"type": "request.create", "id": name, "body": body} | fields)
        request = await harness.fake.next_request()
        await request.accept()
        assert await self.receive() == {"type": "request.accepted", "id": name, "request_id": request.request_id}
        return request

    def vanish(self) -> None:
        """End the connection with a reset."""
        assert self.socket._response.connection is not None
        reset(self.socket._response.connection.transport)

    async def closed(self) -> int | None:
        """Wait for the gateway's close, and its code."""
        while True:
            frame = await self.socket.receive(PATIENCE_S)
            if frame.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR):
                return self.socket.close_code


@contextlib.asynccontextmanager
async def connected(harness: Harness, *protocols: str, **options: Any) -> AsyncIterator[Peer]:
    async with harness.http.ws_connect(harness.url + PATH, protocols=protocols, **options) as connection:
        yield Peer(connection)


def masked_frame(opcode: int, payload: bytes) -> bytes:
    """A client's frame, masked with zeros."""
    assert len(payload) < 1 << 16
    length = bytes([0x80 | len(payload)]) if len(payload) < 126 else b"\xfe" + len(payload).to_bytes(2, "big")
    return bytes([0x80 | opcode]) + length + b"\x00" * 4 + payload


@contextlib.asynccontextmanager
async def raw_socket(harness: Harness) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A WebSocket whose frames are the test's own, with a small receive buffer."""
    host, port = harness.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 16)
    writer.write(
        b"GET /v1/stream HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    assert b" 101 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
