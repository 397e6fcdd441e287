"""Which of several executors a request waits on. Decides from what is known of each; moves nothing itself."""

from collections.abc import Sequence
from typing import Protocol

from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler


class Placement(Protocol):
    """What a fleet asks before it places or moves a request."""

    def choose(self, request: Request, able: Sequence[Scheduler]) -> Scheduler:
        """The executor for a request, of one or more that could hold it."""
        ...

    def should_move(self, request: Request, busy: Scheduler, idle: Scheduler) -> bool:
        """Whether a request that waits on `busy` is better off on `idle`, which has nothing left to start."""
        ...


class SoonestPlacement:
    """Where the request would be reached first: by the queue, the free blocks, and how much of the prompt is there."""

    def choose(self, request: Request, able: Sequence[Scheduler]) -> Scheduler:
        """The one that would reach it first; of equals the first."""
        typical = _typical_token_seconds(able)
        return min(able, key=lambda scheduler: scheduler.seconds_until(request, typical))

    def should_move(self, request: Request, busy: Scheduler, idle: Scheduler) -> bool:
        """Whether it would be reached sooner, even if parts of its prompt are in the cache where it waits."""
        typical = _typical_token_seconds((idle, busy))
        waited_for = busy.seconds_until(request, typical, is_there=True)
        return idle.seconds_until(request, typical) < waited_for


def _typical_token_seconds(schedulers: Sequence[Scheduler]) -> float:
    """What a token takes on an executor that has not been measured yet: as on the others."""
    measured = [s.token_seconds for s in schedulers if s.token_seconds is not None]
    return sum(measured) / len(measured) if measured else 1.0
