"""Which of several executors a request waits on. Decides from what is known of each; moves nothing itself."""

from collections.abc import Sequence
from typing import Protocol

from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step_cost import StepCost, Typical


class Placement(Protocol):
    """What a fleet asks before it places or moves a request."""

    def choose(self, request: Request, able: Sequence[Scheduler]) -> Scheduler:
        """The executor for a request, of one or more that could hold it."""
        ...

    def should_move(self, request: Request, busy: Scheduler, idle: Scheduler) -> bool:
        """Whether a request that waits on `busy` is better off on `idle`, which has nothing left to start."""
        ...


class SoonestPlacement:
    """Where the request would be done first: by the queue, the free blocks, and how much of the prompt is there."""

    def choose(self, request: Request, able: Sequence[Scheduler]) -> Scheduler:
        """The one that would be done with it first; of equals the first."""
        typical = _typical(able)
        return min(able, key=lambda scheduler: scheduler.seconds_to_finish(request, typical))

    def should_move(self, request: Request, busy: Scheduler, idle: Scheduler) -> bool:
        """Whether it would be done sooner, even if parts of its prompt are in the cache where it waits."""
        typical = _typical((idle, busy))
        waited_for = busy.seconds_to_finish(request, typical, is_there=True)
        return idle.seconds_to_finish(request, typical) < waited_for


def _typical(schedulers: Sequence[Scheduler]) -> Typical:
    """Their averages. How long outputs are is up to the requests, so it must be the same for all that are compared."""
    measured = [cost for scheduler in schedulers if (cost := scheduler.step_cost) is not None]
    cost = StepCost(0.0, 1.0)
    if measured:
        cost = StepCost(*(sum(column) / len(measured) for column in zip(*measured, strict=True)))
    return Typical(cost, sum(scheduler.typical_output for scheduler in schedulers) / len(schedulers))
