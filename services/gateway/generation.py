"""The generation endpoints over HTTP: from a draft to its answer, in one piece or as events."""

import asyncio
import time
from collections.abc import Sequence

import msgspec
from aiohttp import web

from services.gateway.chat import ChatShape
from services.gateway.completions import CompletionShape
from services.gateway.config import GatewayConfig
from services.gateway.drafts import Draft, Endpoint
from services.gateway.mesh import Mesh
from services.gateway.sse import EventStream, Shape, id_header, raise_if_failed
from services.gateway.streams import Reader, Stream


def shape_of(draft: Draft, request_id: str) -> Shape:
    """How the answer to `draft` looks; it is named after the request."""
    unique, created = request_id.removeprefix("req-"), int(time.time())
    if draft.answer.endpoint is Endpoint.CHAT:
        return ChatShape(draft, f"chatcmpl-{unique}", created)
    return CompletionShape(draft, f"cmpl-{unique}", created)


async def generate(
    request: web.Request, draft: Draft, tenant: str, *, mesh: Mesh, config: GatewayConfig
) -> web.StreamResponse:
    """Serve one generation request from admission to its last byte; whatever happens, nothing is left in the mesh.

    Raises RequestError or RequestFailed, to be answered with their status, if it fails before the first byte.
    """
    streams = mesh.admit(draft, tenant)
    shape = shape_of(draft, streams[0].request_id)
    try:
        await mesh.submit(streams)
        if draft.answer.is_stream:
            events = EventStream(
                request,
                streams,
                shape=shape,
                includes_usage=draft.answer.includes_usage,
                mesh=mesh,
                keep_alive_s=config.keep_alive_s,
            )
            return await events.serve()
        return await _whole(shape, streams)
    except (asyncio.CancelledError, ConnectionError):
        mesh.num_disconnects += 1
        raise
    finally:
        await mesh.cancel(streams)


async def _whole(shape: Shape, streams: Sequence[Stream]) -> web.Response:
    news = asyncio.Event()
    reader = Reader(streams, news.set, wants_text=False)
    while not (reader.is_over or reader.failure):
        await news.wait()
        news.clear()
    raise_if_failed(reader)
    answer = msgspec.json.encode(shape.whole(streams))
    return web.Response(body=answer, headers=id_header(streams), content_type="application/json")
