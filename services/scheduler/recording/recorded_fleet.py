"""A fleet that records every call that can change what it decides. Knows nothing of files."""

from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from services.scheduler.core.events import Event
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.pins import Pin
from services.scheduler.core.request import Request
from services.scheduler.core.settings import SchedulerSettings
from services.scheduler.recording.calls import (
    AddExecutor,
    AddRequest,
    Apply,
    Call,
    Cancel,
    DrainExecutor,
    Fail,
    PinPrefix,
    RemoveExecutor,
    Returned,
    Schedule,
    Stop,
    Unpin,
)
from services.scheduler.recording.recording import Recording
from shared.ids import InstanceId, RequestId
from shared.messages import ExecutorCapacity, StepPlan, StepResult

P = ParamSpec("P")
R = TypeVar("R", bound=Returned)


class RecordedFleet(Fleet):
    """A fleet whose calls are recorded, with what came of them."""

    def __init__(
        self,
        settings_of: Callable[[ExecutorCapacity], SchedulerSettings],
        tenant_weights: Mapping[str, float],
        recording: Recording,
    ) -> None:
        """`settings_of` tells what an executor's scheduler is made with at this moment."""
        self._settings_of = settings_of
        self._recording = recording
        super().__init__(
            lambda capacity, shares: settings_of(capacity).make_scheduler(capacity, shares), tenant_weights
        )
        recording.begin(tenant_weights, settings_of(self._lobby.capacity))

    def add_executor(self, executor_id: InstanceId, capacity: ExecutorCapacity) -> list[Event]:
        """As the fleet does, recorded; so are all that follow."""
        call = AddExecutor(executor_id, capacity, self._settings_of(capacity))
        return self._record(call, super().add_executor, executor_id, capacity)

    def drain_executor(self, executor_id: InstanceId) -> list[Event]:
        return self._record(DrainExecutor(executor_id), super().drain_executor, executor_id)

    def remove_executor(self, executor_id: InstanceId, *, has_died: bool = True) -> list[Event]:
        call = RemoveExecutor(executor_id, has_died)
        return self._record(call, super().remove_executor, executor_id, has_died=has_died)

    def add(self, request: Request) -> None:
        self._record(AddRequest.of(request), super().add, request)

    def cancel(self, request_id: RequestId) -> list[Event]:
        return self._record(Cancel(request_id), super().cancel, request_id)

    def fail(self, request_id: RequestId, reason: str) -> list[Event]:
        return self._record(Fail(request_id, reason), super().fail, request_id, reason)

    def stop(self, request_id: RequestId, index: int, num_tokens: int) -> list[Event]:
        return self._record(Stop(request_id, index, num_tokens), super().stop, request_id, index, num_tokens)

    def pin(self, pin: Pin) -> None:
        self._record(PinPrefix(pin), super().pin, pin)

    def unpin(self, name: str) -> None:
        self._record(Unpin(name), super().unpin, name)

    def schedule(self, executor_id: InstanceId) -> StepPlan | None:
        """As the fleet does; recorded unless nothing was there, came or was planned. An idle executor is asked after
        every message, and most of a long recording would be that."""
        call = Schedule(executor_id)
        was_idle = self._is_idle(executor_id)
        try:
            plan = super().schedule(executor_id)
        except Exception as error:
            self._recording.raised(call, error)
            raise
        if plan is not None or not was_idle or not self._is_idle(executor_id):
            self._recording.returned(call, plan)
        return plan

    def apply(self, executor_id: InstanceId, result: StepResult) -> list[Event]:
        return self._record(Apply.of(executor_id, result), super().apply, executor_id, result)

    def _is_idle(self, executor_id: InstanceId) -> bool:
        scheduler = self.schedulers.get(executor_id)
        return scheduler is not None and scheduler.is_empty

    def _record(self, call: Call, make: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What the call returns, after it was recorded with that, or with what it raised."""
        try:
            returned = make(*args, **kwargs)
        except Exception as error:
            self._recording.raised(call, error)
            raise
        self._recording.returned(call, returned)
        return returned
