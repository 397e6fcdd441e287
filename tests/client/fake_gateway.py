"""A gateway that does what a test's script says, one script a connection, and breaks connections as networks do."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aiohttp import WSMsgType, web

import shoal
from tests.resets import reset

PATIENCE_S = 30.0
USAGE: dict[str, Any] = {
    "prompt_tokens": 3,
    "completion_tokens": 4,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 2},
}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


class Conversation:
    """One connection of a client, from the gateway's side."""

    def __init__(self, request: web.Request, ws: web.WebSocketResponse) -> None:
        self.headers = request.headers
        self._request = request
        self._ws = ws

    async def receive(self) -> dict[str, Any]:
        """The client's next message."""
        message: dict[str, Any] = await self._ws.receive_json(timeout=PATIENCE_S)
        return message

    async def send(self, *events: dict[str, Any]) -> None:
        """Say something."""
        for event in events:
            await self._ws.send_str(json.dumps(event))

    def cut(self) -> None:
        """End the connection with a reset, as a host that is gone does."""
        reset(self._request.transport)

    async def close(self, code: int) -> None:
        """End the connection in good order."""
        await self._ws.close(code=code)

    async def closed(self) -> int | None:
        """The code with which the client closes; None if it just vanishes."""
        while True:
            frame = await self._ws.receive(PATIENCE_S)
            if frame.type is WSMsgType.CLOSE:
                return int(frame.data)
            if frame.type in (WSMsgType.CLOSED, WSMsgType.CLOSING, WSMsgType.ERROR):
                return None


Script = Callable[[Conversation], Awaitable[None]]


class FakeGateway:
    """Serves connections in order, each by its own script; the last script serves all that follow."""

    def __init__(self, *scripts: Script, status: int | None = None) -> None:
        """With `status`, connections are refused with it instead."""
        self.num_connections = 0
        self.failure: BaseException | None = None
        """What went wrong in a script: look at it, the client only sees that the connection ends."""
        self._scripts = scripts
        self._status = status
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        """Where it listens."""
        assert self._runner is not None
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def __aenter__(self) -> "FakeGateway":
        application = web.Application()
        application.add_routes([web.get("/v1/stream", self._serve)])
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()
        if self.failure is not None:
            raise self.failure

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.num_connections += 1
        if self._status is not None:
            return web.Response(status=self._status)
        ws = web.WebSocketResponse(protocols=("shoal.v1.json",))
        await ws.prepare(request)
        script = self._scripts[min(self.num_connections, len(self._scripts)) - 1]
        try:
            await script(Conversation(request, ws))
        except Exception as error:
            self.failure = error
        return ws


@asynccontextmanager
async def client_of(*gateways: FakeGateway, **options: Any) -> AsyncIterator[shoal.Client]:
    """A client that knows these gateways, which run as long as it."""
    async with AsyncExitStack() as stack:
        for gateway in gateways:
            await stack.enter_async_context(gateway)
        async with asyncio.timeout(PATIENCE_S), shoal.Client([one.address for one in gateways], **options) as client:
            yield client


# What gateways say.


def accepted(request_id: str = "req-1") -> dict[str, Any]:
    return {"type": "request.accepted", "id": "stream", "request_id": request_id}


def delta(offset: int, text: str, index: int = 0, **fields: Any) -> dict[str, Any]:
    return {"type": "request.delta", "request_id": "req-1", "index": index, "offset": offset, "text": text} | fields


def cancelled() -> dict[str, Any]:
    return {"type": "request.cancelled", "id": "stream", "request_id": "req-1", "usage": USAGE}


def completed(num_choices: int = 1) -> dict[str, Any]:
    return {
        "type": "request.completed",
        "id": "stream",
        "request_id": "req-1",
        "choices": [{"index": index, "finish_reason": "stop"} for index in range(num_choices)],
        "usage": USAGE,
        "timing": {"queue_s": 0.1, "first_token_s": 0.2, "total_s": 0.3},
    }


def failed(kind: str, code: str, *, is_known: bool = False, **fields: Any) -> dict[str, Any]:
    error = {"type": kind, "code": code, "message": f"It is {code}.", "param": None}
    known = {"request_id": "req-1"} if is_known else {}
    return {"type": "request.failed", "id": "stream", "error": error} | known | fields
