"""WebSockets: many requests on one connection, one writer a connection, and one bad peer that hurts nobody else.

Everything new on a connection goes out in one write. While its socket is full nothing more is written to it: logs grow
by what their requests produce, replies are not made because nothing more is read from it.
"""

import asyncio
import logging
from typing import Final, assert_never

from aiohttp import WSMessage

from services.gateway.channel import Channel, draft_of, failed
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
from services.gateway.mesh import Mesh
from services.gateway.wire import Wire
from shared.errors import InvalidRequest, NotFound, Overloaded, RequestError
from shared.messages import ErrorInfo

log = logging.getLogger(__name__)

_MAX_REPLIES: Final = 64
"""Replies that wait for the socket; beyond them nothing more is read from the peer."""
_MAX_BAD_MESSAGES: Final = 32
_FRAMES_IN_A_ROW: Final = 16
"""After so many, others get their turn."""
# Close codes of RFC 6455.
GOING_AWAY: Final = 1001
POLICY_VIOLATION: Final = 1008
_UNSUPPORTED_DATA: Final = 1003


class DuplicateId(InvalidRequest):
    """A new request has the name of one that is open."""

    code = "duplicate_id"


class ResumeUnsupported(InvalidRequest):
    """Requests cannot be resumed yet."""

    code = "unsupported"


class SocketConnection:
    """One client's WebSocket and the requests that it has open."""

    def __init__(self, wire: Wire, tenant: str, mesh: Mesh, *, max_requests: int) -> None:
        self._wire = wire
        self._tenant = tenant
        self._mesh = mesh
        self._max_requests = max_requests
        self._channels: dict[str, Channel] = {}
        self._ready: dict[Channel, None] = {}
        self._replies: list[ServerMessage] = []
        self._num_bad_messages = 0
        self._news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Read and write until the connection ends; then nothing of it is left in the mesh."""
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
            await self._cancel_all()

    def reply(self, message: ServerMessage) -> None:
        """Send a message that belongs to no request's log."""
        self._replies.append(message)
        self._news.set()

    def close(self, code: int, reason: str) -> None:
        """End the connection: nothing more is written, done or kept in the mesh for this peer."""
        if self._wire.is_open:
            log.info("closing a WebSocket", extra={"code": code, "reason": reason})
            self._wire.say_goodbye(code, reason)
            self._ending = asyncio.create_task(self._cancel_all())  # at once: the writer may wait for a full socket

    async def flush(self) -> None:
        """Write everything that is new, in one piece."""
        messages, self._replies = self._replies, []
        ready, self._ready = self._ready, {}
        self._has_room.set()
        for channel in ready:
            messages += channel.take()
        self._wire.write(messages)
        for channel in [channel for channel in ready if channel.is_over]:
            if self._channels.get(channel.name) is channel:  # the name may be another request's by now
                del self._channels[channel.name]
            await self._mesh.cancel(channel.streams)  # what is left of a request that failed in part

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
            while len(self._replies) >= _MAX_REPLIES:
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
                await self._create(message)
            case CancelOpenRequest():
                await self._cancel(message)
            case ResumeRequest():
                self._refuse_to_resume(message)
            case Ping():
                self.reply(Pong())
            case _:
                assert_never(message)

    async def _create(self, message: CreateRequest) -> None:
        if message.id in self._channels:
            self._complain(DuplicateId(f"A request with the id {message.id[:100]!r} is open.", param="id"), message.id)
            return
        try:
            if len(self._channels) >= self._max_requests:
                raise Overloaded("Too many requests are open on this connection.", retry_after_s=1.0)
            draft = draft_of(message)
            streams = self._mesh.admit(draft, self._tenant)
        except RequestError as error:
            self._mesh.num_refused[error.code] += 1
            self.reply(failed(error, name=message.id))
            return
        self._channels[message.id] = Channel(message, draft, streams, self._has_news)
        await self._mesh.submit(streams)

    async def _cancel(self, message: CancelOpenRequest) -> None:
        if (message.id is None) == (message.request_id is None):
            raise InvalidRequest("Give either request_id or id.", param="request_id")
        for channel in self._channels.values():
            if message.id == channel.name or message.request_id == channel.request_id:
                await self._mesh.cancel(channel.streams)
                return
        raise NotFound(
            "No such request is open on this connection.", param="request_id" if message.id is None else "id"
        )

    def _refuse_to_resume(self, message: ResumeRequest) -> None:
        self.reply(failed(ResumeUnsupported("request.resume is not supported."), request_id=message.request_id))

    def _complain(self, error: RequestError, name: str | None = None) -> None:
        body = ErrorBody.of(ErrorInfo.of(error))
        self.reply(ProtocolError(body) if name is None else ProtocolError(body, name))
        self._num_bad_messages += 1
        if self._num_bad_messages >= _MAX_BAD_MESSAGES:
            self.close(POLICY_VIOLATION, "too many messages that cannot be understood")

    def _has_news(self, channel: Channel) -> None:
        self._ready[channel] = None
        self._news.set()

    async def _cancel_all(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            if not channel.is_over:
                self._mesh.num_disconnects += 1
            await self._mesh.cancel(channel.streams)
