"""WebSockets: many requests on one connection, one writer a connection, and one bad peer that hurts nobody else.

Everything new on a connection goes out in one write. While its socket is full nothing more is written to it: logs grow
by what their requests produce, replies are not made because nothing more is read from it.

A peer that closes its connection is through with its requests. One whose connection ends in any other way, be it by us,
may come back for them.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, assert_never

from aiohttp import WSMessage

from services.gateway.channels import Channels, DuplicateId
from services.gateway.failures import ErrorBody
from services.gateway.frames import (
    CancelOpenRequest,
    ClientMessage,
    CreateRequest,
    Ping,
    Pong,
    ProtocolError,
    ResumeRequest,
    ServerMessage,
)
from services.gateway.wire import Wire
from shared.errors import InvalidRequest, RequestError
from shared.messages import ErrorInfo

log = logging.getLogger(__name__)

_MAX_REPLIES: Final = 64
"""Replies that wait for the socket; beyond them nothing more is read from the peer."""
_MAX_BAD_MESSAGES: Final = 32
_FRAMES_IN_A_ROW: Final = 16
"""After so many, others get their turn."""
# Close codes of RFC 6455 and its registry.
POLICY_VIOLATION: Final = 1008
SERVICE_RESTART: Final = 1012
_UNSUPPORTED_DATA: Final = 1003


class SocketConnection:
    """One client's WebSocket."""

    def __init__(self, wire: Wire, open_channels: Callable[[Callable[[], None]], Channels]) -> None:
        """`open_channels` makes what holds its requests, given what to call when they have something to say."""
        self._wire = wire
        self._news = asyncio.Event()
        self._channels = open_channels(self._news.set)
        self._replies: list[ServerMessage] = []
        self._num_bad_messages = 0
        self._has_room = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Read and write until the connection ends."""
        try:
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(self._write_for_ever())
                await self._read_to_the_end()
                writing.cancel()
        except* ConnectionError:
            pass
        except* Exception:
            log.exception("a bug ended a WebSocket")
        finally:
            self._wire.close()
            await self._channels.leave(may_come_back=not self._wire.was_closed_cleanly)

    def reply(self, message: ServerMessage) -> None:
        """Send a message that belongs to no request's log."""
        self._replies.append(message)
        self._news.set()

    def close(self, code: int, reason: str) -> None:
        """End the connection: nothing more is written, or done for this peer. It may come back for its requests."""
        if self._wire.is_open:
            log.info("closing a WebSocket", extra={"code": code, "reason": reason})
            self._wire.say_goodbye(code, reason)
            # At once: the writer may wait for a full socket.
            self._ending = asyncio.create_task(self._channels.leave(may_come_back=True))

    async def flush(self) -> None:
        """Write everything that is new, in one piece."""
        messages, self._replies = self._replies, []
        self._has_room.set()
        self._wire.write(messages + self._channels.take())
        await self._channels.forget_ended()

    async def _write_for_ever(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            await self.flush()
            await self._wire.until_writable()

    async def _read_to_the_end(self) -> None:
        num_frames = 0
        while (frame := await self._wire.receive()) is not None:
            if not self._wire.is_open:
                continue
            await self._take(frame)
            num_frames += 1
            if num_frames % _FRAMES_IN_A_ROW == 0:
                await asyncio.sleep(0)
            while len(self._replies) + self._channels.num_refusals >= _MAX_REPLIES:
                self._has_room.clear()
                await self._has_room.wait()

    async def _take(self, frame: WSMessage) -> None:
        encoding = self._wire.encoding
        if frame.type is not encoding.frame_kind:
            self.close(_UNSUPPORTED_DATA, f"{encoding.subprotocol} has {encoding.frame_kind.name} frames")
            return
        try:
            await self._obey(encoding.decode(frame.data))
        except RequestError as error:
            self._complain(error)

    async def _obey(self, message: ClientMessage) -> None:
        match message:
            case CreateRequest():
                try:
                    await self._channels.create(message)
                except DuplicateId as error:
                    self._complain(error, message.id)
            case CancelOpenRequest():
                if (message.id is None) == (message.request_id is None):
                    raise InvalidRequest("Give either request_id or id.", param="request_id")
                await self._channels.cancel(message)
            case ResumeRequest():
                self._channels.resume(message)
            case Ping():
                self.reply(Pong())
            case _:
                assert_never(message)

    def _complain(self, error: RequestError, name: str | None = None) -> None:
        body = ErrorBody.of(ErrorInfo.of(error))
        self.reply(ProtocolError(body) if name is None else ProtocolError(body, name))
        self._num_bad_messages += 1
        if self._num_bad_messages >= _MAX_BAD_MESSAGES:
            self.close(POLICY_VIOLATION, "too many messages that cannot be understood")
