"""A whole mesh in one process: the five real services on an in-memory broker, the gateway on a real port.

Everything is as in a mesh of processes but for the processes: messages are encoded, sent and decoded, the model runs,
clients connect over HTTP and WebSockets.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from msgspec.structs import replace

from services.detokenizer.decoding import load_decoding
from services.detokenizer.service import DetokenizerService
from services.executor.config import ExecutorConfig
from services.executor.factory import load
from services.executor.model_runner import ModelRunner
from services.executor.service import Executor
from services.executor.step_thread import Runner
from services.gateway.config import GatewayConfig
from services.gateway.service import Gateway
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import SchedulerService
from services.tokenizer.encoding import load_encoder
from services.tokenizer.service import TokenizerService
from shared.actor import Actor, Identity
from shared.clock import SystemClock
from shared.ids import InstanceId, Service
from shared.messages import StepPlan, StepResult
from shared.presence import DEAD_AFTER_S
from shared.telemetry.answering import Answering
from shared.telemetry.store import SpanStore
from shared.telemetry.tracing import Exporter, Tracing
from shared.transport.memory import MemoryBroker, MemoryTransport

MODEL = "model"
PATIENCE_S = 60.0


class InProcessMesh:
    """The running services, and a client's ways in."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.broker = MemoryBroker()
        self.session = session
        self._ready_at = 0.0
        self.gateway: Gateway
        self.scheduler: SchedulerService
        self.detokenizer: DetokenizerService
        self.executor: Executor
        self.tokenizer: TokenizerService
        self.tracings: dict[Service, Tracing] = {}

    @property
    def actors(self) -> list[Actor[Any]]:
        """All of them."""
        return [self.scheduler, self.executor, self.detokenizer, self.tokenizer, self.gateway]

    @property
    def url(self) -> str:
        """The gateway's address."""
        return self.gateway.server.address

    async def until_ready(self) -> None:
        """Return when a request would be served."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with self.session.get(f"{self.url}/readyz") as answer:
                    if answer.status == 200:
                        self._ready_at = self._ready_at or time.monotonic()
                        return
                await asyncio.sleep(0.02)

    async def until_models_are_known(self) -> None:
        """Return when the gateway has listened for so long that it may say of a model that there is none."""
        await asyncio.sleep(self._ready_at + DEAD_AFTER_S - time.monotonic())

    async def until_idle(self) -> None:
        """Return when no service has anything left of any request, and nothing is computed any more."""
        async with asyncio.timeout(PATIENCE_S):
            while not (  # noqa: ASYNC110
                self.scheduler.is_idle() and self.detokenizer.is_idle() and self.gateway.is_idle()
            ) or any(attachment.unanswered for attachment in self.scheduler._attachments):
                await asyncio.sleep(0.01)

    async def complete(self, **body: Any) -> dict[str, Any]:
        """The answer to one completion that is not streamed."""
        async with self.session.post(f"{self.url}/v1/completions", json={"model": MODEL, **body}) as answer:
            assert answer.status == 200, await answer.text()
            parsed: dict[str, Any] = await answer.json()
            return parsed

    async def stream_all(self, bodies: Sequence[dict[str, Any]]) -> list["Streamed"]:
        """All of several requests, streamed at once over one WebSocket, each with its token ids."""
        streamed = [Streamed() for _ in bodies]
        by_request_id: dict[str, Streamed] = {}
        async with self.session.ws_connect(f"{self.url}/v1/stream", max_msg_size=0) as socket:
            for number, body in enumerate(bodies):
                body = {"model": MODEL, **body}
                await socket.send_json({"type": "request.create", "id": str(number), "token_ids": True, "body": body})
            while not all(stream.end for stream in streamed):
                message = await socket.receive_json(timeout=120)
                if message["type"] == "request.accepted":
                    by_request_id[message["request_id"]] = streamed[int(message["id"])]
                elif "id" in message:
                    streamed[int(message["id"])].take(message)
                else:
                    by_request_id[message["request_id"]].take(message)
        return streamed


@dataclass
class Streamed:
    """What came for one request."""

    text: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    end: dict[str, Any] | None = None

    def take(self, message: dict[str, Any]) -> None:
        """Take in a delta or the end."""
        assert self.end is None, f"{message['type']} after {self.end['type'] if self.end else None}"
        if message["type"] != "request.delta":
            self.end = message
            return
        index = message["index"]
        assert message["offset"] == len(self.text.setdefault(index, "")), "a hole or a repetition in the text"
        self.text[index] += message["text"]
        self.token_ids.setdefault(index, []).extend(message["token_ids"])


@asynccontextmanager
async def in_process_mesh(
    folder: Path,
    runner: Runner,
    *,
    scheduler: SchedulerConfig | None = None,
    gateway: GatewayConfig | None = None,
    exporters: Callable[[Identity], Exporter | None] = lambda _identity: None,
    sample_ratio: float = 1.0,
) -> AsyncIterator[InProcessMesh]:
    """A mesh that serves the model in `folder`, which `runner` has loaded, as MODEL. Every service keeps its spans;
    `exporters` makes what exports them."""
    runner.reset()
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300))
        )
        mesh, clock = InProcessMesh(session), SystemClock()

        async def parts(service: Service) -> tuple[Identity, MemoryTransport]:
            transport = MemoryTransport(mesh.broker)
            await transport.connect()
            stack.push_async_callback(transport.close)
            identity = Identity(service, InstanceId(f"{service}-1"), f"{service}-1")
            tracing = Tracing(SpanStore(1000), exporters(identity), sample_ratio=sample_ratio)
            await Answering(identity, transport, tracing).start()
            mesh.tracings[service] = tracing
            return identity, transport

        mesh.scheduler = SchedulerService(
            *await parts(Service.SCHEDULER),
            clock,
            scheduler or SchedulerConfig(),
            tracing=mesh.tracings[Service.SCHEDULER],
        )
        mesh.executor = Executor(*await parts(Service.EXECUTOR), clock, runner, tracing=mesh.tracings[Service.EXECUTOR])
        mesh.detokenizer = DetokenizerService(
            *await parts(Service.DETOKENIZER),
            clock,
            model=MODEL,
            decoding=load_decoding(folder),
            max_open_choices=4096,
            max_silence_s=900,
            tracing=mesh.tracings[Service.DETOKENIZER],
        )
        mesh.tokenizer = TokenizerService(
            *await parts(Service.TOKENIZER),
            clock,
            model=MODEL,
            encoder=load_encoder(folder, max_model_len=None),
            inline_chars=4096,
            max_waiting_prompts=32,
            tracing=mesh.tracings[Service.TOKENIZER],
        )
        mesh.gateway = Gateway(
            *await parts(Service.GATEWAY),
            clock,
            gateway or GatewayConfig(port=0),
            tracing=mesh.tracings[Service.GATEWAY],
        )
        actors = mesh.actors
        for actor in actors:
            await stack.enter_async_context(actor)
        running = [asyncio.create_task(actor.run(), name=actor.identity.name) for actor in mesh.actors]
        try:
            await mesh.until_ready()
            yield mesh
        finally:
            for actor in mesh.actors:
                actor.drain(0)
            await asyncio.gather(*running)


class FewBlocks:
    """A runner that says it has fewer blocks than it has."""

    def __init__(self, runner: Runner, num_blocks: int) -> None:
        self._runner = runner
        self.device = runner.device
        self.capacity = replace(
            runner.capacity, num_blocks=num_blocks, max_model_len=num_blocks * runner.capacity.block_size
        )

    def reset(self) -> None:
        """As the runner itself."""
        self._runner.reset()

    def run(self, plan: StepPlan) -> StepResult:
        """As the runner itself."""
        return self._runner.run(plan)


def load_runner(folder: Path, settings: ExecutorConfig) -> ModelRunner:
    """The model in `folder`, loaded as MODEL, its kernels compiled: the first test does not wait for that."""
    runner = load(folder, MODEL, settings)
    runner.warm_up()
    return runner
