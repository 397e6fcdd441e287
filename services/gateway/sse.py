"""Server-sent events: one streamed answer, from the first byte to `[DONE]`.

One write for everything that is new at each look. Comments keep a silent stream alive.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from aiohttp import web

from services.gateway.answers import UsageBody, usage_of
from services.gateway.attachments import resumed_elsewhere
from services.gateway.failures import RequestFailed, encode_error
from services.gateway.mesh import Mesh
from services.gateway.presentation import Presentation
from services.gateway.shapes import shape_of
from services.gateway.streams import Delta, End, Reader, Stream
from shared.errors import RequestError, Unavailable
from shared.log import about
from shared.messages import ErrorInfo, Outcome

log = logging.getLogger(__name__)

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"
REQUEST_ID_HEADER: Final = "X-Request-Id"
_LOST: Final = End(Outcome.FAILED, error=ErrorInfo.of(resumed_elsewhere()))
_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # tells proxies not to collect events
}


def raise_if_failed(failure: End | None, streams: Sequence[Stream]) -> None:
    """Raises RequestFailed if there is a failure."""
    if failure is not None:
        raise RequestFailed(_error_of(failure), streams[0].request_id)


def _error_of(failure: End) -> ErrorInfo:
    """What to tell a client whose request ended without completing."""
    if failure.error is None:
        return ErrorInfo.of(Unavailable("The request was cancelled."))
    return failure.error


def id_header(streams: Sequence[Stream]) -> dict[str, str]:
    """The header that tells a client how its request is called here."""
    return {REQUEST_ID_HEADER: streams[0].request_id}


class EventStream:
    """One streamed answer, or the rest of one."""

    def __init__(
        self,
        request: web.Request,
        presentation: Presentation,
        read: Callable[[Callable[[], None]], Reader],
        *,
        mesh: Mesh,
        keep_alive_s: float,
    ) -> None:
        """`read` makes the reader, given what to call when there is something new."""
        self.has_begun = False
        """Whether the client has been told how its request is called."""
        self._request = request
        self._includes_usage = presentation.includes_usage
        self._mesh = mesh
        self._keep_alive_s = keep_alive_s
        self._news = asyncio.Event()
        self._reader = read(self._news.set)
        self._shape = shape_of(presentation, self._reader.streams)
        self._is_lost = False
        self._wrote_at = 0.0

    async def serve(self) -> web.StreamResponse:
        """Answer from the acceptance to the end. Raises RequestFailed if it is refused before anything was written."""
        try:
            while not (self._reader.is_accepted or self._refusal):
                await self._look_again()
            raise_if_failed(self._refusal, self._reader.streams)
            return await self._answer()
        finally:
            self._reader.close()

    def break_off(self) -> None:
        """This gateway leaves: close the connection of a stream that has not ended, for its client to resume it."""
        if not (self._reader.is_over or self._failure) and (transport := self._request.transport) is not None:
            transport.abort()

    def lose(self) -> None:
        """Another connection has the request from now on: say so, and end."""
        self._is_lost = True
        self._news.set()

    @property
    def _refusal(self) -> End | None:
        return _LOST if self._is_lost else self._reader.refusal

    @property
    def _failure(self) -> End | None:
        return _LOST if self._is_lost else self._reader.failure

    async def _answer(self) -> web.StreamResponse:
        response = web.StreamResponse(headers=_HEADERS | id_header(self._reader.streams))
        self.has_begun = True
        await response.prepare(self._request)
        await self._write(response, _events(self._shape.opening()))
        self._mesh.on_tick.add(self._wake_if_silent)
        try:
            await self._follow(response)
        except ConnectionError:
            raise
        except Exception:
            request_id = self._reader.streams[0].request_id
            fields = about(request_id, self._mesh.spans.context_of(request_id))
            log.exception("a bug ended an event stream", extra=fields)
            await self._write(response, _last_words(ErrorInfo.of(RequestError("Internal error."))))
        finally:
            self._mesh.on_tick.discard(self._wake_if_silent)
        await response.write_eof()
        return response

    async def _follow(self, response: web.StreamResponse) -> None:
        while True:
            data = b"".join(_events(self._shape.chunks(delta)) for delta in self._take())
            if (failure := self._failure) is not None:
                return await self._write(response, data + _last_words(_error_of(failure), self._usage_so_far()))
            if self._reader.is_over:
                usage = _event(self._shape.usage(self._reader.streams)) if self._includes_usage else b""
                return await self._write(response, data + usage + DONE)
            if data:
                await self._write(response, data)
            elif self._is_silent():
                await self._write(response, KEEP_ALIVE)
            await self._look_again()

    def _usage_so_far(self) -> UsageBody | None:
        usage = usage_of(self._reader.streams)
        return usage if self._includes_usage and usage.completion_tokens else None

    def _take(self) -> list[Delta]:
        return [] if self._is_lost else self._reader.take()  # what another connection tells is not told here as well

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


def _last_words(error: ErrorInfo, usage: UsageBody | None = None) -> bytes:
    return b"data: " + encode_error(error, usage) + b"\n\n" + DONE
