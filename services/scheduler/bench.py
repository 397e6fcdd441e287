"""`python -m services.scheduler.bench`: what a step costs the scheduler, in CPU time.

Measured is the core, as the service calls it: `Fleet.schedule` that makes the plan of a step and `Fleet.apply` that
takes in a result, two steps in flight, while every running request gets one token a step. Prompts are lognormal around
500 tokens, each request another, in blocks of 16. Python's garbage collector runs as it does in the service. Not in it:
messages, packing, and the admission of new requests.
"""

import argparse
import json
import signal
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from math import log
from random import Random
from statistics import fmean, median
from typing import Final

from services.scheduler.config import SchedulerConfig
from services.scheduler.core.fairness import FairShares
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.garbage import collect_rarely
from shared.ids import InstanceId, RequestId
from shared.messages import ExecutorCapacity, StepPlan, StepResult
from shared.sampling import SamplingParams

RUNNING: Final = (256, 1024)
"""How many requests run at once, unless told otherwise."""

_EXECUTOR: Final = InstanceId("executor")
_BLOCK_SIZE: Final = 16
_MEDIAN_PROMPT: Final = 500
_MAX_PROMPT: Final = 4000
_MAX_OUTPUT: Final = 8192
_STEP_S: Final = 0.03
_NUM_TENANTS: Final = 8
_VOCABULARY: Final = 50_000
_MAX_DRAFT_TOKENS: Final = 11
"""The executor may be allowed guesses, and finds nothing to guess."""
_MAX_PLAN_BYTES: Final = 1 << 30
"""No limit: messages are not what is measured."""


class SteadyDecode:
    """One executor of a fleet on which every request has computed its prompt and generates."""

    def __init__(self, num_running: int, *, seed: int = 0) -> None:
        self._random = Random(seed)
        self._config = SchedulerConfig()
        self._plans: deque[StepPlan] = deque()
        num_blocks = num_running * (_MAX_PROMPT + _MAX_OUTPUT) // _BLOCK_SIZE
        max_model_len = _MAX_PROMPT + _MAX_OUTPUT
        capacity = ExecutorCapacity(
            "model",
            num_blocks,
            _BLOCK_SIZE,
            num_running,
            max_model_len,
            max_step_tokens=num_running + 8192,
            max_draft_tokens=_MAX_DRAFT_TOKENS,
        )
        self._fleet = Fleet(self._make_scheduler)
        self._fleet.add_executor(_EXECUTOR, capacity)
        for arrival in range(num_running):
            self._fleet.add(self._make_request(arrival))
        while not self._is_steady(num_running):
            self.step()

    def step(self) -> float:
        """Plan a step and take in the result of the one before the last; the CPU time, in seconds."""
        result = self._result(self._plans.popleft()) if len(self._plans) == self._config.pipeline_depth else None
        began = time.thread_time()
        if result is not None:
            self._fleet.apply(_EXECUTOR, result)
        plan = self._fleet.schedule(_EXECUTOR)
        seconds = time.thread_time() - began
        if plan is not None:
            self._plans.append(plan)
        return seconds

    def _is_steady(self, num_running: int) -> bool:
        """Whether every plan that owes a result gives each request one token."""
        is_full = len(self._plans) == self._config.pipeline_depth
        return is_full and all(sum(plan.counts) == len(plan.sampled_rows) == num_running for plan in self._plans)

    def _result(self, plan: StepPlan) -> StepResult:
        tokens = array("i", self._random.choices(range(_VOCABULARY), k=len(plan.sampled_rows)))
        return StepResult(plan.step_id, tokens, duration_s=_STEP_S)

    def _make_request(self, arrival: int) -> Request:
        length = min(_MAX_PROMPT, max(_BLOCK_SIZE, round(self._random.lognormvariate(log(_MEDIAN_PROMPT), 0.8))))
        tenant = f"tenant-{arrival % _NUM_TENANTS}"
        return Request(
            RequestId(f"request-{arrival}"),
            array("i", self._random.choices(range(_VOCABULARY), k=length)),
            SamplingParams(seed=arrival, end_token_ids=(_VOCABULARY,)),
            arrival=arrival,
            max_tokens=_MAX_OUTPUT,
            model="model",
            tenant=tenant,
            salts=(("tenant", tenant),),
        )

    def _make_scheduler(self, capacity: ExecutorCapacity, shares: FairShares) -> Scheduler:
        settings = self._config.settings_for(capacity, max_plan_bytes=_MAX_PLAN_BYTES)
        return settings.make_scheduler(capacity, shares)


def step_seconds(num_running: int, num_steps: int) -> Iterator[float]:
    """The CPU time of each of `num_steps` steps with so many requests running."""
    steady = SteadyDecode(num_running)
    for _ in range(num_steps // 4):
        steady.step()
    for _ in range(num_steps):
        yield steady.step()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="shoal bench scheduler",
        description="Measure the CPU time that the scheduler takes to plan a step and to take in a result.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="steps to measure")
    parser.add_argument("--running", type=int, nargs="+", default=RUNNING, metavar="N", help="requests at once")
    parser.add_argument("--json", action="store_true", help="the medians, in milliseconds, by number of requests")
    options = parser.parse_args(arguments)
    if not 4 <= options.steps <= _MAX_OUTPUT // 2 or min(options.running) < 1:
        parser.error(f"measure from 4 to {_MAX_OUTPUT // 2} steps, with at least 1 request")
    measured = {number: [s * 1e3 for s in step_seconds(number, options.steps)] for number in options.running}
    if options.json:
        print(json.dumps({str(number): round(median(times), 3) for number, times in measured.items()}))
        return
    print("CPU time of a step of the scheduler: plan it, take in its result; every request gets a token")
    print(f"{'running':>8}{'median ms':>11}{'mean ms':>9}{'p99 ms':>8}{'µs a request':>14}")
    for number, times in measured.items():
        p99 = sorted(times)[len(times) * 99 // 100]
        middle = median(times)
        print(f"{number:>8}{middle:>11.2f}{fmean(times):>9.2f}{p99:>8.2f}{middle * 1e3 / number:>14.2f}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` ends like any other program
    collect_rarely()
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
