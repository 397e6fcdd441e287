"""A running gateway on a real socket, with a fake mesh behind it and a clock that the test moves."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import aiohttp
import openai

from services.gateway.config import GatewayConfig
from services.gateway.mesh import Mesh
from services.gateway.service import Gateway
from shared.actor import Identity, Tick
from shared.clock import FakeClock
from shared.ids import InstanceId, Service, new_instance_id
from shared.telemetry.answering import Answering
from shared.telemetry.store import SpanStore
from shared.telemetry.tracing import Tracing
from shared.transport.memory import MemoryBroker, MemoryTransport
from tests.gateway.fake_mesh import MODEL, PATIENCE_S, FakeMesh, FakeRequest

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "Once"}
CHAT_PATH = "/v1/chat/completions"
OTHER_SCHEDULER = InstanceId("scheduler-bbbbbbbb")
"""One beside that of the fake mesh."""


@dataclasses.dataclass
class Harness:
    """What a test works with."""

    gateway: Gateway
    fake: FakeMesh
    clock: FakeClock
    http: aiohttp.ClientSession
    transport: MemoryTransport
    running: asyncio.Task[None]
    tracing: Tracing
    """Keeps the gateway's spans."""

    @property
    def mesh(self) -> Mesh:
        """The gateway's own view of the mesh."""
        return self.gateway.mesh

    @property
    def url(self) -> str:
        """Where the gateway listens."""
        return self.gateway.server.address

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        """OpenAI's client, pointed at the gateway."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    async def advance(self, seconds: float, *, beats: bool = True) -> None:
        """Let time pass for the gateway, in small steps; the mesh goes on beating unless told not to."""
        while seconds > 1e-9:
            step = min(seconds, 0.5)
            self.clock.advance(step)
            seconds -= step
            if beats:
                await self.fake.beat()
            await self.settle()
            self.gateway.post(Tick())
            await self.settle()

    def unsent(self) -> list[int]:
        """For each connection, the bytes that wait in this process for the client to take them."""
        runner = self.gateway.server._runner
        assert runner is not None
        assert runner.server is not None
        transports = [connection.transport for connection in runner.server.connections]
        return [transport.get_write_buffer_size() for transport in transports if transport is not None]

    async def settle(self) -> None:
        """Let everything that is on its way inside this process arrive."""
        for _ in range(12):
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that sockets bring about."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110  # what a socket does sets no event of ours
                await asyncio.sleep(0.002)

    @asynccontextmanager
    async def post(self, path: str, body: Any, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a JSON body."""
        async with self.http.post(self.url + path, json=body, **options) as response:
            yield response

    async def chat(self, **fields: Any) -> tuple[int, Any]:
        """Status and document of a chat completion that needs nothing of the mesh."""
        async with self.post(CHAT_PATH, CHAT | fields) as response:
            return response.status, await response.json()

    async def start_chat(self, **fields: Any) -> tuple[asyncio.Task[tuple[int, Any]], FakeRequest]:
        """A chat completion in progress, and the mesh's side of it."""
        asking = asyncio.create_task(self.chat(**fields))
        return asking, await self.fake.next_request()

    async def open_stream(
        self, body: dict[str, Any], path: str = CHAT_PATH
    ) -> tuple[aiohttp.ClientResponse, FakeRequest]:
        """A stream that has begun, and the mesh's side of it."""
        asking = asyncio.create_task(self.http.post(self.url + path, json=body | {"stream": True}))
        request = await self.fake.next_request()
        await request.accept()
        return await asking, request

    async def nothing_is_left(self) -> None:
        """Wait until no request and no answer is open."""
        await self.until(lambda: len(self.mesh.requests) == 0 and self.gateway.server.num_answering == 0)


@asynccontextmanager
async def running_gateway(
    *,
    max_payload: int = 1 << 20,
    starts_mesh: bool = True,
    logs_content: bool = False,
    tracing: Tracing | None = None,
    age_s: float = 60.0,
    **settings: Any,
) -> AsyncIterator[Harness]:
    """A gateway with these settings, on a free port; it began `age_s` seconds ago."""
    tracing = tracing or Tracing(SpanStore(100), sample_ratio=1.0)
    broker, clock = MemoryBroker(max_payload=max_payload), FakeClock(1000.0)
    transport, fake = MemoryTransport(broker), FakeMesh(broker)
    await transport.connect()
    identity = Identity(Service.GATEWAY, new_instance_id(Service.GATEWAY), "gateway")
    config = GatewayConfig(port=0, **settings)
    gateway = Gateway(identity, transport, clock, config, logs_content=logs_content, tracing=tracing)
    clock.advance(age_s)
    await Answering(identity, transport, tracing).start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(transport.close)
        await stack.enter_async_context(gateway)
        running = asyncio.create_task(gateway.run())
        stack.push_async_callback(_end, running)
        stack.push_async_callback(fake.stop)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        harness = Harness(gateway, fake, clock, http, transport, running, tracing)
        if starts_mesh:
            await fake.start()
            await harness.settle()
        yield harness


async def _end(running: asyncio.Task[None]) -> None:
    """Stop the actor's loop; whatever it raised fails the test."""
    if not running.done():
        running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def next_event(response: aiohttp.ClientResponse) -> str:
    """The data of the next event of a stream, as soon as it is there."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            line = await response.content.readline()
            assert line, "the stream has ended"
            if line.startswith(b"data: "):
                await response.content.readline()  # the empty one that ends an event
                return line[6:].decode().strip()


async def events_of(response: aiohttp.ClientResponse) -> list[str]:
    """The data of each event of a stream, to its end."""
    return [
        block.removeprefix("data: ") for block in (await response.text()).split("\n\n") if block.startswith("data: ")
    ]


def text_of(events: list[str]) -> str:
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk.get("choices", []))


def assert_ended_once(events: list[str], *, error: str | None = None, reason: str | None = None) -> None:
    """One `[DONE]`, at the end; before it exactly one finish reason, or exactly one error."""
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    documents = [json.loads(event) for event in events[:-1]]
    errors = [document["error"]["code"] for document in documents if "error" in document]
    reasons = [choice["finish_reason"] for document in documents for choice in document.get("choices", [])]
    assert errors == ([error] if error else [])
    assert [given for given in reasons if given] == ([reason] if reason else [])
    if error:
        assert "error" in documents[-1]
