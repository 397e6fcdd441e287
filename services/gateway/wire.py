"""One WebSocket's socket: whole messages out, frames in, and nothing after a close frame.

Frames are written to the transport by ourselves, so that everything new goes out in one piece; pings, pongs and what
ends a broken connection are aiohttp's.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from aiohttp import WSMessage, WSMsgType, web
from aiohttp.abc import AbstractStreamWriter

from services.gateway.config import GatewayConfig
from services.gateway.frames import Encoding, ServerMessage, close_frame
from shared.errors import InvalidRequest

GOODBYE_S: Final = 2.0
"""How long a peer may take to close its side after a close frame."""
_NORMAL: Final = 1000
_CLEAN: Final = (0, _NORMAL, 1001)
"""Codes by which a peer says that it is through: none, normal closure, going away (a page that is left)."""

_ENDS: Final = (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR)


class Wire:
    """The socket of one client that speaks one encoding."""

    def __init__(
        self, request: web.Request, response: web.WebSocketResponse, writer: AbstractStreamWriter, encoding: Encoding
    ) -> None:
        self.encoding = encoding
        self.response = response
        self.was_closed_cleanly = False
        """Whether the peer itself has said that it is through, before we did."""
        self._request = request
        self._writer = writer
        self._said_goodbye = False

    @staticmethod
    async def open(request: web.Request, encoding: Encoding, config: GatewayConfig) -> "Wire":
        """Turn an HTTP request into a WebSocket. Raises InvalidRequest if it does not ask for one."""
        response = web.WebSocketResponse(
            protocols=(encoding.subprotocol,),
            heartbeat=config.heartbeat_s,
            max_msg_size=config.max_body_bytes,
            autoclose=False,
            timeout=GOODBYE_S,
            compress=False,
        )
        if not response.can_prepare(request):
            raise InvalidRequest("This path speaks WebSocket only.")
        return Wire(request, response, await response.prepare(request), encoding)

    @property
    def is_open(self) -> bool:
        """Whether messages may still be written."""
        return self._transport() is not None

    def write(self, messages: Sequence[ServerMessage]) -> None:
        """Write messages in one piece. Does nothing once the wire is no longer open."""
        transport = self._transport()
        if messages and transport is not None:
            transport.write(b"".join([self.encoding.frame(message) for message in messages]))

    async def until_writable(self) -> None:
        """Returns when the socket has room for more. Raises ConnectionError if it is lost meanwhile."""
        await self._writer.drain()

    async def receive(self) -> WSMessage | None:
        """The peer's next frame, or None at the end; a close frame of the peer's is answered."""
        message = await self.response.receive()
        if message.type not in _ENDS:
            return message
        if message.type is WSMsgType.CLOSE:
            self.was_closed_cleanly = self.is_open and (message.data or 0) in _CLEAN
            self.say_goodbye(message.data or _NORMAL, "")
        return None

    def say_goodbye(self, code: int, reason: str) -> None:
        """Write a close frame, after which the peer has a moment to close its side."""
        transport = self._transport()
        if transport is not None:
            self._said_goodbye = True
            transport.write(close_frame(code, reason))
            asyncio.get_running_loop().call_later(GOODBYE_S, transport.abort)

    def close(self) -> None:
        """Close the socket once what was written is gone."""
        if self._request.transport is not None:
            self._request.transport.close()

    def _transport(self) -> asyncio.Transport | None:
        transport = self._request.transport
        if self._said_goodbye or self.response.closed or transport is None or transport.is_closing():
            return None
        return transport
