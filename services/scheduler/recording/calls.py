"""Every call that can change what the fleet decides, as a record that can make the call again.

Log-probabilities pass through the core and decide nothing, so they are left out.
"""

from msgspec.structs import replace

from services.scheduler.core.events import Event
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.pins import Pin
from services.scheduler.core.request import Request
from services.scheduler.core.settings import SchedulerSettings
from services.scheduler.recording.part import Part
from shared.ids import InstanceId, RequestId
from shared.messages import ExecutorCapacity, Int32Array, ResumedChoice, StepPlan, StepResult
from shared.sampling import SamplingParams

Returned = list[Event] | StepPlan | None
"""What a call on the fleet returns."""


class AddExecutor(Part, frozen=True, tag="add_executor"):
    """An executor was attached."""

    executor_id: InstanceId
    capacity: ExecutorCapacity
    settings: SchedulerSettings

    def perform(self, fleet: Fleet) -> Returned:
        """Make the call. The fleet has to make the executor's scheduler from `settings`."""
        return fleet.add_executor(self.executor_id, self.capacity)


class DrainExecutor(Part, frozen=True, tag="drain_executor"):
    """An executor was to get nothing new."""

    executor_id: InstanceId

    def perform(self, fleet: Fleet) -> Returned:
        """Make the call."""
        return fleet.drain_executor(self.executor_id)


class RemoveExecutor(Part, frozen=True, tag="remove_executor"):
    """An executor was lost or let go."""

    executor_id: InstanceId
    has_died: bool

    def perform(self, fleet: Fleet) -> Returned:
        """Make the call."""
        return fleet.remove_executor(self.executor_id, has_died=self.has_died)


class AddRequest(Part, frozen=True, tag="add_request"):
    """A request arrived."""

    request_id: RequestId
    prompt: Int32Array
    sampling: SamplingParams
    arrival: int
    max_tokens: int
    num_choices: int
    priority: int
    model: str
    tenant: str
    salts: tuple[tuple[str, str], ...]
    resumed: tuple[ResumedChoice, ...] = ()

    @staticmethod
    def of(request: Request) -> "AddRequest":
        """The arrival of a request that has not begun."""
        return AddRequest(
            request.request_id,
            request.prompt,
            request.sampling,
            request.arrival,
            request.max_tokens,
            len(request.choices),
            request.priority,
            request.model,
            request.tenant,
            request.salts,
            tuple(ResumedChoice(choice.output[:], choice.finish_reason) for choice in request.choices)
            if any(choice.output or choice.is_finished for choice in request.choices)
            else (),
        )

    def perform(self, fleet: Fleet) -> Returned:
        """Make the call, with a fresh request."""
        fleet.add(
            Request(
                self.request_id,
                self.prompt,
                self.sampling,
                arrival=self.arrival,
                max_tokens=self.max_tokens,
                num_choices=self.num_choices,
                priority=self.priority,
                model=self.model,
                tenant=self.tenant,
                salts=self.salts,
                resumed=self.resumed,
            )
        )
        return None


class Cancel(Part, frozen=True, tag="cancel"):
    """A client wanted no more."""

    request_id: RequestId

    def perform(self, fleet: Fleet) -> Returned:
        """Make the call."""
        return fleet.cancel(self.request_id)


class Fail(Part, frozen=True, tag="fail"):
    """A request must not go on."""

    request_id: RequestId
    reason: str

    def perform(self, fleet: Fleet) -> Returned:
        """Make the call."""
        return fleet.fail(self.request_id, self.reason)


class Stop(Part, frozen=True, tag="stop"):
    """A choice's text reached a stop string."""

    request_id: RequestId
    index: int
    num_tokens: int

    def perform(self, fleet: Fleet) -> Returned:
        """Make the call."""
        return fleet.stop(self.request_id, self.index, self.num_tokens)


class PinPrefix(Part, frozen=True, tag="pin"):
    """A prefix was to stay in the caches."""

    pin: Pin

    def perform(self, fleet: Fleet) -> Returned:
        """Make the call."""
        fleet.pin(self.pin)
        return None


class Unpin(Part, frozen=True, tag="unpin"):
    """A prefix need not stay any more."""

    name: str

    def perform(self, fleet: Fleet) -> Returned:
        """Make the call."""
        fleet.unpin(self.name)
        return None


class Schedule(Part, frozen=True, tag="schedule"):
    """An executor had room for another step."""

    executor_id: InstanceId

    def perform(self, fleet: Fleet) -> Returned:
        """Make the call."""
        return fleet.schedule(self.executor_id)


class Apply(Part, frozen=True, tag="apply"):
    """A step's result came."""

    executor_id: InstanceId
    result: StepResult

    @staticmethod
    def of(executor_id: InstanceId, result: StepResult) -> "Apply":
        """The arrival of a result, without its log-probabilities."""
        if result.logprobs:
            result = replace(result, logprobs=(None,) * len(result.logprobs))
        return Apply(executor_id, result)

    def perform(self, fleet: Fleet) -> Returned:
        """Make the call."""
        return fleet.apply(self.executor_id, self.result)


Call = (
    AddExecutor
    | DrainExecutor
    | RemoveExecutor
    | AddRequest
    | Cancel
    | Fail
    | Stop
    | PinPrefix
    | Unpin
    | Schedule
    | Apply
)
