"""The thread that computes: takes plans from a queue and runs them back to back, without a trip to the event loop.

Owns the thread and the queue. Does not own the order of plans nor who may send them. What happened is reported by a
callback, which is called in this thread.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from shared.messages import ExecutorCapacity, StepPlan, StepResult


class Runner(Protocol):
    """What runs plans; called in the step thread alone once that is started."""

    @property
    def capacity(self) -> ExecutorCapacity:
        """What it has room for."""
        ...

    @property
    def device(self) -> str:
        """What it computes on, for people."""
        ...

    def reset(self) -> None:
        """Empty every slot."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Carry out one plan."""
        ...


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A plan was carried out."""

    epoch: int
    num_tokens: int
    """Rows of the forward pass."""
    result: StepResult
    num_rows: int
    """Choices that had a part in it."""
    ended_ns: int
    """When, since 1970."""


@dataclass(frozen=True, slots=True)
class StepThreadFailed:
    """A plan could not be carried out, which is a bug; the thread has ended."""

    error: BaseException


Report = Callable[[StepFinished | StepThreadFailed], None]


class StepThread:
    """Runs the plans of one epoch at a time."""

    def __init__(self, runner: Runner, report: Report, *, nice: int = 0) -> None:
        """`nice` lowers the priority of this thread and of those that help it, not of the event loop's (on Linux)."""
        self._runner = runner
        self._report = report
        self._nice = nice
        self._epoch = 0
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)

    def start(self) -> None:
        """Start taking plans."""
        self._thread.start()

    def reset(self, epoch: int) -> None:
        """Drop the plans that wait, and empty the slots before the first plan of `epoch` runs."""
        self._epoch = epoch
        self._queue.put(self._runner.reset)

    def submit(self, epoch: int, plan: StepPlan) -> None:
        """Run the plan after those submitted before; it is dropped if another epoch has come by then."""
        self._queue.put(lambda: self._step(epoch, plan))

    def stop(self) -> None:
        """Let the plan that runs finish, drop those that wait, and wait for the thread to end."""
        self._epoch = 0
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            if self._nice:
                os.nice(self._nice)
            while (job := self._queue.get()) is not None:
                job()
        except BaseException as error:
            self._report(StepThreadFailed(error))

    def _step(self, epoch: int, plan: StepPlan) -> None:
        if epoch == self._epoch:
            result = self._runner.run(plan)
            num_tokens = sum(plan.counts) + sum(result.num_drafted)
            self._report(StepFinished(epoch, num_tokens, result, len(plan.counts), time.time_ns()))
