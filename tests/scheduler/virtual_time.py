"""A world whose steps take time: executors work beside one another, requests arrive at moments, and waits are measured.

The time of a step is a line, as on real machines: what any step takes, and what each token adds.
"""

import heapq
from collections import defaultdict
from itertools import pairwise

from services.scheduler.core.events import Event
from services.scheduler.core.request import Request
from shared.ids import InstanceId, RequestId
from shared.messages import ChoiceTokens
from tests.scheduler.world import Rules, World


class TimedWorld(World):
    """A world with a clock. Times are in seconds since its beginning."""

    def __init__(self, rules: Rules | None = None, tenant_weights: dict[str, float] | None = None) -> None:
        super().__init__(rules or Rules(depth=1, max_chunk_tokens=256), tenant_weights)
        self.now = 0.0
        self.token_times: dict[RequestId, list[float]] = defaultdict(list)
        self.arrived_at: dict[RequestId, float] = {}
        self.homes: dict[RequestId, InstanceId] = {}
        """The executor that each request ran on last."""
        self._arrivals: list[tuple[float, int, Request]] = []
        self._step_ends: list[tuple[float, InstanceId]] = []
        self._busy: set[InstanceId] = set()

    def arrive(self, request: Request, at: float = 0.0) -> None:
        """Have a request arrive at a moment."""
        heapq.heappush(self._arrivals, (at, request.arrival, request))

    def run_until(self, end: float = float("inf")) -> None:
        """Let time pass, until a moment or until nothing is left to do."""
        self._start_steps()
        while self._arrivals or self._step_ends:
            arrives_next = self._arrivals and (not self._step_ends or self._arrivals[0][0] <= self._step_ends[0][0])
            moment = self._arrivals[0][0] if arrives_next else self._step_ends[0][0]
            if moment > end:
                break
            self.now = moment
            if arrives_next:
                request = heapq.heappop(self._arrivals)[2]
                self.arrived_at[request.request_id] = moment
                assert self.send(request)
            else:
                executor_id = heapq.heappop(self._step_ends)[1]
                self._busy.discard(executor_id)
                if executor_id in self.members:
                    self.run(executor_id)
            self._start_steps()

    def take(self, events: list[Event]) -> None:
        """Check events, and note when tokens came."""
        for event in events:
            if isinstance(event, ChoiceTokens):
                self.token_times[event.request_id] += [self.now] * len(event.token_ids)
        super().take(events)

    def first_token_s(self, request: Request) -> float:
        """From a request's arrival to its first token."""
        return self.token_times[request.request_id][0] - self.arrived_at[request.request_id]

    def total_s(self, request: Request) -> float:
        """From a request's arrival to its last token."""
        return self.token_times[request.request_id][-1] - self.arrived_at[request.request_id]

    def gaps(self, request: Request) -> list[float]:
        """The times between a request's tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times[request.request_id])]

    def _start_steps(self) -> None:
        for executor_id, member in self.members.items():
            if executor_id not in self._busy and self.plan(executor_id):
                plan = member.plans[-1]
                self.homes.update((assignment.request_id, executor_id) for assignment in plan.assigned)
                heapq.heappush(self._step_ends, (self.now + member.seconds_of(plan), executor_id))
                self._busy.add(executor_id)
