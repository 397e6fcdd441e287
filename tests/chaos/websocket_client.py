"""A WebSocket client with many streams on one connection, which comes back on another gateway when it breaks."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, Final

import aiohttp

from tests.chaos.endpoints import CONNECTION_ERRORS, PAUSE_S, RESUME_WITHIN_S, SILENCE_S, TRY_AGAIN_CODES, Turns, places
from tests.chaos.history import Connected, Ending, Logprob, Piece
from tests.chaos.progress import Progress, Record
from tests.chaos.workload import StreamSpec

_PING_S: Final = 0.7
_CLOSE_S: Final = 0.5
_GOING_ON_ELSEWHERE: Final = 4000
"""A close code of the application's own: for a gateway, a connection that broke."""


class _Leave(Exception):
    """This gateway is of no use at the moment: try another."""


class SocketStream:
    """One stream and what the client knows of it."""

    def __init__(self, spec: StreamSpec, record: Record, progress: Progress) -> None:
        self.spec = spec
        self.record = record
        self._progress = progress
        self._is_accepted_here = False
        self._was_sent = False
        self._trouble_since: float | None = None

    def opening(self) -> dict[str, Any]:
        """What asks for it on a new connection, anew or where it was."""
        self._is_accepted_here = False
        if not self.record.request_ids:
            if not self._was_sent:
                self._progress.sent()
            self._was_sent = True
            body = {key: value for key, value in self.spec.body.items() if key != "stream"}
            return {"type": "request.create", "id": self.spec.name, "token_ids": True, "body": body}
        chars, tokens = places(self.spec, self.record)
        self.record.num_resumed += 1
        request_id = self.record.request_ids[-1]
        resume = {"type": "request.resume", "request_id": request_id, "id": self.spec.name}
        return resume | {"offset": chars, "token_offset": tokens}

    def take(self, message: dict[str, Any]) -> None:
        """Take in a message of its own. Raises _Leave for a refusal that another gateway may not repeat."""
        kind = message["type"]
        if kind == "request.accepted":
            self._is_accepted_here, self._trouble_since = True, None
            self._progress.accepted(self.record, message["request_id"])
        elif kind == "request.delta":
            self._progress.saw(self.record, piece_of(message))
        else:
            self._end(kind.removeprefix("request."), message)

    def _end(self, kind: str, message: dict[str, Any]) -> None:
        if kind == "failed" and not self._is_accepted_here and message["error"]["code"] in TRY_AGAIN_CODES:
            now = time.monotonic()
            self._trouble_since = self._trouble_since or now
            if now - self._trouble_since < RESUME_WITHIN_S:
                raise _Leave(f"{message['error']['code']}: {message['error']['message']}")
        self._progress.saw(self.record, ending_of(kind, message))


class SocketClient:
    """Streams that share one connection at a time."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        turns: Turns,
        specs: Sequence[StreamSpec],
        records: Sequence[Record],
        progress: Progress,
    ) -> None:
        self._session = session
        self._turns = turns
        self._progress = progress
        self._streams = [SocketStream(*each, progress) for each in zip(specs, records, strict=True)]

    async def run(self) -> None:
        """Follow every stream to its end, and look for what comes after it."""
        why = ""
        while self._open():
            url = self._turns.next()
            try:
                await self._connect(url, why)
            except (*CONNECTION_ERRORS, _Leave) as error:
                why = f"{type(error).__name__}: {error}"
                await asyncio.sleep(PAUSE_S)

    async def _connect(self, url: str, why: str) -> None:
        closing = aiohttp.ClientWSTimeout(ws_close=_CLOSE_S)
        socket = await self._session.ws_connect(f"{url}/v1/stream", max_msg_size=0, timeout=closing)
        try:
            await self._follow(socket, Connected(url, why))
        finally:  # a client that closes in the ordinary way wants no more of its requests
            await socket.close(code=_GOING_ON_ELSEWHERE if self._open() else aiohttp.WSCloseCode.OK)

    def _open(self) -> list[SocketStream]:
        return [stream for stream in self._streams if not stream.record.is_over]

    async def _follow(self, socket: aiohttp.ClientWebSocketResponse, connected: Connected) -> None:
        for stream in self._open():
            self._progress.saw(stream.record, connected)
            await socket.send_json(stream.opening())
        silent_since = time.monotonic()
        while self._open():
            try:
                frame = await socket.receive(timeout=_PING_S)
            except TimeoutError:
                if time.monotonic() - silent_since > SILENCE_S:
                    raise
                await socket.send_json({"type": "ping"})
                continue
            silent_since = time.monotonic()
            if frame.type is not aiohttp.WSMsgType.TEXT:
                raise ConnectionError(f"the gateway closed the connection: {frame.type.name} {frame.data}")
            self._take(json.loads(frame.data))

    def _take(self, message: dict[str, Any]) -> None:
        if message["type"] in ("pong", "going_away"):
            return
        for stream in self._streams:
            own_id = stream.record.request_ids[-1:]
            if message.get("id") == stream.spec.name or [message.get("request_id")] == own_id:
                stream.take(message)
                return
        self._progress.problems.append(f"the gateway sent a message that belongs to no stream: {message}")


def piece_of(message: dict[str, Any]) -> Piece:
    """A `request.delta`."""
    return Piece(
        index=message["index"],
        text=message["text"],
        offset=message["offset"],
        token_ids=tuple(message.get("token_ids", ())),
        token_offset=message.get("token_offset"),
        logprobs=tuple(chat_logprob(position) for position in message.get("logprobs") or ()),
    )


def chat_logprob(position: dict[str, Any]) -> Logprob:
    """One position of `logprobs.content`."""
    top = tuple((each["token"], each["logprob"]) for each in position["top_logprobs"])
    return position["token"], position["logprob"], top


def ending_of(kind: str, message: dict[str, Any]) -> Ending:
    """A terminal message."""
    usage = message.get("usage")
    error = message.get("error")
    return Ending(
        kind=kind,
        finish_reasons=tuple(choice["finish_reason"] for choice in message.get("choices", ())),
        usage=(usage["prompt_tokens"], usage["completion_tokens"]) if usage else None,
        error=f"{error['code']}: {error['message']}" if error else "",
    )
