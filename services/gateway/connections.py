"""Cuts off clients that do not read. Owns one clock a connection: since when its socket has taken nothing.

Handlers simply wait while a socket is full. What bounds that wait is this watch over all connections, whoever writes.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from shared.clock import Clock


class Connection(Protocol):
    """What the server knows of one client's connection."""

    @property
    def transport(self) -> asyncio.Transport | None:
        """The socket; None once it is closed."""
        ...


@dataclass(slots=True)
class _Watched:
    num_unsent: int
    since: float


class SlowReaderWatch:
    """Which connections have data to take and take none."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self.num_cut_off = 0
        self._clock = clock
        self._timeout_s = timeout_s
        self._watched: dict[Connection, _Watched] = {}
        self._closers: dict[Connection, Callable[[], None]] = {}

    def say_goodbye_with(self, connection: Connection, close: Callable[[], None]) -> None:
        """Have `close` called instead of cutting `connection` off at once."""
        self._closers[connection] = close

    def check(self, connections: Iterable[Connection]) -> None:
        """Look at all open connections, and cut off those that took nothing for too long."""
        now = self._clock.now()
        watched = {}
        for connection in connections:
            transport = connection.transport
            if transport is None or (num_unsent := transport.get_write_buffer_size()) == 0:
                continue
            before = self._watched.get(connection)
            if before is None or _has_taken(transport, before.num_unsent, num_unsent):
                watched[connection] = _Watched(num_unsent, now)
            elif now - before.since < self._timeout_s:
                watched[connection] = _Watched(num_unsent, before.since)
            else:
                self._cut_off(connection)
        self._watched = watched

    def forget(self, connection: Connection) -> None:
        """Drop the goodbye of a connection that has ended."""
        self._closers.pop(connection, None)

    def _cut_off(self, connection: Connection) -> None:
        self.num_cut_off += 1
        close = self._closers.pop(connection, None)
        if close is not None:
            close()
        elif connection.transport is not None:
            connection.transport.abort()


def _has_taken(transport: asyncio.Transport, num_before: int, num_now: int) -> bool:
    """Whether a socket took data between two looks. Nobody writes while it is full, so more means less in between."""
    _, full = transport.get_write_buffer_limits()
    return num_now < num_before or (num_now > num_before > full)
