"""How many tokens of prompts a step may compute beside running outputs, learned from how long steps took.

A step that computes prompts takes longer, and every running output waits for it. The budget keeps such a step within a
limit: a time that readers do not mind, or a multiple of what a step without prompts takes if that is more. With the
multiple alone, a few fast outputs would hold up all prompts that wait: half of the time would be theirs. The budget
follows the machine, and the length of contexts.
"""

from dataclasses import dataclass
from typing import Final

from services.scheduler.core.step_times import StepTimes

_FIRST_BUDGET: Final = 64
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
    """The budget of one executor, from how long its steps take."""

    def __init__(self, limits: StepLimits, times: StepTimes) -> None:
        self.limits = limits
        self._times = times

    def num_prompt_tokens(self, num_output_rows: int, num_drafts: int = 0) -> int:
        """Tokens of prompts that the next step may compute beside `num_output_rows` running outputs, for which
        `num_drafts` tokens may be guessed."""
        num_rows = num_output_rows + num_drafts
        room = self.limits.max_tokens - num_rows
        return room if num_output_rows == 0 else max(0, min(room, self._budget(num_rows)))

    def _budget(self, num_rows: int) -> int:
        time = self._times.time
        if time is None or not self._times.has_prompts:
            return _FIRST_BUDGET
        plain_s = time.of_rows(num_rows)
        limit_s = max(self.limits.target_step_s, self.limits.max_slowdown * plain_s)
        return max(_MIN_BUDGET, int(min((limit_s - plain_s) / time.prompt_token_s, _MAX_BUDGET)))
