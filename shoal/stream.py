"""One request as a stream: connects, begins, and after every loss goes on where it was, until the end or for good.

Owns the decision what a loss means. Does not own what was received (`received`), which gateway comes next and how long
to wait (`gateways`), nor sockets (`connection`).
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from shoal.connection import Connection, ConnectionLost
from shoal.errors import (
    Disconnected,
    NotAShoalGateway,
    NotFound,
    Overloaded,
    RequestCancelled,
    RequestError,
    RequestLost,
    TooLarge,
    Unavailable,
    error_of,
)
from shoal.gateways import Gateways
from shoal.received import Gap, Received
from shoal.results import Delta, Result, usage_of

NAME: Final = "stream"
"""The request's name on its connection, which it has for itself."""
_TRIES_TO_SEND: Final = 3
"""Who sends too much finds the connection broken, for a gateway does not read on: like one that has died."""
_TRIES_TO_FIND: Final = 3
"""A mesh in which something has just died may need a moment to find a request again."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a stream tries."""

    seconds: float
    """In all, from losing its gateway to having one again."""
    num_retries: int
    """After the mesh refused to begin for lack of room or of a service."""


class Stream:
    """One request. Iterate over it once, for its deltas; afterwards `result` is the whole.

    Leaving the iteration before its end cancels the request; where that has to happen at a certain moment, use the
    stream as an async context manager. Iterating raises RequestError if the request is refused or fails, Disconnected
    if no gateway can be reached, and NotAShoalGateway.
    """

    def __init__(
        self,
        connect: Callable[[str], Awaitable[Connection]],
        gateways: Gateways,
        patience: Patience,
        *,
        create: dict[str, Any] | None = None,
        request_id: str | None = None,
        received: Received | None = None,
    ) -> None:
        """Begin with the message `create`, or go on with `request_id` after what was `received`."""
        self.request_id = request_id
        """What the request is resumed by, from its acceptance on."""
        self.result: Result | None = None
        """The whole, after the last delta."""
        self._connect = connect
        self._gateways = gateways
        self._patience = patience
        self._create = create
        self._received = received or Received()
        self._state = _Attempts()
        self._connection: Connection | None = None
        self._has_begun = False
        self._is_stopping = False
        self._cancelled = asyncio.Event()

    async def __aiter__(self) -> AsyncGenerator[Delta, None]:
        """The deltas, each once, whatever happens to connections on the way."""
        if self._has_begun:
            raise RuntimeError("A stream can be iterated over only once.")
        self._has_begun = True
        try:
            while self.result is None and not self._cancelled.is_set():
                try:
                    connection = self._connection or await self._begin()
                    delta = self._take(await connection.receive())
                except ConnectionLost as loss:
                    await self._lose(loss)
                    continue
                if delta is not None:
                    yield delta
        finally:
            await self._hang_up()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cancel()

    async def cancel(self) -> None:
        """Stop the request, unless it has ended. An iteration in progress ends, without a result."""
        self._cancelled.set()
        await self._hang_up()

    async def stop(self) -> None:
        """Have the mesh stop the request. The iteration goes on with what it had produced by then, and ends by raising
        RequestCancelled, which tells what was consumed; or as after `cancel` if the connection is lost meanwhile."""
        self._is_stopping = True
        if self._connection is None:
            return await self.cancel()
        try:
            await self._connection.send({"type": "request.cancel", "id": NAME})
        except ConnectionLost:
            await self.cancel()

    async def _begin(self) -> Connection:
        """A connection on which the request was just created or resumed. Raises ConnectionLost, or for good."""
        await self._pause(max(self._gateways.wait_s(self._state.num_losses), self._state.wait_s))
        address = self._gateways.preferred
        try:
            self._connection = connection = await self._connect(address)
        except (ConnectionLost, Unavailable, Overloaded) as error:
            self._gateways.avoid(address)
            raise ConnectionLost(f"{address}: {error}") from error
        if self._cancelled.is_set():
            raise ConnectionLost("nobody wants it any more")
        self._state.begin()
        try:
            await connection.send(self._first_message())
        except ConnectionLost as error:
            self._state.num_unsent += self.request_id is None  # a request to resume is never too large
            if self._state.num_unsent >= _TRIES_TO_SEND:
                raise TooLarge("No gateway reads the request to its end: it may be larger than they take.") from error
            raise
        return connection

    async def _pause(self, seconds: float) -> None:
        """Wait. Raises ConnectionLost at once if nobody wants the request any more."""
        try:
            await asyncio.wait_for(self._cancelled.wait(), seconds)
        except TimeoutError:
            return
        raise ConnectionLost("nobody wants it any more")

    def _first_message(self) -> dict[str, Any]:
        if self.request_id is None:
            assert self._create is not None
            return self._create
        offsets, token_offsets = self._received.offsets()
        return {
            "type": "request.resume",
            "id": NAME,
            "request_id": self.request_id,
            "offset": offsets,
            "token_offset": token_offsets,
        }

    async def _lose(self, loss: ConnectionLost) -> None:
        """Give the connection up. Raises Disconnected if that has gone on for too long."""
        if self._connection is not None:
            self._gateways.avoid(self._connection.address)
        await self._hang_up()
        if self._is_stopping:
            self._cancelled.set()
        if self._cancelled.is_set():
            return
        if self._state.lose(loss.wait_s) > self._patience.seconds:
            raise Disconnected(f"No gateway could be reached for {self._patience.seconds:g} s: {loss}.") from loss

    async def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def _take(self, event: dict[str, Any]) -> Delta | None:
        """React to one event; the delta that it gives. Raises ConnectionLost to try again, or what ends the stream."""
        try:
            return self._react(event)
        except (KeyError, TypeError, Gap) as error:
            raise NotAShoalGateway(f"The gateway sent a {event['type']!r} that makes no sense.") from error

    def _react(self, event: dict[str, Any]) -> Delta | None:
        match event["type"]:
            case "request.accepted":
                self.request_id = event["request_id"]
                self._state.accept()
            case "request.delta":
                self._state.progress()
                return self._received.take(event)
            case "request.completed":
                self.result = self._received.result(event)
            case "request.cancelled":
                usage = usage_of(event["usage"]) if event.get("usage") else None
                raise RequestCancelled("The request was cancelled.", request_id=self.request_id, usage=usage)
            case "request.failed" | "error":
                self._fail(error_of(event))
            case "going_away" if self._connection is not None:
                self._gateways.avoid(self._connection.address)  # new streams begin elsewhere; this one may finish here
        return None

    def _fail(self, error: RequestError) -> None:
        """Raises `error`, or ConnectionLost if another try may do better."""
        if self._state.is_accepted:
            raise error
        is_for_now = isinstance(error, Unavailable | Overloaded)
        if self.request_id is None:
            self._state.num_refusals += 1
            if is_for_now and self._state.num_refusals <= self._patience.num_retries:
                raise ConnectionLost(error.message, wait_s=error.retry_after_s or 0.0) from error
            raise error
        if is_for_now:
            raise ConnectionLost(error.message) from error
        if isinstance(error, NotFound):
            self._not_found(error)
        raise error

    def _not_found(self, error: RequestError) -> None:
        """There is nothing to resume: begin anew if nobody saw any of it, else look again, and in the end give up."""
        if self._create is not None and self._received.is_empty:
            self.request_id = None
        else:
            self._state.num_not_found += 1
            if self._state.num_not_found >= _TRIES_TO_FIND:
                raise RequestLost(error.message, code=error.code, request_id=self.request_id) from error
        raise ConnectionLost(error.message) from error


class _Attempts:
    """How often and since when a stream has been without success."""

    def __init__(self) -> None:
        self.is_accepted = False
        """Whether the gateway at the other end has said that it has the request."""
        self.wait_s = 0.0
        """What the last refusal asked for."""
        self.num_losses = 0
        """Since the last text."""
        self.num_unsent = 0
        """First messages on whose way the connection broke, in a row."""
        self.num_refusals = 0
        self.num_not_found = 0
        self._lost_at: float | None = None

    def begin(self) -> None:
        self.is_accepted = False

    def accept(self) -> None:
        self.is_accepted = True
        self.wait_s, self._lost_at, self.num_not_found, self.num_unsent = 0.0, None, 0, 0

    def progress(self) -> None:
        self.num_losses = 0

    def lose(self, wait_s: float) -> float:
        """Count a loss; the seconds since the first one in a row."""
        now = asyncio.get_running_loop().time()
        self._lost_at = now if self._lost_at is None else self._lost_at
        self.num_losses += 1
        self.wait_s = wait_s
        self.is_accepted = False
        return now - self._lost_at
