"""One executor that runs, two schedulers that talk to it, and time that stands still."""

import asyncio

from services.executor.service import Executor
from shared.actor import Identity, Tick
from shared.clock import FakeClock
from shared.ids import InstanceId, Service
from shared.messages import StepCompleted
from shared.telemetry.store import SpanStore
from shared.telemetry.tracing import Tracing
from shared.transport.memory import MemoryBroker, MemoryTransport
from tests.executor.fakes import WAIT_S, FakeRunner, FakeScheduler

EXECUTOR_ID = InstanceId("executor-1")


class Stage:
    """One executor that runs, two schedulers, and time that stands still."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.clock = FakeClock()
        self.runner = FakeRunner()
        self.transport = MemoryTransport(self.broker)
        identity = Identity(Service.EXECUTOR, EXECUTOR_ID, "an executor")
        self.tracing = Tracing(SpanStore(100))
        self.executor = Executor(identity, self.transport, self.clock, self.runner, tracing=self.tracing)
        self.a, self.b = (FakeScheduler(self.broker, name, EXECUTOR_ID) for name in "ab")
        self.running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        for part in (self.transport.connect(), self.a.start(), self.b.start()):
            await part
        await self.executor.__aenter__()
        self.running = asyncio.create_task(self.executor.run())

    async def stop(self) -> None:
        assert self.running is not None
        self.runner.gate.set()
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.executor.__aexit__(None, None, None)
        for transport in (self.transport, self.a.transport, self.b.transport):
            await transport.close()

    async def finish(self) -> None:
        """Return when the executor has left of its own accord; raise what it raises."""
        assert self.running is not None
        await asyncio.wait_for(asyncio.shield(self.running), WAIT_S)

    async def pass_time(self, seconds: float, *beating: FakeScheduler) -> None:
        """Let time pass in small steps, during which these schedulers beat and the executor ticks."""
        steps = round(seconds / 0.25)
        for _ in range(steps):
            self.clock.advance(0.25)
            for scheduler in beating:
                await scheduler.beat()
            await self.settle()
            self.executor.post(Tick())

    async def settle(self) -> None:
        """Return when everything sent so far has been handled."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def run_plans(self, scheduler: FakeScheduler, epoch: int, first: int, last: int) -> None:
        """Send plans and take their results."""
        for step_id in range(first, last + 1):
            await scheduler.send_plan(epoch, step_id)
            assert (await scheduler.receive(StepCompleted)).result.step_id == step_id
