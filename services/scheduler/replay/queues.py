"""What a fleet holds at one moment: who runs, who waits, in order, and how many blocks are left."""

from collections.abc import Iterable

import msgspec

from services.scheduler.core.fleet import Fleet
from services.scheduler.core.request import Choice
from services.scheduler.core.scheduler import Scheduler
from shared.ids import InstanceId, RequestId


class ChoiceView(msgspec.Struct, frozen=True):
    """One choice."""

    request_id: RequestId
    index: int
    state: str
    tenant: str
    priority: int
    num_known_tokens: int
    num_computed_tokens: int
    num_in_flight: int
    num_blocks: int
    slot: int | None


class ExecutorQueues(msgspec.Struct, frozen=True):
    """One executor."""

    executor_id: InstanceId
    model: str
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_pinned_blocks: int
    running: list[ChoiceView]
    """In order of place: the last gives way first."""
    waiting: list[ChoiceView]
    """In the order in which they would be admitted."""


class Queues(msgspec.Struct, frozen=True):
    """The whole fleet."""

    executors: list[ExecutorQueues]
    lobby: list[ChoiceView]
    """Those that no executor has."""


def look_at(fleet: Fleet, open_requests: Iterable[RequestId]) -> Queues:
    """The queues as they are."""
    schedulers = fleet.schedulers
    placed = {choice for s in schedulers.values() for choice in (*s.running, *s.waiting)}
    requests = [request for request_id in open_requests if (request := fleet.get(request_id)) is not None]
    lobby = [request for request in requests if not placed.intersection(request.choices)]
    return Queues(
        [_executor(executor_id, scheduler) for executor_id, scheduler in schedulers.items()],
        [_view(choice) for request in lobby for choice in request.choices if not choice.is_finished],
    )


def _executor(executor_id: InstanceId, scheduler: Scheduler) -> ExecutorQueues:
    return ExecutorQueues(
        executor_id=executor_id,
        model=scheduler.capacity.model,
        num_blocks=scheduler.capacity.num_blocks,
        num_free_blocks=scheduler.blocks.num_free_blocks,
        num_cached_blocks=scheduler.blocks.num_cached_blocks,
        num_pinned_blocks=scheduler.pins.num_blocks,
        running=[_view(choice) for choice in scheduler.running],
        waiting=[_view(choice) for choice in scheduler.waiting.in_order()],
    )


def _view(choice: Choice) -> ChoiceView:
    request = choice.request
    return ChoiceView(
        request_id=request.request_id,
        index=choice.index,
        state=choice.state.name.lower(),
        tenant=request.tenant,
        priority=request.priority,
        num_known_tokens=choice.num_known_tokens,
        num_computed_tokens=choice.num_computed_tokens,
        num_in_flight=choice.num_in_flight,
        num_blocks=len(choice.block_table),
        slot=choice.slot,
    )
