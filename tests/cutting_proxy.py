"""A network that breaks: passes connections on to a server, and resets each after some bytes of its answer."""

import asyncio
import contextlib
from collections.abc import Callable
from urllib.parse import urlsplit

from tests.resets import reset


class CuttingProxy:
    """Listens on a port of its own. An async context manager."""

    def __init__(self, target: str, draw_num_bytes: Callable[[], int | None] = lambda: None) -> None:
        """`target` is the server's address. `draw_num_bytes` says, for each connection, how many bytes of the server's
        it lives for; None: until somebody ends it."""
        url = urlsplit(target)
        self.num_connections = 0
        self.num_cuts = 0
        self._target = (url.hostname, url.port)
        self._draw_num_bytes = draw_num_bytes
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._goes_on = asyncio.Event()
        self._goes_on.set()

    @property
    def address(self) -> str:
        """Where clients connect."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    async def __aenter__(self) -> "CuttingProxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def freeze(self) -> None:
        """Pass nothing on any more, from now on and for ever, and keep every connection."""
        self._goes_on.clear()

    def cut(self) -> None:
        """End every connection with a reset, on both sides."""
        for writer in list(self._open):
            reset(writer.transport)

    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        num_bytes = self._draw_num_bytes()
        with contextlib.suppress(OSError):
            from_server, to_server = await asyncio.open_connection(*self._target)
            both = (to_client, to_server)
            self._open.update(both)
            try:
                await asyncio.gather(
                    self._pass(from_client, to_server, None), self._answer(from_server, to_client, num_bytes)
                )
            finally:
                self._open.difference_update(both)
                for writer in both:
                    if not writer.transport.is_closing():
                        reset(writer.transport)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_bytes: int | None) -> None:
        if await self._pass(reader, writer, num_bytes):
            self.num_cuts += 1
            raise ConnectionResetError

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_bytes: int | None) -> bool:
        """Pass bytes on until the end; True if `num_bytes` were passed before that."""
        while data := await reader.read(65_536):
            await self._goes_on.wait()
            writer.write(data if num_bytes is None else data[:num_bytes])
            await writer.drain()
            if num_bytes is not None and (num_bytes := num_bytes - len(data)) <= 0:
                return True
        writer.write_eof()
        return False
