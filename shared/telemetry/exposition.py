"""A listener that answers GET for a few paths, one request a connection: for scrapers and probes inside the cluster.

For services that have no HTTP server of their own. Takes nothing but a request line and headers, within a size, a time
and a number of connections; whoever asks for anything else is refused, and nothing that a peer does reaches further
than its own connection.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

log = logging.getLogger(__name__)

_MAX_HEAD_BYTES: Final = 16 << 10
_MAX_CONNECTIONS: Final = 64
_PATIENCE_S: Final = 5.0
"""For a request to arrive, and for an answer to be taken."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a path answers."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


Route = Callable[[Mapping[str, str]], Awaitable[Answer]]
"""Answers a request, given its headers by their names in lower case."""


class Listener:
    """Answers GET and HEAD on the paths of `routes`."""

    def __init__(self, routes: Mapping[str, Route]) -> None:
        self.address = ""
        self._routes = routes
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one. Raises OSError if the address cannot be had."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_HEAD_BYTES)
        found = self._server.sockets[0].getsockname()
        self.address = f"http://{f'[{found[0]}]' if ':' in found[0] else found[0]}:{found[1]}"

    async def close(self) -> None:
        """Listen no more, and end every connection."""
        if self._server is not None:
            self._server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                if len(self._connections) <= _MAX_CONNECTIONS:
                    await self._answer(reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError):
            writer.transport.abort()  # the peer is gone, does not get on with it, or we leave
        finally:
            self._connections.discard(connection)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return  # nobody asks: a probe that only connects
        except asyncio.LimitOverrunError:
            head = b""
        method, answer = await self._react(head)
        lines = [
            f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.body)}",
            "Connection: close",
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + (b"" if method == "HEAD" else answer.body))
        await writer.drain()

    async def _react(self, head: bytes) -> tuple[str, Answer]:
        """The method and the answer to it."""
        first, *lines = head.decode("latin-1").split("\r\n")
        parts = first.split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            return "", _refusal(HTTPStatus.BAD_REQUEST)
        method, path = parts[0], parts[1].partition("?")[0]
        route = self._routes.get(path)
        if route is None:
            return method, _refusal(HTTPStatus.NOT_FOUND)
        if method not in ("GET", "HEAD"):
            return method, _refusal(HTTPStatus.METHOD_NOT_ALLOWED)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        try:
            return method, await route(headers)
        except Exception:
            log.exception("a bug failed a request", extra={"path": path})
            return method, _refusal(HTTPStatus.INTERNAL_SERVER_ERROR)


def _refusal(status: HTTPStatus) -> Answer:
    return Answer(f"{status.phrase}\n".encode(), status=status)
