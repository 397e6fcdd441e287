"""An actor that keeps what it was told, in a world that a test can look at."""

import asyncio
from collections.abc import Awaitable, Callable

from shared import subjects
from shared.actor import Actor, Identity, Tick
from shared.clock import FakeClock
from shared.codec import Decoder, encode
from shared.errors import ShoalError
from shared.ids import InstanceId, Service
from shared.messages import AttachExecutor, DetachExecutor, DetokenizerStatus, Presence, Status
from shared.transport import Transport
from shared.transport.memory import MemoryBroker, MemoryTransport
from tests.shared.transport.receiver import PATIENCE_S, Receiver

ME = Identity(Service.DETOKENIZER, InstanceId("detokenizer-1"), "detok")
INBOX = subjects.inbox(ME.instance_id)
Inbound = AttachExecutor | DetachExecutor


class Boom(ShoalError):
    pass


class RecordingActor(Actor[Inbound]):
    """Keeps what it was told, in order; can be made to block, to fail and to stay busy."""

    tick_interval_s = 0.01
    mailbox_size = 8

    def __init__(self, transport: Transport, clock: FakeClock) -> None:
        super().__init__(ME, transport, Inbound, clock)
        self.events: list[str] = []
        self.changed = asyncio.Condition()
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_ticks = 0
        self.is_busy = False
        self.status_error: Exception | None = None
        self.on_idle_hook: Callable[[], None] = lambda: None

    async def handle(self, message: Inbound | Tick) -> None:
        if isinstance(message, Tick):
            self.num_ticks += 1
            await self.note(None)
            return
        name = str(getattr(message, "scheduler_id"))  # noqa: B009
        await self.note(f"begin {name}")
        await self.gate.wait()
        if name == "boom":
            raise Boom(name)
        await self.note(f"end {name}")

    async def on_start(self) -> None:
        await self.note("start")

    async def on_idle(self) -> None:
        if self.events[-1:] != ["idle"]:
            await self.note("idle")
        self.on_idle_hook()

    async def on_stop(self) -> None:
        await self.note("stop")

    def is_idle(self) -> bool:
        return not self.is_busy

    def status(self) -> Status:
        if self.status_error is not None:
            raise self.status_error
        return DetokenizerStatus(num_open_choices=3)

    def models(self) -> tuple[str, ...]:
        return ("tiny",)

    async def note(self, event: str | None) -> None:
        async with self.changed:
            if event is not None:
                self.events.append(event)
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(condition)


class World:
    """An actor on a broker, its clock, and somebody else on the same broker."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.clock = FakeClock()
        self.transport, self.other = MemoryTransport(broker), MemoryTransport(broker)
        self.actor = RecordingActor(self.transport, self.clock)
        self.beats = Receiver()

    async def tell(self, name: str) -> None:
        await self.other.publish(INBOX, encode(AttachExecutor(InstanceId(name))))

    def beat(self, number: int) -> Presence:
        return Decoder[Presence](Presence).decode(self.beats.payloads[number])


async def finished(running: Awaitable[None]) -> None:
    await asyncio.wait_for(running, PATIENCE_S)
