"""One connection to one NATS server: made within a time, and ended without asking the server.

nats-py reconnects by itself, but a server that hangs can hold that up for ever: the old connection is closed only once
the server has taken what was written to it, and one attempt that failed late disturbs the next, which reads from the
same socket. So a client of nats-py lives here as long as one connection, and shares nothing with the next one.

Owns the beginning and the end of a connection. Which server is next, and what it has to be told, is the transport's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.errors import Error, FlushTimeoutError, StaleConnectionError, UnexpectedEOF

_GIVEN_UP_WITHIN_S = 0.5
"""What is cancelled gets so long to clean up."""
_MAX_UNFLUSHED_BYTES = 32 << 20
"""Whoever publishes more than the server takes waits, for no longer than a connection may take to be made."""
_PERMISSIONS = "permissions violation"
"""What the server says of one subject; everything else that it complains of ends the connection."""


class Refused(Error):
    """The server ended a connection because of something that was said on it."""


class Connection(Client):
    """A client of nats-py that never connects again. Made with `open`."""

    def __init__(self) -> None:
        """Not connected to anything."""
        super().__init__()
        self.lost = asyncio.Event()
        self.trouble: Exception | None = None
        """Why it was lost."""

    @classmethod
    async def open(
        cls,
        server: str,
        *,
        within_s: float,
        name: str,
        answers_under: str,
        ping_interval_s: float,
        on_error: Callable[[Exception], Awaitable[None]],
    ) -> Self:
        """Connect to a server. `on_error` hears of what goes wrong later and does not end the connection.

        Raises OSError, TimeoutError, ValueError or an error of nats-py.
        """
        connection = cls()

        async def report(error: Exception) -> None:
            if connection.is_connected:  # what goes wrong before is raised, what ends the connection is `trouble`
                await on_error(error)

        connecting = asyncio.create_task(
            connection.connect(
                [server],
                name=name,
                inbox_prefix=answers_under,
                allow_reconnect=False,
                connect_timeout=within_s,  # type: ignore[arg-type]  # passed to asyncio.wait_for; of each of its steps
                ping_interval=ping_interval_s,  # type: ignore[arg-type]  # passed to asyncio.sleep
                max_outstanding_pings=2,
                pending_size=_MAX_UNFLUSHED_BYTES,
                flush_timeout=within_s,
                error_cb=report,
            )
        )
        try:
            # In a task of its own: nats-py takes a cancellation for something else now and then, and goes on.
            await asyncio.wait({connecting}, timeout=within_s)
            if not connecting.done():
                raise TimeoutError(f"no answer within {within_s:g} s")
            await connecting
            if not connection.is_connected:
                raise UnexpectedEOF
        except BaseException:
            await _give_up(connecting)
            await connection.end()
            raise
        return connection

    async def settle(self, within_s: float) -> None:
        """Return when the server has handled all that it was sent. Raises an error of nats-py if it does not."""
        asking = asyncio.create_task(self.flush(timeout=within_s))  # type: ignore[arg-type]  # passed to asyncio.wait_for
        losing = asyncio.create_task(self.lost.wait())
        try:
            await asyncio.wait({asking, losing}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if self.trouble is not None:
                raise self.trouble
            if not asking.done():
                raise FlushTimeoutError
            await asking
        finally:
            await _give_up(asking, losing)

    async def end(self) -> None:
        """Leave at once. What the server has not taken is lost; call `settle` before where that matters."""
        if self._flush_queue is None:
            return  # it never began
        self._pending, self._pending_data_size = [], 0  # or closing would wait for the server to take it
        if isinstance(self._transport, TcpTransport) and (writer := self._transport._io_writer) is not None:
            writer.transport.abort()
        await self.close()

    @staticmethod
    def check(servers: Sequence[str]) -> None:
        """Raises an error of nats-py if these are not addresses of servers that go together."""
        Client()._setup_server_pool(list(servers))

    async def _select_next_server(self) -> None:
        """There is one, and it is tried once."""
        self._current_server = self._server_pool[0]
        await self._connect_to_server(self._current_server)

    async def _process_op_err(self, e: Exception) -> None:
        """All that ends a connection from outside comes here: its end, unanswered pings, what cannot be read."""
        if self.trouble is None:
            self._status = Client.DISCONNECTED
            self.trouble = e
            self.lost.set()

    async def _process_err(self, err_msg: str) -> None:
        """The server complains."""
        if _PERMISSIONS in err_msg.lower():
            await super()._process_err(err_msg)
        elif "stale connection" in err_msg.lower():
            await self._process_op_err(StaleConnectionError())
        else:
            await self._process_op_err(Refused(f"nats: {err_msg}"))


async def _give_up(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.add_done_callback(_forget)  # whenever it ends
        task.cancel()
    await asyncio.wait(tasks, timeout=_GIVEN_UP_WITHIN_S)


def _forget(task: asyncio.Task[Any]) -> None:
    """Ask for its exception, or asyncio complains that nobody has."""
    if not task.cancelled():
        task.exception()
