"""One WebSocket to one gateway, in `shoal.v1.json`: messages out, events in, and what its end means."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import aiohttp

from shoal.errors import NotAShoalGateway, TooLarge, error_of_status

_SUBPROTOCOL: Final = "shoal.v1.json"
_MAX_FRAME_BYTES: Final = 64 << 20
_GOODBYE_S: Final = 0.3
"""How long a gateway may take to answer a close frame. Nothing depends on that it does."""
_ANSWERS_WITHIN_S: Final = 1.2
"""How long a gateway may take to answer a ping; a busy one is late by up to a second."""
_SLOWEST_BYTES_PER_S: Final = 20_000
"""A gateway says nothing while a large request is on its way, which may take as long as at this speed."""
_LAST_LOOK_S: Final = 0.1
"""After that, in case it was this program that stood still."""
_UNREAD_S: Final = 120.0
"""After this a gateway is asked that does not even read, and left after half as long again."""
_GOING_ON_ELSEWHERE: Final = 4000
"""Why a connection is closed: in the ordinary way it would mean that nobody wants the rest."""
_MESSAGE_TOO_BIG: Final = 1009
_NOT_CONNECTED: Final = (aiohttp.ClientError, ConnectionError, TimeoutError, OSError)


class ConnectionLost(Exception):
    """The connection ended, or never began, for a reason that another try may not meet."""

    def __init__(self, message: str, *, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        """How long the gateway asks to wait before that."""


class Connection:
    """An open WebSocket."""

    def __init__(self, address: str, socket: aiohttp.ClientWebSocketResponse, heartbeat_s: float) -> None:
        self.address = address
        self._socket = socket
        self._heartbeat_s = heartbeat_s
        self._upload_s = 0.0
        """What the last message may need to arrive, as long as nothing shows that it has."""

    @staticmethod
    async def open(
        session: aiohttp.ClientSession,
        address: str,
        headers: Mapping[str, str],
        *,
        timeout_s: float,
        heartbeat_s: float,
    ) -> "Connection":
        """Connect, and say `headers` beside the session's own.

        Raises ConnectionLost, or ShoalError if the gateway answers that it does not want to.
        """
        try:
            async with asyncio.timeout(timeout_s):
                socket = await session.ws_connect(
                    f"{address}/v1/stream",
                    headers=headers,
                    protocols=(_SUBPROTOCOL,),
                    heartbeat=_UNREAD_S,
                    max_msg_size=_MAX_FRAME_BYTES,
                    timeout=aiohttp.ClientWSTimeout(ws_close=_GOODBYE_S),
                )
        except aiohttp.WSServerHandshakeError as error:
            raise error_of_status(error.status, address) from error
        except _NOT_CONNECTED as error:
            raise ConnectionLost(str(error) or type(error).__name__) from error
        if socket.protocol != _SUBPROTOCOL:
            await socket.close()
            raise NotAShoalGateway(f"What answers at {address} does not speak {_SUBPROTOCOL}.")
        return Connection(address, socket, heartbeat_s)

    async def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises ConnectionLost."""
        text = json.dumps(message)
        self._upload_s += len(text) / _SLOWEST_BYTES_PER_S
        try:
            await self._socket.send_str(text)
        except _NOT_CONNECTED as error:
            raise ConnectionLost(str(error) or type(error).__name__) from error

    async def receive(self) -> dict[str, Any]:
        """The next event. Raises ConnectionLost at the end, NotAShoalGateway for what is no event, and TooLarge."""
        frame = await self._frame()
        self._upload_s = 0.0
        if frame.type is aiohttp.WSMsgType.TEXT:
            return self._event(frame.data)
        code = self._socket.close_code
        if code == _MESSAGE_TOO_BIG:
            raise TooLarge("The request is larger than the gateway takes.", code="request_too_large")
        raise ConnectionLost(f"the connection to {self.address} ended with code {code}")

    async def _frame(self) -> aiohttp.WSMessage:
        """What comes next. A gateway that is frozen closes nothing, so one that is silent is asked."""
        with suppress(TimeoutError):
            return await self._socket.receive(timeout=self._heartbeat_s + self._upload_s)
        await self.send({"type": "ping"})
        for timeout_s in (_ANSWERS_WITHIN_S, _LAST_LOOK_S):
            with suppress(TimeoutError):
                return await self._socket.receive(timeout=timeout_s)
        with suppress(*_NOT_CONNECTED):
            await self._socket.close(code=_GOING_ON_ELSEWHERE)
        raise ConnectionLost(f"{self.address} is silent")

    async def close(self) -> None:
        """End the connection in good order, which also cancels what is open on it."""
        with suppress(*_NOT_CONNECTED):
            await self._socket.close()

    def _event(self, text: str) -> dict[str, Any]:
        try:
            event = json.loads(text)
        except ValueError:
            event = None
        if not isinstance(event, dict) or not isinstance(event.get("type"), str):
            raise NotAShoalGateway(f"What answers at {self.address} does not speak {_SUBPROTOCOL}.")
        return event
