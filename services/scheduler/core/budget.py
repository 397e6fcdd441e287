"""How many tokens of prompts a step may compute beside running outputs, learned from how long steps took.

A step that computes prompts takes longer, and every running output waits for it. The budget keeps such a step within a
limit: a time that readers do not mind, or a multiple of what a step without prompts takes if that is more. With the
multiple alone, a few fast outputs would hold up all prompts that wait: half of the time would be theirs. The budget
follows the machine, and the length of contexts.
"""

from dataclasses import dataclass
from typing import Final

_MEMORY: Final = 0.9
"""What a measurement still counts after the next one: the last ten or so matter."""
_FIRST_BUDGET: Final = 64
MAX_STEP_S: Final = 3600.0
"""A time that is longer is none: a clock that jumped."""
_MAX_BUDGET: Final = 1e9
_MIN_BUDGET: Final = 16
"""Prompts go on, however slow the machine: one block's worth of tokens."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step may hold."""

    max_tokens: int
    """Tokens computed in a step. At least the number of slots, so that every running choice can go on."""
    max_chunk_tokens: int
    """Tokens that one choice computes in a step: a longer prompt is computed in several."""
    target_step_s: float = 0.0
    """Time that a step with prompts may take while outputs run."""
    max_slowdown: float = 2.0
    """Such a step may also take so many times what one without prompts does, if that is more."""
    max_plan_bytes: int = 1 << 20
    """What the message that carries a plan may take."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.max_chunk_tokens < 1:
            raise ValueError("a step must hold at least one token, and so must a chunk")
        if self.target_step_s < 0 or self.max_slowdown <= 1:
            raise ValueError("a step must be given time for prompts: target_step_s >= 0, max_slowdown > 1")


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computed, as far as its time depends on it."""

    num_output_rows: int
    """Rows of choices whose prompt was computed before: they wait for this step's end to go on."""
    num_prompt_tokens: int
    """Tokens of all other rows."""


class PromptBudget:
    """The budget of one executor: a straight line through the times of the latest steps, over their prompt tokens.

    Where the line begins is what the running outputs alone take, its slope what a token of a prompt adds.
    """

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self._weight = self._tokens = self._rows = self._time = 0.0
        """Sums over the steps so far, each worth less than the next."""
        self._tokens_squared = self._tokens_by_time = 0.0

    def num_prompt_tokens(self, num_output_rows: int, num_drafts: int = 0, drafts_s: float = 0.0) -> int:
        """Tokens of prompts that the next step may compute beside `num_output_rows` running outputs, for which
        `num_drafts` tokens may be guessed, in so much time."""
        room = self.limits.max_tokens - num_output_rows - num_drafts
        return room if num_output_rows == 0 else max(0, min(room, self._budget(drafts_s)))

    def observe(self, shape: StepShape, duration_s: float) -> None:
        """Learn from a step. Times that make no sense are passed over."""
        if not 0 < duration_s < MAX_STEP_S or shape.num_output_rows == 0:
            return
        tokens = shape.num_prompt_tokens
        self._weight = self._weight * _MEMORY + 1
        self._rows = self._rows * _MEMORY + shape.num_output_rows
        self._tokens = self._tokens * _MEMORY + tokens
        self._time = self._time * _MEMORY + duration_s
        self._tokens_squared = self._tokens_squared * _MEMORY + tokens * tokens
        self._tokens_by_time = self._tokens_by_time * _MEMORY + tokens * duration_s

    def _budget(self, drafts_s: float) -> int:
        if self._tokens == 0:
            return _FIRST_BUDGET
        token_s = self._token_seconds()
        if token_s <= 0.0:
            return _FIRST_BUDGET
        plain_s = max(0.0, self._time - token_s * self._tokens) / self._weight + drafts_s
        limit_s = max(self.limits.target_step_s, self.limits.max_slowdown * plain_s)
        return max(_MIN_BUDGET, int(min((limit_s - plain_s) / token_s, _MAX_BUDGET)))

    def _token_seconds(self) -> float:
        """The line's slope. If the steps were too much alike to tell, a prompt token is like an output's row."""
        alike = self._time / (self._tokens + self._rows)
        spread = self._weight * self._tokens_squared - self._tokens**2
        if spread < 1e-3 * self._tokens**2:
            return alike
        slope = (self._weight * self._tokens_by_time - self._tokens * self._time) / spread
        return max(slope, alike / 100)
