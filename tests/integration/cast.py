"""A mesh in one process with several of each service, which a test kills, freezes, thaws or lets leave one by one.

The services are the real ones, over the in-memory broker or over NATS. Dead means: gone without a word. Frozen means:
what arrives waits, nothing is handled and no beat is sent, until it thaws.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from services.detokenizer.decoding import load_decoding
from services.detokenizer.service import DetokenizerService
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
from shared.ids import Service, new_instance_id
from shared.telemetry.answering import Answering
from shared.telemetry.store import SpanStore
from shared.telemetry.tracing import Exporter, Tracing
from shared.transport import Transport

MODEL = "model"
PATIENCE_S = 30.0


class Player:
    """One instance of one service."""

    def __init__(self, actor: Actor[Any], transport: Transport) -> None:
        self.actor = actor
        self.transport = transport
        self.is_gone = False
        self._gate = asyncio.Event()
        self._gate.set()
        self._running: asyncio.Task[None] | None = None
        for name in ("handle", "on_idle", "_beat"):
            setattr(actor, name, self._gated(getattr(actor, name)))

    @property
    def status(self) -> Any:
        """What its next beat would say."""
        return self.actor.status()

    async def start(self) -> None:
        """Begin to play."""
        await self.transport.connect()
        await self.actor.__aenter__()
        self._running = asyncio.create_task(self.actor.run(), name=self.actor.identity.name)

    def check(self) -> None:
        """Raise what ended it, if anything did."""
        if self._running is not None and self._running.done() and not self.is_gone:
            self._running.result()
            raise AssertionError(f"{self.actor.identity.name} has stopped by itself")

    async def kill(self) -> None:
        """Vanish without a word."""
        self._gate.set()
        async with asyncio.timeout(PATIENCE_S):
            await self._end_tasks()
        if isinstance(self.actor, Gateway):
            self._cut_connections(self.actor)
        async with asyncio.timeout(PATIENCE_S):
            await self.transport.close()
        async with asyncio.timeout(PATIENCE_S):
            await self.actor.on_stop()  # says nothing any more: only threads and sockets are given back

    def freeze(self) -> None:
        """Stand still."""
        self._gate.clear()

    def thaw(self) -> None:
        """Go on as if nothing had been."""
        self._gate.set()

    async def leave(self, deadline_s: float = 20.0) -> None:
        """Drain, and leave in order."""
        assert self._running is not None
        self.actor.drain(deadline_s)
        await self._running
        await self.actor.__aexit__(None, None, None)
        await self.transport.close()
        self.is_gone = True

    async def _end_tasks(self) -> None:
        assert self._running is not None
        self.is_gone = True
        tasks = [self._running, *self.actor._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _gated(self, method: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def wait_and_do(*args: Any, **kwargs: Any) -> None:
            await self._gate.wait()
            await method(*args, **kwargs)

        return wait_and_do

    @staticmethod
    def _cut_connections(gateway: Gateway) -> None:
        runner = gateway.server._runner
        assert runner is not None
        assert runner.server is not None
        for connection in runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()


@dataclass
class Streamed:
    """What came for one request, over however many connections."""

    request_id: str = ""
    text: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    accepted_at: float = 0.0
    ended_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(map(len, self.token_ids.values()))

    def take(self, message: dict[str, Any]) -> None:
        """Take in a delta or the end."""
        assert self.end is None, f"{message['type']} after {self.end['type'] if self.end else None}"
        if message["type"] != "request.delta":
            self.end, self.ended_at = message, time.monotonic()
            return
        index = message["index"]
        assert message["offset"] == len(self.text.setdefault(index, "")), "a hole or a repetition in the text"
        self.text[index] += message["text"]
        self.token_ids.setdefault(index, []).extend(message["token_ids"])
        self.logprobs.setdefault(index, []).extend(message.get("logprobs", []))

    def output(self) -> dict[str, Any]:
        """All that must not depend on what happened meanwhile."""
        assert self.end is not None
        assert self.end["type"] == "request.completed", self.end
        usage = {name: self.end["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "logprobs": self.logprobs,
            "choices": self.end["choices"],
            "usage": usage,
        }


Disturbance = Callable[[list[Streamed]], Coroutine[Any, Any, None]]
"""What happens beside streams, given what has come of them so far."""


class Cast:
    """All players of a mesh, and a client's way in."""

    def __init__(self, folder: Path, runners: Sequence[Runner], connect: Callable[[str], Transport]) -> None:
        self.session: aiohttp.ClientSession
        self.players: dict[Service, list[Player]] = {service: [] for service in Service}
        self.gateway_config = GatewayConfig(port=0)
        self.scheduler_config = SchedulerConfig()
        self.exporters: Callable[[Identity], Exporter | None] = lambda _identity: None
        """Make what exports the spans of an instance; all keep them besides."""
        self._folder = folder
        self._runners = list(runners)
        self._connect = connect

    def of(self, service: Service) -> list[Player]:
        """The players of a service that are there."""
        return [player for player in self.players[service] if not player.is_gone]

    def url(self, number: int = 0) -> str:
        """The address of one of the gateways that are there."""
        address: str = self.of(Service.GATEWAY)[number].actor.server.address  # type: ignore[attr-defined]
        return address

    async def add(self, service: Service) -> Player:
        """One more of a service."""
        identity = Identity(service, new_instance_id(service), str(service))
        transport = self._connect(identity.instance_id)
        tracing = Tracing(SpanStore(1000), self.exporters(identity), sample_ratio=1.0)
        player = Player(self._make(service, identity, transport, tracing), transport)
        self.players[service].append(player)
        await player.start()
        await Answering(identity, transport, tracing).start()
        return player

    def _make(self, service: Service, identity: Identity, transport: Transport, tracing: Tracing) -> Actor[Any]:
        clock = SystemClock()
        match service:
            case Service.GATEWAY:
                return Gateway(identity, transport, clock, self.gateway_config, tracing=tracing)
            case Service.SCHEDULER:
                return SchedulerService(identity, transport, clock, self.scheduler_config, tracing=tracing)
            case Service.EXECUTOR:
                runner = self._runners.pop()
                runner.reset()
                return Executor(identity, transport, clock, runner, tracing=tracing)
            case Service.DETOKENIZER:
                return DetokenizerService(
                    identity,
                    transport,
                    clock,
                    model=MODEL,
                    decoding=load_decoding(self._folder),
                    max_open_choices=4096,
                    max_silence_s=5.0,
                    tracing=tracing,
                )
            case Service.TOKENIZER:
                return TokenizerService(
                    identity,
                    transport,
                    clock,
                    model=MODEL,
                    encoder=load_encoder(self._folder, max_model_len=None),
                    inline_chars=4096,
                    max_waiting_prompts=32,
                    tracing=tracing,
                )

    async def until(self, condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
        """Return when something is so."""
        async with asyncio.timeout(patience_s):
            while not condition():  # noqa: ASYNC110  # the condition is anything, not one event
                await asyncio.sleep(0.01)

    async def until_ready(self, gateway: int = 0) -> None:
        """Return when a request would be served."""
        report = ""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    async with self.session.get(f"{self.url(gateway)}/readyz") as answer:
                        report = await answer.text()
                        if answer.status == 200:
                            return
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not ready: {report}, {self.statuses()}") from None

    def holder(self) -> Player:
        """The scheduler that has most requests."""
        return max(self.of(Service.SCHEDULER), key=lambda one: one.status.num_open_requests)

    async def until_nothing_is_left(self) -> None:
        """Return when nobody who is there has anything of any request; also all blocks are free."""

        def is_nothing_left() -> bool:
            gateways = all(one.status.num_open_requests == 0 for one in self.of(Service.GATEWAY))
            detokenizers = all(one.status.num_open_requests == 0 for one in self.of(Service.DETOKENIZER))
            schedulers = all(
                one.status.num_open_requests == one.status.num_running == one.status.num_waiting == 0
                and all(view.num_free_blocks == view.num_blocks for view in one.status.executors)
                for one in self.of(Service.SCHEDULER)
            )
            return gateways and detokenizers and schedulers

        try:
            await self.until(is_nothing_left)
        except TimeoutError:
            raise AssertionError(f"something is left: {self.statuses()}") from None

    def statuses(self) -> list[Any]:
        """What all who are there say of themselves. Raises what ended one of them that should be there."""
        for service in Service:
            for one in self.of(service):
                one.check()
        return [(one.actor.identity.instance_id, one.status) for service in Service for one in self.of(service)]

    async def stream_all(self, bodies: Sequence[dict[str, Any]], disturb: Disturbance | None = None) -> list[Streamed]:
        """All of several requests, streamed at once over one WebSocket, each with its token ids.

        `disturb` runs beside, and is given what has come so far.
        """
        streamed = [Streamed() for _ in bodies]
        disturbing = asyncio.create_task(disturb(streamed)) if disturb is not None else None
        async with self.session.ws_connect(f"{self.url()}/v1/stream", max_msg_size=0) as socket:
            for number, body in enumerate(bodies):
                await socket.send_json(create(number, body))
            try:
                await follow(socket, streamed)
            except TimeoutError:
                waiting = [one.request_id for one in streamed if one.end is None]
                raise AssertionError(f"nothing comes for {waiting}: {self.statuses()}") from None
        if disturbing is not None:
            await disturbing
        return streamed

    async def resume_all(self, streamed: Sequence[Streamed], gateway: int = 0) -> None:
        """Go on, over a new connection to a gateway that is there, with what has not ended."""
        async with self.session.ws_connect(f"{self.url(gateway)}/v1/stream", max_msg_size=0) as socket:
            for number, stream in enumerate(streamed):
                if stream.end is None:
                    await socket.send_json(resume(number, stream))
            await follow(socket, streamed)


def create(number: int, body: dict[str, Any]) -> dict[str, Any]:
    """The message that asks for a request."""
    return {"type": "request.create", "id": str(number), "token_ids": True, "body": {"model": MODEL, **body}}


def resume(number: int, stream: Streamed) -> dict[str, Any]:
    """The message that asks to go on with a request after all that has come of it."""
    choices = range(max(stream.text, default=-1) + 1)
    return {
        "type": "request.resume",
        "id": str(number),
        "request_id": stream.request_id,
        "offset": [len(stream.text.get(index, "")) for index in choices],
        "token_offset": [len(stream.token_ids.get(index, [])) for index in choices],
    }


class Disconnected(Exception):
    """The connection has ended before all requests on it had."""


async def follow(socket: aiohttp.ClientWebSocketResponse, streamed: Sequence[Streamed]) -> None:
    """Take in what comes on a socket until all requests have ended. Raises Disconnected when the connection does."""
    by_request_id = {stream.request_id: stream for stream in streamed if stream.request_id}
    while not all(stream.end for stream in streamed):
        frame = await socket.receive(timeout=PATIENCE_S)
        if frame.type is not aiohttp.WSMsgType.TEXT:
            raise Disconnected(frame.data)
        message = frame.json()
        if message["type"] == "request.accepted":
            stream = streamed[int(message["id"])]
            stream.request_id = message["request_id"]
            stream.accepted_at = stream.accepted_at or time.monotonic()
            by_request_id[stream.request_id] = stream
        elif message["type"] == "going_away":
            pass
        elif message.get("request_id") in by_request_id:
            by_request_id[message["request_id"]].take(message)
        else:
            streamed[int(message["id"])].take(message)


@asynccontextmanager
async def cast(
    folder: Path,
    runners: Sequence[Runner],
    connect: Callable[[str], Transport],
    *,
    gateway: GatewayConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    exporters: Callable[[Identity], Exporter | None] | None = None,
    **counts: int,
) -> AsyncIterator[Cast]:
    """A mesh that serves the model in `folder` as MODEL. Two of each service, or as `counts` say; an executor for each
    of `runners` that have loaded the model. `connect` makes the transport of an instance."""
    async with AsyncExitStack() as stack:
        mesh = Cast(folder, runners, connect)
        mesh.gateway_config = gateway or mesh.gateway_config
        mesh.scheduler_config = scheduler or mesh.scheduler_config
        mesh.exporters = exporters or mesh.exporters
        mesh.session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300))
        )
        try:
            for service in Service:
                count = len(runners) if service is Service.EXECUTOR else counts.get(service, 2)
                for _ in range(count):
                    await mesh.add(service)
            await mesh.until_ready()
            yield mesh
        finally:
            for players in mesh.players.values():
                for player in players:
                    if not player.is_gone:
                        await player.kill()
