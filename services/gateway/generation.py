"""The generation endpoints over HTTP: from a draft, or from where a client left off, to the answer.

Owns what becomes of a request whose client leaves. How events are written is with `sse`.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from aiohttp import web

from services.gateway.attachments import Attachment, Attachments
from services.gateway.config import GatewayConfig
from services.gateway.drafts import Draft
from services.gateway.keys import Caller
from services.gateway.mesh import Mesh
from services.gateway.presentation import Presentation
from services.gateway.resumption import Resumption
from services.gateway.shapes import shape_of
from services.gateway.sse import EventStream, id_header, raise_if_failed
from services.gateway.streams import Reader, Stream
from shared.ids import RequestId


class Generation:
    """What the generation endpoints of one gateway do.

    Its methods raise RequestError or RequestFailed, to be answered with their status, if a request fails before the
    first byte of its answer.
    """

    def __init__(self, mesh: Mesh, attachments: Attachments, config: GatewayConfig) -> None:
        self._mesh = mesh
        self._attachments = attachments
        self._keep_alive_s = config.keep_alive_s
        self._event_streams: set[EventStream] = set()

    def break_off(self) -> None:
        """This gateway leaves: close the connections of streams that go on elsewhere. Their clients resume them there
        as soon as they notice."""
        for events in list(self._event_streams):
            events.break_off()

    async def create(
        self, request: web.Request, draft: Draft, caller: Caller, request_id: RequestId
    ) -> web.StreamResponse:
        """Serve a new request from admission to its last byte.

        Whatever happens, nothing is left in the mesh, but for a resumable stream that its client can come back for.
        """
        presentation, is_resumable = Presentation.of(draft), draft.answer.is_resumable
        client = presentation.pack() if is_resumable else b""
        streams = self._mesh.admit(draft, caller, request_id=request_id, client=client)
        if not draft.answer.is_stream:
            return await self._whole(presentation, streams)
        events = self._events(request, presentation, partial(Reader, streams))
        attachment = self._attachments.attach(streams, is_resumable=is_resumable, on_loss=events.lose)
        try:
            await self._mesh.submit(streams)
            return await self._serve(events, attachment)
        finally:
            await attachment.cancel()

    async def resume(self, request: web.Request, resumption: Resumption) -> web.StreamResponse:
        """Serve the rest of a request as events, in the shape that it was asked for in."""
        events = self._events(request, resumption.presentation, resumption.read)
        attachment = self._attachments.attach(resumption.streams, is_resumable=True, on_loss=events.lose)
        try:
            return await self._serve(events, attachment)
        finally:
            await attachment.let_go()

    def _events(
        self, request: web.Request, presentation: Presentation, read: Callable[[Callable[[], None]], Reader]
    ) -> EventStream:
        return EventStream(request, presentation, read, mesh=self._mesh, keep_alive_s=self._keep_alive_s)

    async def _serve(self, events: EventStream, attachment: Attachment) -> web.StreamResponse:
        self._event_streams.add(events)
        try:
            response = await events.serve()
        except (asyncio.CancelledError, ConnectionError):
            self._mesh.num_disconnects += 1
            if events.has_begun:  # its client knows what to resume
                await attachment.let_go()
            raise
        finally:
            self._event_streams.discard(events)
        await attachment.cancel()  # what is left of a request that failed in part
        return response

    async def _whole(self, presentation: Presentation, streams: Sequence[Stream]) -> web.Response:
        news = asyncio.Event()
        reader = Reader(streams, news.set, wants_text=False)
        try:
            await self._mesh.submit(streams)
            while not (reader.is_over or reader.failure):
                await news.wait()
                news.clear()
            raise_if_failed(reader.failure, streams)
        except asyncio.CancelledError:
            self._mesh.num_disconnects += 1
            raise
        finally:
            await self._mesh.cancel(streams)
        answer = msgspec.json.encode(shape_of(presentation, streams).whole(streams))
        return web.Response(body=answer, headers=id_header(streams), content_type="application/json")
