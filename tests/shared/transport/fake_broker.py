"""A NATS server that can be made to misbehave. Speaks as much of the protocol as the transport's own tests need."""

import asyncio
import contextlib
import json
from enum import Enum, auto
from typing import Self

from tests.resets import reset


class Manner(Enum):
    """How it treats those who connect."""

    GOOD = auto()
    SILENT = auto()
    """Takes the connection and says nothing, as the kernel does for a process that is stopped."""
    INFO_ONLY = auto()
    """Introduces itself and then says nothing."""
    ONE_PONG = auto()
    """Completes the handshake and then says nothing."""
    HANGS_UP = auto()
    """Introduces itself and ends the connection."""
    BABBLES = auto()
    """Says what is no NATS."""


class FakeBroker:
    """Listens on a port of its own, the same whatever its manner. An async context manager."""

    def __init__(self, manner: Manner = Manner.GOOD) -> None:
        self.manner = manner
        """Of connections still to come; those that stand keep theirs."""
        self.num_connections = 0
        self.num_handshakes = 0
        """Connections whose client has said who it is."""
        self.answers_pings = True
        self.num_unanswered_pings = 0
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._changed = asyncio.Condition()
        self._all_gone = asyncio.Event()
        self._all_gone.set()

    @property
    def url(self) -> str:
        """Where clients connect."""
        assert self._server is not None
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.wait_for(self._all_gone.wait(), 20)

    async def until_connections(self, count: int) -> None:
        """Wait until so many connections were made, since it began."""
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: self.num_connections >= count)

    def cut(self) -> None:
        """Reset all connections."""
        for connection in list(self._connections):
            reset(connection.writer.transport)

    def say(self, line: str) -> None:
        """Send a line to everybody who is connected."""
        for connection in self._connections:
            connection.writer.write(f"{line}\r\n".encode())

    def freeze(self) -> None:
        """Read nothing more and answer nothing more, on any connection."""
        self.manner = Manner.SILENT
        for connection in self._connections:
            connection.writer.transport.pause_reading()  # type: ignore[attr-defined]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._changed:
            self.num_connections += 1
            self._changed.notify_all()
        connection = _Connection(self, reader, writer)
        self._connections.add(connection)
        self._all_gone.clear()
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await connection.serve(self.manner)
        finally:
            self._connections.discard(connection)
            writer.close()
            if not self._connections:
                self._all_gone.set()

    def deliver(self, subject: str, payload: bytes) -> None:
        """Pass a message to all who listen."""
        for connection in self._connections:
            connection.deliver(subject, payload)


class _Connection:
    """One client."""

    def __init__(self, broker: FakeBroker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._broker = broker
        self._reader = reader
        self._subjects: dict[str, str] = {}
        """By the client's number for its subscription."""

    async def serve(self, manner: Manner) -> None:
        """Talk until the client leaves."""
        if manner is Manner.BABBLES:
            self.writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        elif manner is not Manner.SILENT:
            info = {"server_id": "fake", "version": "2.11.0", "max_payload": 1 << 20, "headers": True, "proto": 1}
            self.writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        num_pongs = {Manner.GOOD: float("inf"), Manner.ONE_PONG: 1}.get(manner, 0)
        while line := await self._reader.readline():
            verb, *rest = line.decode().split()
            if verb == "CONNECT":
                self._broker.num_handshakes += 1
                if manner is Manner.HANGS_UP:
                    return
            elif verb == "PING" and not self._broker.answers_pings:
                self._broker.num_unanswered_pings += 1
            elif verb == "PING" and num_pongs > 0:
                num_pongs -= 1
                self.writer.write(b"PONG\r\n")
            elif verb == "SUB":
                self._subjects[rest[-1]] = rest[0]
            elif verb == "UNSUB":
                self._subjects.pop(rest[0], None)
            elif verb == "PUB":
                payload = (await self._reader.readexactly(int(rest[-1]) + 2))[:-2]
                self._broker.deliver(rest[0], payload)

    def deliver(self, subject: str, payload: bytes) -> None:
        """Pass a message to this client, if it listens."""
        for number, wanted in self._subjects.items():
            if wanted == subject:
                self.writer.write(f"MSG {subject} {number} {len(payload)}\r\n".encode() + payload + b"\r\n")
