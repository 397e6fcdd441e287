"""A gateway that answers as a test tells it, over real HTTP and the WebSocket protocol."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 3,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 4},
}
Event = dict[str, Any]


def delta(offset: int, text: str) -> Event:
    """A piece of text."""
    return {"type": "request.delta", "request_id": "req-1", "index": 0, "offset": offset, "text": text}


def completed(finish_reason: str = "stop") -> Event:
    """The end."""
    return {
        "type": "request.completed",
        "id": "chat",
        "request_id": "req-1",
        "choices": [{"index": 0, "finish_reason": finish_reason}],
        "usage": USAGE,
        "timing": {"queue_s": 0.0, "first_token_s": 0.1, "total_s": 0.2},
    }


def failed(message: str, code: str = "unavailable") -> Event:
    """An end that nobody wanted."""
    error = {"message": message, "type": "server_error", "param": None, "code": code}
    return {"type": "request.failed", "id": "chat", "error": error}


class FakeGateway:
    """What it answers, and what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.models = ["tiny"]
        self.key: str | None = None
        self.script = [delta(0, "Hello"), delta(5, " you"), completed()]
        self.waits_for_cancel = False
        self.hangs_up = False
        self.close_code = 1000
        self.pause_after_first: asyncio.Event | None = None
        """Set it to let the answer go on after its first event."""
        self.bodies: list[Event] = []
        self.received: list[Event] = []

    async def list_models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        self._check_key(request)
        return web.json_response({"object": "list", "data": [{"id": model} for model in self.models]})

    async def stream(self, request: web.Request) -> web.WebSocketResponse:
        """GET /v1/stream."""
        self._check_key(request)
        socket = web.WebSocketResponse(protocols=("shoal.v1.json",))
        await socket.prepare(request)
        assert socket.ws_protocol == "shoal.v1.json"
        message = await self._receive(socket)
        self.bodies.append(message["body"])
        await socket.send_json({"type": "request.accepted", "id": message["id"], "request_id": "req-1"})
        for number, event in enumerate(self.script):
            await socket.send_json(event)
            await asyncio.sleep(0)
            if number == 0 and self.pause_after_first is not None:
                await self.pause_after_first.wait()
        if self.waits_for_cancel:
            await self._receive(socket)
            await socket.send_json({"type": "request.cancelled", "id": "chat", "request_id": "req-1", "usage": USAGE})
        if not self.hangs_up:
            await socket.receive()  # the client's goodbye
        await socket.close(code=self.close_code)
        return socket

    async def _receive(self, socket: web.WebSocketResponse) -> Event:
        message: Event = json.loads(await socket.receive_str())
        self.received.append(message)
        return message

    def _check_key(self, request: web.Request) -> None:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            raise web.HTTPUnauthorized


@asynccontextmanager
async def running(gateway: FakeGateway) -> AsyncIterator[FakeGateway]:
    """Let it listen on a free port."""
    application = web.Application()
    application.add_routes([web.get("/v1/models", gateway.list_models), web.get("/v1/stream", gateway.stream)])
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    gateway.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield gateway
    finally:
        await runner.cleanup()
