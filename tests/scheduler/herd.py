"""Several executors with fakes behind them, stepped together."""

from services.scheduler.core.budget import StepLimits
from services.scheduler.core.events import Event, RequestEnded
from services.scheduler.core.fairness import FairShares
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.prefix_cache import ChainedPrefixCache
from services.scheduler.core.scheduler import Scheduler
from shared.ids import InstanceId, RequestId
from shared.messages import ChoiceTokens, ExecutorCapacity
from tests.scheduler.driver import make_capacity
from tests.scheduler.fake_executor import FakeExecutor

A, B = InstanceId("executor-a"), InstanceId("executor-b")
LONG = list(range(1, 21))


def make_scheduler(capacity: ExecutorCapacity, shares: FairShares) -> Scheduler:
    return Scheduler(capacity, StepLimits(capacity.max_step_tokens, 64), ChainedPrefixCache(), shares)


class Herd:
    """A fleet on fake executors."""

    def __init__(self) -> None:
        self.fleet = Fleet(make_scheduler)
        self.executors: dict[InstanceId, FakeExecutor] = {}
        self.tokens: dict[RequestId, list[int]] = {}
        self.ends: dict[RequestId, RequestEnded] = {}

    def attach(self, executor_id: InstanceId, capacity: ExecutorCapacity | None = None) -> None:
        self.executors[executor_id] = FakeExecutor(capacity or make_capacity())
        self.take(self.fleet.add_executor(executor_id, self.executors[executor_id].capacity))

    def lose(self, executor_id: InstanceId) -> None:
        del self.executors[executor_id]
        self.take(self.fleet.remove_executor(executor_id))

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, ChoiceTokens):
                self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
            else:
                self.ends[event.request.request_id] = event

    def step(self) -> bool:
        worked = False
        for executor_id, executor in self.executors.items():
            plan = self.fleet.schedule(executor_id)
            if plan is not None:
                self.take(self.fleet.apply(executor_id, executor.run(plan)))
                worked = True
        self.fleet.check_invariants()
        return worked

    def finish(self) -> None:
        while self.step():
            pass
