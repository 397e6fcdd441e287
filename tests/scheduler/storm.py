"""A storm of random calls on a fleet, the same for the same seed. `python -m tests.scheduler.storm FOLDER SEED` records
one, so that a test can do it in another process."""

import random
import sys
from array import array
from collections import deque
from pathlib import Path

from msgspec.structs import replace

from services.scheduler.core.budget import StepLimits
from services.scheduler.core.events import Event
from services.scheduler.core.fleet import Fleet, NeverFits
from services.scheduler.core.pins import Pin
from services.scheduler.core.request import Request
from services.scheduler.core.settings import SchedulerSettings
from services.scheduler.recording.recorded_fleet import RecordedFleet
from services.scheduler.recording.recording import start_recording
from shared.clock import FakeClock
from shared.ids import InstanceId, RequestId
from shared.messages import ChoiceTokens, ExecutorCapacity, RowFailure, StepPlan, StepResult, TokenLogprobs
from shared.sampling import SamplingParams
from tests.scheduler.fake_executor import FakeExecutor

SCHEDULER = InstanceId("scheduler-of-the-storm")
TENANTS = ("ant", "bee", "cat", "dog", "eel")
WEIGHTS = {"ant": 0.1, "bee": 0.2, "cat": 0.3, "dog": 0.7}
"""Of which every order of adding up gives another sum."""
PREFIXES = ([7] * 12, [7] * 8 + [9] * 8, [1, 2, 3, 4, 5])
DEPTH = 2


def settings_of(capacity: ExecutorCapacity) -> SchedulerSettings:
    """What the storm's executors are planned with: bounds small enough to be met."""
    limits = StepLimits(capacity.max_step_tokens, max_chunk_tokens=6, target_step_s=0.0)
    return SchedulerSettings(limits, max_wait_tokens=120, has_prefix_cache=capacity.num_blocks % 2 == 0)


class Storm:
    """Calls everything that a fleet has, with what executors would answer."""

    def __init__(self, fleet: Fleet, seed: int, clock: FakeClock | None = None) -> None:
        self.fleet = fleet
        self.events: list[Event] = []
        self._random = random.Random(seed)
        self._clock = clock or FakeClock()
        self._executors: dict[InstanceId, FakeExecutor] = {}
        self._plans: dict[InstanceId, deque[StepPlan]] = {}
        self._num_executors = 0
        self._requests: list[RequestId] = []
        self._num_output: dict[tuple[RequestId, int], int] = {}

        self._calls = {
            self._schedule: 200,
            self._apply: 200,
            self._add: 20,
            self._cancel: 2,
            self._stop: 2,
            self._fail: 1,
            self._attach: 2,
            self._leave: 1,
            self._drain: 1,
            self._pin: 1,
            self._unpin: 1,
        }
        """How often each."""

    def rage(self, num_calls: int) -> None:
        """Make so many random calls, or a few more."""
        for _ in range(num_calls):
            self._clock.advance(0.001)
            (call,) = self._random.choices(list(self._calls), list(self._calls.values()))
            call()

    def calm_down(self) -> None:
        """Let everything that is left finish."""
        for executor_id in list(self._executors):
            self._lose(executor_id, has_died=False)
        for model in ("model", "another"):
            self._attach(model)
        for _ in range(20_000):
            self._schedule()
            self._apply()
            if not self.fleet.num_requests:
                return
        raise AssertionError("a request never ends")

    def _take(self, events: list[Event]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, ChoiceTokens):
                self._num_output[event.request_id, event.index] = event.offset + len(event.token_ids)

    def _some(self) -> InstanceId | None:
        return self._random.choice(list(self._executors)) if self._executors else None

    def _schedule(self) -> None:
        executor_id = self._some()
        if executor_id is not None and len(self._plans[executor_id]) < DEPTH:
            plan = self.fleet.schedule(executor_id)
            if plan is not None:
                self._plans[executor_id].append(plan)
        for drained in self.fleet.drained_executors():
            self._lose(drained, has_died=False)

    def _apply(self) -> None:
        executor_id = self._some()
        if executor_id is None or not self._plans[executor_id]:
            return
        plan = self._plans[executor_id].popleft()
        result = replace(self._executors[executor_id].run(plan), duration_s=self._random.uniform(0.001, 0.05))
        self._take(self.fleet.apply(executor_id, self._embellished(result)))

    def _embellished(self, result: StepResult) -> StepResult:
        if result.token_ids and self._random.random() < 0.3:
            result = replace(result, logprobs=tuple(TokenLogprobs(-0.5) for _ in result.token_ids))
        if result.token_ids and self._random.random() < 0.02:
            result = replace(result, failures=(RowFailure(0, "not a number"),))
        return result

    def _add(self) -> None:
        rng, number = self._random, len(self._requests)
        tenant = rng.choice(TENANTS)
        request = Request(
            RequestId(f"request-{number}"),
            array("i", [*rng.choice(PREFIXES), *rng.choices(range(50), k=rng.randrange(30))]),
            SamplingParams(
                seed=number,
                temperature=rng.random(),
                logit_bias={rng.randrange(50): rng.random() for _ in range(2)},
                end_token_ids=tuple(rng.choices(range(50), k=rng.randrange(3))),
                num_logprobs=rng.choice((None, 2)),
            ),
            arrival=number,
            max_tokens=rng.choice((3, 8, 20, 100)),
            num_choices=rng.choice((1, 1, 1, 3)),
            priority=rng.choice((-1, 0, 0, 0, 1)),
            model="model" if rng.random() < 0.95 else "another",
            tenant=tenant,
            salts=(("tenant", tenant),),
        )
        self._requests.append(request.request_id)
        try:
            self.fleet.add(request)
        except NeverFits:
            self._requests[-1] = RequestId("refused")

    def _any_request(self) -> RequestId:
        return self._random.choice(self._requests[-20:]) if self._requests else RequestId("nobody")

    def _cancel(self) -> None:
        self._take(self.fleet.cancel(self._any_request()))

    def _fail(self) -> None:
        self._take(self.fleet.fail(self._any_request(), "its time is over"))

    def _stop(self) -> None:
        request_id, index = self._any_request(), self._random.randrange(3)
        num_tokens = self._num_output.get((request_id, index), 0) - self._random.randrange(2)
        if num_tokens > 0:
            self._take(self.fleet.stop(request_id, index, num_tokens))

    def _attach(self, model: str = "model") -> None:
        if len(self._executors) == 4:
            return
        self._num_executors += 1
        executor_id = InstanceId(f"executor-{self._num_executors}")
        num_blocks = self._random.randrange(12, 40)
        capacity = ExecutorCapacity(model, num_blocks, 4, self._random.randrange(2, 7), num_blocks * 4, 16)
        self._executors[executor_id], self._plans[executor_id] = FakeExecutor(capacity), deque()
        self._take(self.fleet.add_executor(executor_id, capacity))

    def _leave(self) -> None:
        executor_id = self._some()
        if executor_id is not None:
            self._lose(executor_id, has_died=self._random.random() < 0.7)

    def _lose(self, executor_id: InstanceId, *, has_died: bool) -> None:
        del self._executors[executor_id], self._plans[executor_id]
        self._take(self.fleet.remove_executor(executor_id, has_died=has_died))

    def _drain(self) -> None:
        executor_id = self._some()
        if executor_id is not None:
            self._take(self.fleet.drain_executor(executor_id))

    def _pin(self) -> None:
        tenant = self._random.choice(TENANTS)
        prefix = array("i", self._random.choice(PREFIXES))
        self.fleet.pin(Pin(self._random.choice("xyz"), "model", prefix, (("tenant", tenant),), tenant))

    def _unpin(self) -> None:
        self.fleet.unpin(self._random.choice("xyz"))


def record_storm(
    folder: Path, seed: int, *, num_calls: int = 3000, max_bytes: int = 1 << 30, keeps_plans: bool = False
) -> Path:
    """Record a storm; the file."""
    clock = FakeClock()
    recording = start_recording(folder, SCHEDULER, clock, max_bytes=max_bytes, keeps_plans=keeps_plans)
    storm = Storm(RecordedFleet(settings_of, WEIGHTS, recording), seed, clock)
    storm.rage(num_calls)
    recording.close()
    return recording.path


if __name__ == "__main__":
    print(record_storm(Path(sys.argv[1]), int(sys.argv[2])))
