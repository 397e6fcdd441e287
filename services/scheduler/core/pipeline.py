"""The steps that an executor was given and has not answered yet. Numbers them, and takes answers in order only."""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from services.scheduler.core.budget import StepShape
from services.scheduler.core.request import Choice
from shared.messages import Int32Array, StepResult, TokenLogprobs

Logprobs = tuple[TokenLogprobs | None, ...]
"""One for each token; empty if the request does not want them."""


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

    def rows(self, result: StepResult) -> Iterable[tuple[Choice, Int32Array, Logprobs, str | None]]:
        """Each of them with the tokens that the step's result has for it, and why its row failed after these."""
        num_rows = len(self.sampled)
        token_ids, logprobs = _guessed(self, result) if result.num_tokens else _one_each(result)
        logprobs = logprobs or [()] * num_rows
        if not result.failures:
            return zip(self.sampled, token_ids, logprobs, [None] * num_rows, strict=True)
        reasons = {failure.row: failure.reason for failure in result.failures}
        for row in reasons.keys() & range(num_rows):
            token_ids[row], logprobs[row] = token_ids[row][:-1], logprobs[row][:-1]
        return zip(self.sampled, token_ids, logprobs, map(reasons.get, range(num_rows)), strict=True)


def _one_each(result: StepResult) -> tuple[list[Int32Array], list[Logprobs]]:
    """The tokens and log-probabilities of each row of a step that made no guesses."""
    token_ids = [array("i", (token_id,)) for token_id in result.token_ids]
    return token_ids, [() if each is None else (each,) for each in result.logprobs]


def _guessed(step: PlannedStep, result: StepResult) -> tuple[list[Int32Array], list[Logprobs]]:
    """The same for one that did: each row has as many as were guessed right, and one."""
    token_ids: list[Int32Array] = []
    logprobs: list[Logprobs] = []
    end = 0
    for choice, count in zip(step.sampled, result.num_tokens, strict=True):
        start, end = end, end + count
        token_ids.append(result.token_ids[start:end])
        is_wanted = choice.request.sampling.num_logprobs is not None
        logprobs.append(result.logprobs[start:end] if is_wanted else ())
    return token_ids, logprobs


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
        for choice in step.sampled:
            choice.num_in_flight -= 1
        for choice, num_allowed in zip(step.sampled, step.max_drafts, strict=False):
            choice.num_drafts_in_flight -= num_allowed
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
