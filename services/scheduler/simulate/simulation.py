"""Moving time: arrivals and ends of steps in order, and after each moment plans for whoever has room in its pipeline.

Drives the core as the service does, without messages in between: they take no time here. Submissions are never refused.
"""

import heapq
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from services.scheduler.config import SchedulerConfig
from services.scheduler.core.events import Event, RequestEnded
from services.scheduler.core.request import Request
from services.scheduler.simulate.executor import END_TOKEN, SimulatedExecutor
from services.scheduler.simulate.policies import Policy
from services.scheduler.simulate.step_times import MODEL, Profile
from services.scheduler.simulate.trace import MAX_OUTPUT_TOKENS, Trace, TraceRequest, followers
from shared.ids import InstanceId, RequestId
from shared.messages import ChoiceTokens, Outcome, StepResult
from shared.sampling import SamplingParams


class WentWrong(Exception):
    """The simulation broke a rule that every schedule keeps: a bug, here or in the core."""


@dataclass(slots=True)
class Served:
    """How one request of the trace fared."""

    request: TraceRequest
    arrived_s: float
    num_cached_tokens: int = 0
    """Of its prompt, from the prefix cache."""
    token_times: "array[float]" = field(default_factory=lambda: array("d"))
    """When each of its tokens came."""
    has_ended: bool = False


class _Arrival(NamedTuple):
    number: int


class _StepEnd(NamedTuple):
    executor_id: InstanceId
    result: StepResult


class Simulation:
    """One run of a trace under a policy."""

    def __init__(self, trace: Trace, policy: Policy, profile: Profile, *, num_executors: int, seed: int) -> None:
        """`seed` is for policies that leave something to chance."""
        self._trace = trace
        self._policy = policy
        self._config = SchedulerConfig()
        self._fleet = policy.make_fleet(self._config, Random(seed))
        outputs = {_request_id(number): request.output for number, request in enumerate(trace)}
        self._executors: dict[InstanceId, SimulatedExecutor] = {}
        for number in range(num_executors):
            executor_id = InstanceId(f"executor-{number}")
            self._executors[executor_id] = SimulatedExecutor(profile, outputs)
            self._fleet.add_executor(executor_id, profile.capacity)
        self._num_unanswered = dict.fromkeys(self._executors, 0)
        """Plans of each executor whose result has not come."""
        self._followers = followers(trace)
        self._served: dict[RequestId, Served] = {}
        self._moments: list[tuple[float, int, _Arrival | _StepEnd]] = []
        """What is to happen, next first; numbers keep the order of what happens at once."""
        self._num_expected = 0

    @property
    def num_preemptions(self) -> int:
        """How often a choice lost its blocks and had to be computed again."""
        return sum(scheduler.num_preemptions for scheduler in self._fleet.schedulers.values())

    def run(self) -> list[Served]:
        """How each request fared, in the order of arrival. Raises WentWrong or ImpossiblePlan, which are bugs."""
        for number, request in enumerate(self._trace):
            if request.follows is None:
                self._expect(request.arrives_s, _Arrival(number))
        while self._moments:
            now_s = self._moments[0][0]
            while self._moments and self._moments[0][0] == now_s:
                match heapq.heappop(self._moments)[2]:
                    case _Arrival(number):
                        self._arrive(number, now_s)
                    case _StepEnd(executor_id, result):
                        self._num_unanswered[executor_id] -= 1
                        self._take(self._fleet.apply(executor_id, result), now_s)
            self._plan(now_s)
        self._check()
        return list(self._served.values())

    def _expect(self, moment_s: float, what: _Arrival | _StepEnd) -> None:
        self._num_expected += 1
        heapq.heappush(self._moments, (moment_s, self._num_expected, what))

    def _arrive(self, number: int, now_s: float) -> None:
        asked = self._trace[number]
        request = Request(
            _request_id(number),
            asked.prompt,
            SamplingParams(seed=number, end_token_ids=(END_TOKEN,)),
            arrival=len(self._served),
            max_tokens=MAX_OUTPUT_TOKENS,
            model=MODEL,
            tenant=asked.tenant if self._policy.tells_tenants else "",
            salts=(("tenant", asked.tenant),),
        )
        self._served[request.request_id] = Served(asked, now_s)
        self._fleet.add(request)

    def _take(self, events: Iterable[Event], now_s: float) -> None:
        for event in events:
            if isinstance(event, ChoiceTokens):
                times = self._served[event.request_id].token_times
                if event.offset != len(times):
                    raise WentWrong(f"{event.request_id} got token {event.offset} after {len(times)} tokens")
                times.append(now_s)
            else:
                self._end(event, now_s)

    def _end(self, event: RequestEnded, now_s: float) -> None:
        request = event.request
        served = self._served[request.request_id]
        output = request.choices[0].output
        expected = served.request.output + array("i", (END_TOKEN,))
        if served.has_ended or event.outcome is not Outcome.COMPLETED or output != expected[:MAX_OUTPUT_TOKENS]:
            raise WentWrong(f"{request.request_id} ended twice, or {event.outcome}, or with other tokens")
        served.has_ended = True
        served.num_cached_tokens = request.num_cached_tokens
        follower = self._followers.get(int(request.request_id))
        if follower is not None:
            self._expect(now_s + self._trace[follower].arrives_s, _Arrival(follower))

    def _plan(self, now_s: float) -> None:
        """Plan for every executor that has room in its pipeline and could have something to compute."""
        schedulers = self._fleet.schedulers
        does_somebody_wait = any(scheduler.waiting for scheduler in schedulers.values())
        for executor_id, num_unanswered in self._num_unanswered.items():
            if num_unanswered == self._config.pipeline_depth:
                continue
            if not does_somebody_wait and schedulers[executor_id].is_empty:
                continue
            while self._num_unanswered[executor_id] < self._config.pipeline_depth:
                plan = self._fleet.schedule(executor_id)
                if plan is None:
                    break
                done_s, result = self._executors[executor_id].run(plan, now_s)
                self._num_unanswered[executor_id] += 1
                self._expect(done_s, _StepEnd(executor_id, result))

    def _check(self) -> None:
        """Raise WentWrong unless everybody was served and nothing is left over."""
        unserved = len(self._trace) - sum(served.has_ended for served in self._served.values())
        if unserved or self._fleet.num_requests:
            raise WentWrong(f"{unserved} requests never ended, {self._fleet.num_requests} are still there")
        num_tokens = sum(len(served.token_times) for served in self._served.values())
        num_sampled = sum(executor.num_sampled_tokens for executor in self._executors.values())
        if num_sampled < num_tokens:
            raise WentWrong(f"{num_tokens} tokens came, but only {num_sampled} were sampled")
        for executor_id, scheduler in self._fleet.schedulers.items():
            if scheduler.blocks.num_free_blocks != scheduler.capacity.num_blocks:
                raise WentWrong(f"blocks of {executor_id} are held by nobody")
        self._fleet.check_invariants()


def _request_id(number: int) -> RequestId:
    """The id of a request of the trace, by its position there."""
    return RequestId(str(number))
