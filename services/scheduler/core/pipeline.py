"""The steps that an executor was given and has not answered yet. Numbers them, and takes answers in order only."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from services.scheduler.core.budget import StepShape
from services.scheduler.core.request import Choice
from shared.messages import Int32Array, StepResult


class StepMismatch(Exception):
    """A result that is not the one expected next."""


class PlannedStep(NamedTuple):
    """A plan whose result has not come yet."""

    step_id: int
    sampled: Sequence[Choice]
    """Those that sample in it, in the order of the result's tokens."""
    shape: StepShape
    max_drafts: Int32Array
    """How many guesses each of them was allowed; empty: none."""

    def allowed(self, row: int) -> int:
        """How many guesses one of them was allowed."""
        return self.max_drafts[row] if self.max_drafts else 0


class Pipeline:
    """The steps in flight of one executor, oldest first."""

    def __init__(self) -> None:
        self.next_step_id = 1
        self._steps: deque[PlannedStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, sampled: Sequence[Choice], shape: StepShape, max_drafts: Int32Array) -> None:
        """One more step is on its way, with the number that was next."""
        self._steps.append(PlannedStep(self.next_step_id, sampled, shape, max_drafts))
        self.next_step_id += 1

    def take(self, result: StepResult) -> PlannedStep:
        """The step that a result is of. Raises StepMismatch, and changes nothing, unless it is the oldest."""
        step = self._steps[0] if self._steps else None
        if step is None or step.step_id != result.step_id:
            raise StepMismatch(f"got the result of step {result.step_id}, expected {step.step_id if step else 'none'}")
        if result.num_tokens:
            _check_counts(step, result)
        elif len(step.sampled) != len(result.token_ids):
            raise StepMismatch(
                f"step {result.step_id} sampled {len(result.token_ids)} tokens, expected {len(step.sampled)}"
            )
        return self._steps.popleft()

    def abandon(self) -> None:
        """No results will come any more: what was in flight is not."""
        for step in self._steps:
            for choice in step.sampled:
                choice.num_in_flight = choice.num_drafts_in_flight = 0
        self._steps.clear()


def _check_counts(step: PlannedStep, result: StepResult) -> None:
    """Raise StepMismatch unless each row has a token, and one at most for each guess that was allowed and made."""
    num_rows, num_tokens = len(step.sampled), sum(result.num_tokens)
    if not num_rows == len(result.num_tokens) == len(result.num_drafted) or num_tokens != len(result.token_ids):
        raise StepMismatch(
            f"step {result.step_id} has {len(result.token_ids)} tokens and counts of {num_tokens} "
            f"in {len(result.num_tokens)} rows, expected {num_rows} rows"
        )
    for row, (count, drafted) in enumerate(zip(result.num_tokens, result.num_drafted, strict=True)):
        if not 1 <= count <= drafted + 1 <= step.allowed(row) + 1:
            raise StepMismatch(
                f"step {result.step_id}, row {row}: {count} tokens of {drafted} guesses, {step.allowed(row)} allowed"
            )
