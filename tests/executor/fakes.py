"""A runner that computes nothing, and a scheduler that only talks: what the service's tests put around an executor."""

import asyncio
import threading
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from shared import subjects
from shared.codec import Decoder, encode
from shared.ids import InstanceId, Service
from shared.messages import (
    AttachExecutor,
    ExecutorAttached,
    ExecutorCapacity,
    Message,
    Presence,
    RunStep,
    SchedulerInbound,
    SchedulerStatus,
    StepPlan,
    StepResult,
    int32s,
)
from shared.transport.memory import MemoryBroker, MemoryTransport

CAPACITY: Final = ExecutorCapacity(
    model="tiny", num_blocks=10, block_size=4, max_slots=3, max_model_len=40, max_step_tokens=12
)
WAIT_S: Final = 30.0
"""Longer than anything here takes."""

M = TypeVar("M", bound=Message)


def plan(step_id: int, *counts: int) -> StepPlan:
    """A plan that a fake runner can tell from others."""
    return StepPlan(step_id=step_id, counts=int32s(counts))


class FakeRunner:
    """Notes what it is asked for. While the gate is closed, a plan that has started does not finish."""

    capacity = CAPACITY
    device = "fake"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)
        """Released once for each plan that starts."""
        self.error: BaseException | None = None
        self.guesses = False
        """Whether a step guesses three tokens, of which one is right."""

    def reset(self) -> None:
        self.calls.append("reset")

    def run(self, plan: StepPlan) -> StepResult:
        self.calls.append(f"run {plan.step_id}")
        self.started.release()
        assert self.gate.wait(WAIT_S), "nobody opened the gate"
        if self.error is not None:
            raise self.error
        result = StepResult(plan.step_id, int32s([100 + plan.step_id]), duration_s=0.5)
        if self.guesses:
            return replace(result, token_ids=int32s([1, 2]), num_tokens=int32s([2]), num_drafted=int32s([3]))
        return result

    async def wait_until_started(self) -> None:
        """Return when one more plan has started."""
        assert await asyncio.to_thread(self.started.acquire, timeout=WAIT_S), "no plan started"


class FakeScheduler:
    """One scheduler's inbox and voice."""

    def __init__(self, broker: MemoryBroker, name: str, executor_id: InstanceId) -> None:
        self.id = InstanceId(f"scheduler-{name}")
        self.transport = MemoryTransport(broker)
        self._executor_id = executor_id
        self._decoder: Decoder[Any] = Decoder(SchedulerInbound)
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()

    async def start(self) -> None:
        """Connect and listen."""
        await self.transport.connect()

        async def deliver(payload: bytes, _headers: object) -> None:
            self._inbox.put_nowait(self._decoder.decode(payload))

        await self.transport.subscribe(subjects.inbox(self.id), deliver)

    async def tell(self, message: Message) -> None:
        """Send the executor a message."""
        await self.transport.publish(subjects.inbox(self._executor_id), encode(message))

    async def send_plan(self, epoch: int, step_id: int, *counts: int) -> None:
        """Send the executor a plan."""
        await self.tell(RunStep(epoch, plan(step_id, *counts)))

    async def beat(self, *, is_leaving: bool = False) -> None:
        """Say that this scheduler lives."""
        beat = Presence(Service.SCHEDULER, self.id, "a scheduler", ("tiny",), SchedulerStatus(), is_leaving=is_leaving)
        await self.transport.publish(subjects.presence(Service.SCHEDULER), encode(beat))

    async def receive(self, kind: type[M]) -> M:
        """The next message, which must be of this kind."""
        message = await asyncio.wait_for(self._inbox.get(), WAIT_S)
        assert isinstance(message, kind), message
        return message

    async def attach(self) -> int:
        """Ask for the executor, and return the epoch that it grants."""
        await self.tell(AttachExecutor(self.id))
        return (await self.receive(ExecutorAttached)).epoch

    def has_received_nothing_more(self) -> bool:
        """Whether no message waits to be looked at."""
        return self._inbox.empty()
