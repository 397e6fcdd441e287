"""What the steps of one executor cost: so much for any step, and so much for each token. Learned from their times.

Both are needed to compare executors. A token of a step that computes one output takes a hundred times as long as one of
a long prompt, on the same machine; judged by seconds for a token, an executor would look slow because it has little to
do, and get even less.
"""

from typing import Final, NamedTuple

from services.scheduler.core.budget import StepShape
from services.scheduler.core.step_times import MAX_STEP_S

_MEMORY: Final = 0.9
"""What a measurement still counts after the next one."""
_MIN_STEP_S: Final = 1e-9
_MIN_PART: Final = 0.02
"""Of a step's time, what its tokens take at least: noise must not make them free."""


class StepCost(NamedTuple):
    """In seconds."""

    step_s: float
    token_s: float


class Typical(NamedTuple):
    """What executors that can serve a request have seen, taken together."""

    cost: StepCost
    """For those that were not measured yet."""
    num_output_tokens: float


class _Point:
    """An average step of one kind."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._time = 0.0

    def observe(self, num_tokens: int, duration_s: float) -> None:
        self._weight = self._weight * _MEMORY + 1
        self._tokens = self._tokens * _MEMORY + num_tokens
        self._time = self._time * _MEMORY + duration_s

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    @property
    def num_tokens(self) -> float:
        return self._tokens / self._weight

    @property
    def duration_s(self) -> float:
        return self._time / self._weight


class StepCosts:
    """A line through two points: the latest steps that computed prompts, and the latest that did not.

    Each point stays until steps of its kind come again, so that hours of outputs do not make prompts forgotten.
    """

    def __init__(self) -> None:
        self._plain = _Point()
        self._with_prompts = _Point()

    def observe(self, shape: StepShape, duration_s: float) -> None:
        """Learn from a step. Times that make no sense are passed over."""
        if _MIN_STEP_S < duration_s < MAX_STEP_S:
            point = self._with_prompts if shape.num_prompt_tokens else self._plain
            point.observe(shape.num_prompt_tokens + shape.num_output_rows, duration_s)

    @property
    def cost(self) -> StepCost | None:
        """The line; None before the first step. With one point only, all of the time is put down to tokens."""
        few, many = self._plain, self._with_prompts
        if not (few.is_known and many.is_known):
            known = few if few.is_known else many
            return StepCost(0.0, known.duration_s / known.num_tokens) if known.is_known else None
        least = _MIN_PART * many.duration_s / many.num_tokens
        spread = many.num_tokens - few.num_tokens
        slope = (many.duration_s - few.duration_s) / spread if spread >= 1 else least
        token_s = min(max(slope, least), few.duration_s / few.num_tokens)
        return StepCost(max(0.0, few.duration_s - token_s * few.num_tokens), token_s)
