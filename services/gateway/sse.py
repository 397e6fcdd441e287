"""Server-sent events: one streamed answer, from the first byte to `[DONE]`.

One write for everything that is new at each look. Comments keep a silent stream alive.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec
from aiohttp import web

from services.gateway.failures import RequestFailed, encode_error
from services.gateway.mesh import Mesh
from services.gateway.streams import Delta, End, Reader, Stream
from shared.errors import RequestError, Unavailable
from shared.messages import ErrorInfo

log = logging.getLogger(__name__)

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"
REQUEST_ID_HEADER: Final = "X-Request-Id"
_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # tells proxies not to collect events
}


class Shape(Protocol):
    """How one endpoint puts what was said."""

    def opening(self) -> Sequence[msgspec.Struct]:
        """The chunks that begin a stream."""
        ...

    def chunks(self, delta: Delta) -> Sequence[msgspec.Struct]:
        """The chunks for what is new of one choice."""
        ...

    def usage(self, streams: Sequence[Stream]) -> msgspec.Struct:
        """The chunk that says what a stream consumed."""
        ...

    def whole(self, streams: Sequence[Stream]) -> msgspec.Struct:
        """The answer in one piece."""
        ...


def raise_if_failed(reader: Reader) -> None:
    """Raises RequestFailed if any part of what is read has failed."""
    if (failure := reader.failure) is not None:
        raise RequestFailed(_error_of(failure), reader.streams[0].request_id)


def _error_of(failure: End) -> ErrorInfo:
    """What to tell a client whose request ended without completing."""
    if failure.error is None:
        return ErrorInfo.of(Unavailable("The request was cancelled."))
    return failure.error


def id_header(streams: Sequence[Stream]) -> dict[str, str]:
    """The header that tells a client how its request is called here."""
    return {REQUEST_ID_HEADER: streams[0].request_id}


class EventStream:
    """One streamed answer."""

    def __init__(
        self,
        request: web.Request,
        streams: Sequence[Stream],
        *,
        shape: Shape,
        includes_usage: bool,
        mesh: Mesh,
        keep_alive_s: float,
    ) -> None:
        self._request = request
        self._shape = shape
        self._includes_usage = includes_usage
        self._mesh = mesh
        self._keep_alive_s = keep_alive_s
        self._news = asyncio.Event()
        self._reader = Reader(streams, self._news.set)
        self._wrote_at = 0.0

    async def serve(self) -> web.StreamResponse:
        """Answer from the acceptance to the end. Raises RequestFailed if it is refused before anything was written."""
        while not (self._reader.is_accepted or self._reader.failure):
            await self._look_again()
        raise_if_failed(self._reader)
        response = web.StreamResponse(headers=_HEADERS | id_header(self._reader.streams))
        await response.prepare(self._request)
        await self._write(response, _events(self._shape.opening()))
        self._mesh.on_tick.add(self._wake_if_silent)
        try:
            await self._follow(response)
        except ConnectionError:
            raise
        except Exception:
            log.exception("a bug ended an event stream")
            await self._write(response, _last_words(ErrorInfo.of(RequestError("Internal error."))))
        finally:
            self._mesh.on_tick.discard(self._wake_if_silent)
        await response.write_eof()
        return response

    async def _follow(self, response: web.StreamResponse) -> None:
        while True:
            data = b"".join(_events(self._shape.chunks(delta)) for delta in self._reader.take())
            if (failure := self._reader.failure) is not None:
                return await self._write(response, data + _last_words(_error_of(failure)))
            if self._reader.is_over:
                usage = _event(self._shape.usage(self._reader.streams)) if self._includes_usage else b""
                return await self._write(response, data + usage + DONE)
            if data:
                await self._write(response, data)
            elif self._is_silent():
                await self._write(response, KEEP_ALIVE)
            await self._look_again()

    async def _look_again(self) -> None:
        await self._news.wait()
        self._news.clear()

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        """Returns when the socket has room for more. Meanwhile the log grows, and the next look finds it all."""
        self._wrote_at = self._mesh.clock.now()
        await response.write(data)

    def _is_silent(self) -> bool:
        return self._mesh.clock.now() - self._wrote_at >= self._keep_alive_s

    def _wake_if_silent(self) -> None:
        if self._is_silent():
            self._news.set()


def _event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _events(chunks: Sequence[msgspec.Struct]) -> bytes:
    return b"".join([_event(chunk) for chunk in chunks])


def _last_words(error: ErrorInfo) -> bytes:
    return b"data: " + encode_error(error) + b"\n\n" + DONE
