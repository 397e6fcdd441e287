"""The steps that an executor was given and has not answered yet. Numbers them, and takes answers in order only."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from services.scheduler.core.budget import StepShape
from services.scheduler.core.request import Choice
from shared.messages import StepResult


class StepMismatch(Exception):
    """A result that is not the one expected next."""


class PlannedStep(NamedTuple):
    """A plan whose result has not come yet."""

    step_id: int
    sampled: Sequence[Choice]
    """Those that sample in it, in the order of the result's tokens."""
    shape: StepShape


class Pipeline:
    """The steps in flight of one executor, oldest first."""

    def __init__(self) -> None:
        self.next_step_id = 1
        self._steps: deque[PlannedStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, sampled: Sequence[Choice], shape: StepShape) -> None:
        """One more step is on its way, with the number that was next."""
        self._steps.append(PlannedStep(self.next_step_id, sampled, shape))
        self.next_step_id += 1

    def take(self, result: StepResult) -> PlannedStep:
        """The step that a result is of. Raises StepMismatch, and changes nothing, unless it is the oldest."""
        step = self._steps[0] if self._steps else None
        if step is None or step.step_id != result.step_id:
            raise StepMismatch(f"got the result of step {result.step_id}, expected {step.step_id if step else 'none'}")
        if len(step.sampled) != len(result.token_ids):
            raise StepMismatch(
                f"step {result.step_id} sampled {len(result.token_ids)} tokens, expected {len(step.sampled)}"
            )
        return self._steps.popleft()

    def abandon(self) -> None:
        """No results will come any more: what was in flight is not."""
        for step in self._steps:
            for choice in step.sampled:
                choice.num_in_flight = 0
        self._steps.clear()
