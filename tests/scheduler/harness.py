"""What the tests of the scheduler service share: an in-memory broker, and an executor, a detokenizer and a gateway
played by the test."""

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

from services.scheduler.config import SchedulerConfig
from services.scheduler.service import SchedulerService
from shared import subjects
from shared.actor import Identity, Tick
from shared.clock import FakeClock
from shared.codec import Decoder, encode
from shared.ids import InstanceId, RequestId, Service
from shared.messages import (
    AttachExecutor,
    ChoiceTokens,
    DecodeTokens,
    DetachExecutor,
    DetokenizerStatus,
    ExecutorAttached,
    ExecutorStatus,
    GatewayStatus,
    Message,
    Presence,
    RequestAccepted,
    RequestAdopted,
    RequestClosed,
    RequestFound,
    RequestMoved,
    RequestOpened,
    RequestRefused,
    RequestReleased,
    RequestUnknown,
    RunStep,
    StepCompleted,
    SubmitTokens,
    TextOptions,
)
from shared.sampling import SamplingParams
from shared.telemetry.store import SpanStore
from shared.telemetry.tracing import Tracing
from shared.transport.memory import MemoryBroker, MemoryTransport
from tests.scheduler.driver import make_capacity
from tests.scheduler.fake_executor import FakeExecutor

SCHEDULER = InstanceId("scheduler-1")
EXECUTOR = InstanceId("executor-1")
GATEWAY = InstanceId("gateway-1")
DETOKENIZER = InstanceId("detokenizer-1")
PROMPT = list(range(1, 12))
PATIENCE_S = 30.0


class Peer:
    """Another instance: remembers what it was sent."""

    def __init__(self, broker: MemoryBroker, instance_id: InstanceId, kinds: Any) -> None:
        self.instance_id = instance_id
        self.transport = MemoryTransport(broker)
        self.received: list[Any] = []
        self._decoder: Decoder[Any] = Decoder(kinds)

    async def start(self) -> None:
        await self.transport.connect()
        await self.transport.subscribe(subjects.inbox(self.instance_id), self._on_message)

    async def _on_message(self, payload: bytes, _headers: object) -> None:
        message = self._decoder.decode(payload)
        self.received.append(message)
        await self.react(message)

    async def react(self, message: Any) -> None:
        """What the peer does about it: nothing."""

    async def send(self, message: Message, to: InstanceId = SCHEDULER) -> None:
        await self.transport.publish(subjects.inbox(to), encode(message))

    async def beat(self, service: Service, status: Any, **fields: Any) -> None:
        presence = Presence(service, self.instance_id, self.instance_id, ("model",), status, **fields)
        await self.transport.publish(subjects.presence(service), encode(presence))

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.received if isinstance(message, kind)]


class ExecutorPeer(Peer):
    """Runs plans on fingerprints. `is_working` off: plans pile up."""

    def __init__(self, broker: MemoryBroker, instance_id: InstanceId = EXECUTOR) -> None:
        super().__init__(broker, instance_id, AttachExecutor | RunStep | DetachExecutor)
        self.capacity = make_capacity()
        self.fake = FakeExecutor(self.capacity)
        self.epoch = 1
        self.is_working = True

    async def react(self, message: Any) -> None:
        if isinstance(message, AttachExecutor):
            await self.send(ExecutorAttached(self.instance_id, self.epoch, self.capacity), message.scheduler_id)
        elif isinstance(message, RunStep) and self.is_working:
            await self.run(message)

    async def run(self, message: RunStep) -> None:
        await self.send(StepCompleted(self.instance_id, message.epoch, self.fake.run(message.plan)))

    async def announce(self, held_by: InstanceId | None = None, **fields: Any) -> None:
        await self.beat(Service.EXECUTOR, ExecutorStatus(held_by=held_by, epoch=self.epoch), **fields)

    def restart(self) -> None:
        self.fake = FakeExecutor(self.capacity)
        self.epoch += 1


class DetokenizerPeer(Peer):
    """Puts the logs together."""

    def __init__(self, broker: MemoryBroker, instance_id: InstanceId = DETOKENIZER) -> None:
        super().__init__(broker, instance_id, DecodeTokens)

    async def announce(self, **fields: Any) -> None:
        await self.beat(Service.DETOKENIZER, DetokenizerStatus(), **fields)

    def entries(self, request_id: str) -> list[ChoiceTokens]:
        return [e for batch in self.of(DecodeTokens) for e in batch.tokens if e.request_id == request_id]

    def opened(self, request_id: str) -> list[RequestOpened]:
        return [o for batch in self.of(DecodeTokens) for o in batch.opened if o.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        log: list[int] = []
        for entry in self.entries(request_id):
            log[entry.offset :] = entry.token_ids
        return log

    def closed(self, request_id: str | None = None) -> list[RequestClosed]:
        return [c for batch in self.of(DecodeTokens) for c in batch.closed if request_id in (None, c.request_id)]


class GatewayPeer(Peer):
    """Remembers what schedulers answer."""

    def __init__(self, broker: MemoryBroker, instance_id: InstanceId) -> None:
        super().__init__(
            broker,
            instance_id,
            RequestAccepted
            | RequestRefused
            | RequestUnknown
            | RequestReleased
            | RequestMoved
            | RequestFound
            | RequestAdopted,
        )

    async def announce(self, **fields: Any) -> None:
        await self.beat(Service.GATEWAY, GatewayStatus("127.0.0.1:1"), **fields)


class Mesh:
    """A scheduler service, its peers, and a clock that only the test moves."""

    def __init__(self, config: SchedulerConfig, max_payload: int) -> None:
        self.broker = MemoryBroker(max_payload=max_payload)
        self.clock = FakeClock()
        self.executor = ExecutorPeer(self.broker)
        self.detokenizer = DetokenizerPeer(self.broker)
        self.gateway = GatewayPeer(self.broker, GATEWAY)
        self.transport = MemoryTransport(self.broker)
        identity = Identity(Service.SCHEDULER, SCHEDULER, "scheduler-1")
        self.tracing = Tracing(SpanStore(100))
        self.service = SchedulerService(identity, self.transport, self.clock, config, tracing=self.tracing)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110  # the condition is anything, not one event
                await asyncio.sleep(0.001)

    async def settle(self) -> None:
        """Let everything that was sent be handled: everything is in this process, so rounds of the loop suffice."""
        num_quiet_rounds = 0
        while num_quiet_rounds < 20:
            await asyncio.sleep(0)
            num_quiet_rounds = 0 if self.broker.num_undelivered else num_quiet_rounds + 1

    async def pass_time(self, seconds: float) -> None:
        """Move the clock in small steps, and let the scheduler notice each."""
        target = self.clock.now() + seconds
        while self.clock.now() < target:
            self.clock.advance(0.25)
            self.service.post(Tick())
            await self.settle()

    async def ready(self) -> None:
        await self.detokenizer.announce()
        await self.executor.announce()
        await self.until(lambda: self.service.models() == ("model",))
        await self.settle()

    async def submit(self, name: str, **fields: Any) -> None:
        await self.gateway.send(submission(name, **fields))


def submission(
    name: str,
    *,
    prompt: list[int] = PROMPT,
    max_tokens: int | None = 5,
    seed: int = 0,
    num_choices: int = 1,
    end_token_ids: tuple[int, ...] = (),
    tenant: str = "a",
    num_logprobs: int | None = None,
    priority: int = 0,
    timeout_ms: int | None = None,
    **fields: Any,
) -> SubmitTokens:
    return SubmitTokens(
        request_id=RequestId(name),
        gateway_id=GATEWAY,
        model="model",
        tenant=tenant,
        prompt_token_ids=array("i", prompt),
        sampling=SamplingParams(seed=seed, end_token_ids=end_token_ids, num_logprobs=num_logprobs),
        text=TextOptions(),
        num_choices=num_choices,
        max_tokens=max_tokens,
        priority=priority,
        timeout_ms=timeout_ms,
        **fields,
    )
