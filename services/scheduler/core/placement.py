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
        return min(able, key=lambda scheduler: seconds_to_finish(request, scheduler, typical))

    def should_move(self, request: Request, busy: Scheduler, idle: Scheduler) -> bool:
        """Whether it would be done sooner, even if parts of its prompt are in the cache where it waits."""
        typical = _typical((idle, busy))
        waited_for = seconds_to_finish(request, busy, typical, is_there=True)
        return seconds_to_finish(request, idle, typical) < waited_for


def seconds_to_finish(request: Request, where: Scheduler, typical: Typical, *, is_there: bool = False) -> float:
    """About how long a request would take on an executor: the tokens that come before its own or with them, and steps.

    What is there are known tokens, and a typical output for each choice; two for those that run, since they make the
    request's steps longer and it makes theirs longer. Blocks that are not free count like tokens to be computed before.
    Its own output takes a step for each token, once as many outputs before it are through as wait for a slot.
    `is_there`: the request is among those that wait.
    """
    cost = where.experience.step_cost or typical.cost
    block_size = where.capacity.block_size
    num_waiting = len(where.waiting) - is_there
    num_cached = where.blocks.num_cached_tokens(request)
    num_tokens = (num_waiting + 2 * len(where.running)) * typical.num_output_tokens
    num_tokens += where.num_outstanding_tokens - num_cached
    if not is_there:
        num_tokens += len(request.prompt)
        num_needed = -(-(len(request.prompt) - num_cached) // block_size)
        num_tokens += max(0, num_needed - where.blocks.num_free_blocks) * block_size
    num_steps = typical.num_output_tokens * (1 + num_waiting / max(1, where.capacity.max_slots))
    return num_tokens * cost.token_s + num_steps * cost.step_s


def _typical(schedulers: Sequence[Scheduler]) -> Typical:
    """Their averages. How long outputs are is up to the requests, so it must be the same for all that are compared."""
    measured = [cost for scheduler in schedulers if (cost := scheduler.experience.step_cost) is not None]
    cost = StepCost(0.0, 1.0)
    if measured:
        cost = StepCost(*(sum(column) / len(measured) for column in zip(*measured, strict=True)))
    return Typical(cost, sum(scheduler.experience.typical_output for scheduler in schedulers) / len(schedulers))
