"""Several executors under one scheduler: which executor gets a request, and what happens when one drains or is lost.

A request whose model no executor serves waits in the lobby. A request goes to the executor that would reach it first,
by what is known exactly: its queue, its free blocks, and how much of the prompt it has. An executor that has nothing
left to start takes over what waits elsewhere.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Final

from services.scheduler.core.events import Event, RequestEnded
from services.scheduler.core.fairness import FairShares
from services.scheduler.core.fleet_pins import FleetPins
from services.scheduler.core.pins import Pin
from services.scheduler.core.placement import Placement, SoonestPlacement
from services.scheduler.core.request import ChoiceState, Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.waiting import Load, sum_loads
from shared.ids import InstanceId, RequestId
from shared.messages import ExecutorCapacity, Outcome, StepPlan, StepResult

MAX_LOSSES: Final = 3
"""A request that has seen so many executors die while it ran, without a token in between, may be what kills them."""

SchedulerFactory = Callable[[ExecutorCapacity, FairShares], Scheduler]

_MAX_LOOKED_AT: Final = 4
"""Requests on one executor that another, with nothing left to start, compares with itself before it tries the next."""
_MAX_COMPARED: Final = 16
"""Requests that it compares in all. Those that it cannot hold do not count."""
_NOTHING: Final = ExecutorCapacity("", num_blocks=1, block_size=1, max_slots=0, max_model_len=0, max_step_tokens=1)


class NeverFits(Exception):
    """A request that no executor of its model could ever hold."""

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens of prompt and output cannot fit; at most {max_tokens} can")
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class Fleet:
    """All executors that one scheduler holds, and all requests on them."""

    def __init__(
        self,
        make_scheduler: SchedulerFactory,
        tenant_weights: Mapping[str, float] | None = None,
        *,
        placement: Placement | None = None,
    ) -> None:
        """`tenant_weights` are the shares of tenants that are not like all others; `placement` chooses executors,
        unless told otherwise where a request is reached first."""
        self.num_migrations = 0
        """Requests that an executor with nothing left to start took over from another one."""
        self.num_failovers = 0
        """Requests that had to leave an executor which is gone, or drains."""
        self._make_scheduler = make_scheduler
        self._placement = placement or SoonestPlacement()
        self._shares = FairShares(tenant_weights)
        self._schedulers: dict[InstanceId, Scheduler] = {}
        self._draining: dict[InstanceId, None] = {}
        """In order, as a set that is the same in every process."""
        self._lobby = make_scheduler(_NOTHING, self._shares)
        """Where requests wait while no executor serves their model: a scheduler without slots."""
        self._requests: dict[RequestId, Request] = {}
        self._homes: dict[RequestId, Scheduler] = {}
        self._pins = FleetPins()

    # Executors come and go.

    def add_executor(self, executor_id: InstanceId, capacity: ExecutorCapacity) -> list[Event]:
        """Use one more executor, and give it the requests in the lobby that it can serve."""
        if executor_id in self._schedulers:
            raise ValueError(f"{executor_id} is in the fleet already")
        scheduler = self._schedulers[executor_id] = self._make_scheduler(capacity, self._shares)
        self._make_missing_pins(scheduler)
        return self._move_from(self._lobby)

    def drain_executor(self, executor_id: InstanceId) -> list[Event]:
        """Give an executor nothing new: what runs there goes on, what waits finds another place."""
        if executor_id not in self._schedulers or executor_id in self._draining:
            return []
        self._draining[executor_id] = None
        scheduler = self._schedulers[executor_id]
        events: list[Event] = []
        for request in self._requests_of(scheduler):
            if _has_not_begun(request):
                scheduler.withdraw(request)
                self.num_failovers += 1
                events += self._settle(request)
        for name in self._pins.wanted:
            scheduler.pins.free(name)
        return events

    def drained_executors(self) -> list[InstanceId]:
        """Those that were to drain and have nothing left to do."""
        return [each for each in self._draining if self._schedulers[each].is_empty]

    def remove_executor(self, executor_id: InstanceId, *, has_died: bool = True) -> list[Event]:
        """An executor is gone: its requests go on elsewhere, but for those that have seen too many die."""
        scheduler = self._schedulers.pop(executor_id, None)
        self._draining.pop(executor_id, None)
        if scheduler is None:
            return []
        if has_died:
            for request in {choice.request for choice in scheduler.running}:
                request.num_losses += 1
        self.num_failovers += len(self._requests_of(scheduler))
        events = self._move_from(scheduler)
        return events + self._move_from(self._lobby)  # which may have waited for this one to have a like

    @property
    def schedulers(self) -> Mapping[InstanceId, Scheduler]:
        """The scheduler of each executor; to look at, not to change."""
        return self._schedulers

    @property
    def models(self) -> tuple[str, ...]:
        """The models that some executor takes new requests for."""
        taking = (each for executor_id, each in self._schedulers.items() if executor_id not in self._draining)
        return tuple(sorted({scheduler.capacity.model for scheduler in taking}))

    # Requests come and go.

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def waiting(self, tenant: str | None = None) -> Load:
        """What waits, with or without an executor, of one tenant or in all."""
        return sum_loads(scheduler.waiting.load(tenant) for scheduler in (self._lobby, *self._schedulers.values()))

    def stranded(self) -> list[Request]:
        """Those that wait in the lobby because no executor serves their model."""
        if not self._lobby.waiting:
            return []
        return self._requests_of(self._lobby)

    def get(self, request_id: RequestId) -> Request | None:
        """A request that has not ended."""
        return self._requests.get(request_id)

    def max_total_tokens(self, model: str) -> int | None:
        """The most tokens of prompt and output that a new request's choice can have; None if no executor of the model
        takes new ones."""
        return max((scheduler.max_total_tokens for scheduler in self._serving(model)), default=None)

    def max_total_tokens_of_all(self, model: str) -> int:
        """The same if those executors took new ones that finish what they have; 0 if there are none at all."""
        return max((scheduler.max_total_tokens for scheduler in self._of_model(model)), default=0)

    def add(self, request: Request) -> None:
        """Queue a request, of which not all has ended, where it is best off.

        Raises NeverFits if no executor that takes new ones could hold it.
        """
        if request.request_id in self._requests:
            raise ValueError(f"{request.request_id} is in the fleet already")
        limit = self.max_total_tokens(request.model)
        if limit is not None and request.max_total_tokens > limit:
            raise NeverFits(request.max_total_tokens, limit)
        self._requests[request.request_id] = request
        self._place(request)

    def cancel(self, request_id: RequestId) -> list[Event]:
        """End a request; nothing if it is not there (any more)."""
        request = self._requests.get(request_id)
        return [] if request is None else self._end(request, Outcome.CANCELLED)

    def fail(self, request_id: RequestId, reason: str) -> list[Event]:
        """End a request that must not go on; nothing if it is not there (any more)."""
        request = self._requests.get(request_id)
        return [] if request is None else self._end(request, Outcome.FAILED, reason)

    def stop(self, request_id: RequestId, index: int, num_tokens: int) -> list[Event]:
        """End a choice whose text reached a stop string; nothing if it ended before."""
        request = self._requests.get(request_id)
        if request is None or not 0 <= index < len(request.choices):
            return []
        return self._forget_ended(self._homes[request_id].stop(request.choices[index], num_tokens))

    # Prefixes that stay.

    @property
    def pins(self) -> Mapping[str, Pin]:
        """What is pinned, by name."""
        return self._pins.wanted

    def pin(self, pin: Pin) -> None:
        """Keep a prefix in the caches of all executors of its model, now and later; replaces a pin of the same name."""
        self._unpin(pin.name)
        self._pins.wanted[pin.name] = pin
        for scheduler in self._serving(pin.model):
            if self._pins.fits(pin, scheduler):
                self._start_pinning(pin, scheduler)

    def unpin(self, name: str) -> None:
        """Let a prefix go; nothing if there is no such pin."""
        self._unpin(name)

    # Steps.

    def schedule(self, executor_id: InstanceId) -> StepPlan | None:
        """The next step of one executor, or None if it has nothing to compute."""
        scheduler = self._schedulers[executor_id]
        if executor_id not in self._draining:
            if scheduler.has_room and not scheduler.waiting:
                self._take_over_for(scheduler)
            self._make_missing_pins(scheduler)
        return scheduler.schedule()

    def apply(self, executor_id: InstanceId, result: StepResult) -> list[Event]:
        """Take in what a step of one executor sampled."""
        return self._forget_ended(self._schedulers[executor_id].apply(result))

    def check_invariants(self) -> None:
        """Raise AssertionError unless every request is in exactly one place."""
        for scheduler in (self._lobby, *self._schedulers.values()):
            scheduler.check_invariants()
            for choice in chain(scheduler.running, scheduler.waiting):
                request = choice.request
                assert self._homes[request.request_id] is scheduler, f"{request.request_id} is away from home"
                assert self._requests[request.request_id] is request, f"{request.request_id} is unknown"
        assert self._homes.keys() == self._requests.keys(), "requests without a home, or homes without a request"
        assert not any(request.is_finished for request in self._requests.values()), "an ended request is kept"

    def _serving(self, model: str) -> list[Scheduler]:
        """Those that may be given more."""
        return [
            scheduler
            for executor_id, scheduler in self._schedulers.items()
            if scheduler.capacity.model == model and executor_id not in self._draining
        ]

    def _requests_of(self, home: Scheduler) -> list[Request]:
        return [self._requests[request_id] for request_id, where in self._homes.items() if where is home]

    def _of_model(self, model: str) -> list[Scheduler]:
        return [scheduler for scheduler in self._schedulers.values() if scheduler.capacity.model == model]

    def _place(self, request: Request) -> None:
        """Put a request on the executor that the placement chooses. Pins give way where it fits nowhere else."""
        num_tokens, serving = request.max_total_tokens, self._serving(request.model)
        able = [scheduler for scheduler in serving if num_tokens <= scheduler.max_total_tokens]
        able = able or [scheduler for scheduler in serving if num_tokens <= scheduler.max_tokens_without_pins]
        home = self._lobby
        if len(able) == 1:
            home = able[0]
        elif able:
            home = self._placement.choose(request, able)
        self._set_home(request, home)
        home.add(request)

    def _set_home(self, request: Request, home: Scheduler) -> None:
        """Note where a request is. Who is in the lobby takes no part in the turns of tenants: nobody could serve it,
        and its counter would stand still while those of others grow."""
        old = self._homes.get(request.request_id, self._lobby)
        self._homes[request.request_id] = home
        if home is not self._lobby:
            self._shares.opened(request.tenant)
        if old is not self._lobby:
            self._shares.closed(request.tenant)

    def _unpin(self, name: str) -> None:
        self._pins.wanted.pop(name, None)
        for scheduler in self._schedulers.values():
            scheduler.pins.free(name)
        for request_id in self._pins.requests_of(name):
            self._end(self._requests[request_id], Outcome.CANCELLED)

    def _make_missing_pins(self, scheduler: Scheduler) -> None:
        for pin in self._pins.missing(scheduler):
            self._start_pinning(pin, scheduler)

    def _start_pinning(self, pin: Pin, scheduler: Scheduler) -> None:
        """Compute a prefix where it shall stay."""
        request = self._pins.start(pin, scheduler)
        self._requests[request.request_id] = request
        self._set_home(request, scheduler)
        scheduler.add(request)

    def _take_over_for(self, idle: Scheduler) -> None:
        """Give an executor with nothing left to start a request that waits elsewhere and would be reached sooner."""
        others = [s for s in self._serving(idle.capacity.model) if s is not idle and s.waiting]
        others.sort(key=lambda scheduler: -scheduler.num_outstanding_tokens)
        each_of = (
            ((busy, request) for request in islice(self._movable(busy, idle), _MAX_LOOKED_AT)) for busy in others
        )
        for busy, request in islice(chain.from_iterable(each_of), _MAX_COMPARED):
            if self._placement.should_move(request, busy, idle):
                busy.withdraw(request)
                self._set_home(request, idle)
                idle.add(request)
                self.num_migrations += 1
                return

    def _movable(self, busy: Scheduler, idle: Scheduler) -> Iterator[Request]:
        """The requests that wait on one executor and could run on the other, the next first. What computes a pin has to
        stay where the pin is to be."""
        limit = idle.max_total_tokens
        for choice in busy.waiting.in_order():
            request = choice.request
            if request.max_total_tokens <= limit and _has_not_begun(request) and request.request_id not in self._pins:
                yield request

    def _move_from(self, old: Scheduler) -> list[Event]:
        """Find a new home for all requests of one that has no use for them."""
        requests = sorted(self._requests_of(old), key=lambda request: request.arrival)
        old.evacuate()
        events: list[Event] = []
        for request in requests:
            events += self._settle(request)
        return events

    def _settle(self, request: Request) -> list[Event]:
        """Find a new home for a request, unless it is beyond hope, or only made for its old one."""
        if request.request_id in self._pins:
            self._set_home(request, self._lobby)
            return self._end(request, Outcome.CANCELLED)
        self._place(request)
        limit = max((scheduler.max_tokens_without_pins for scheduler in self._of_model(request.model)), default=None)
        if limit is not None and request.max_total_tokens > limit:
            return self._end(request, Outcome.FAILED, str(NeverFits(request.max_total_tokens, limit)))
        if request.num_losses >= MAX_LOSSES:
            reason = f"{request.num_losses} executors in a row died while they ran this request"
            return self._end(request, Outcome.FAILED, reason)
        return []

    def _end(self, request: Request, outcome: Outcome, reason: str | None = None) -> list[Event]:
        return self._forget_ended(self._homes[request.request_id].end(request, outcome, reason))

    def _forget_ended(self, events: list[Event]) -> list[Event]:
        """The events that concern clients; what has ended is forgotten, and prefixes that were computed are held."""
        if not self._pins.is_making and RequestEnded not in map(type, events):
            return events  # nearly every step
        told = []
        for event in events:
            request_id = event.request.request_id if isinstance(event, RequestEnded) else event.request_id
            if request_id not in self._pins:
                told.append(event)
            if isinstance(event, RequestEnded):
                self._pins.end(event)
                self._set_home(event.request, self._lobby)
                del self._requests[request_id]
                del self._homes[request_id]
        return told


def _has_not_begun(request: Request) -> bool:
    """Whether no choice runs anywhere, or has tokens on the way."""
    return not any(choice.state is ChoiceState.RUNNING or choice.num_in_flight for choice in request.choices)
