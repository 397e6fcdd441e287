"""What the steps and outputs of one executor were like lately: how long steps took, how long outputs became."""

from typing import Final

from services.scheduler.core.budget import PromptBudget, StepLimits, StepShape
from services.scheduler.core.drafting import Drafting
from services.scheduler.core.step_cost import StepCost, StepCosts

_FIRST_TYPICAL_OUTPUT: Final = 64.0
"""Tokens that an output is taken to have before any has ended."""
_NUM_TYPICAL: Final = 32
"""Outputs that the typical one is an average of."""


class Experience:
    """Learned from each result of one executor."""

    def __init__(self, limits: StepLimits, max_draft_tokens: int = 0) -> None:
        """`max_draft_tokens` is what the executor can guess ahead of an output."""
        self.budget = PromptBudget(limits)
        self.drafting = Drafting(max_draft_tokens)
        self.typical_output = _FIRST_TYPICAL_OUTPUT
        """Tokens that outputs have had lately."""
        self._costs = StepCosts()

    @property
    def step_cost(self) -> StepCost | None:
        """What steps cost here, over the latest ones; None before the first."""
        return self._costs.cost

    def step_took(self, shape: StepShape, num_drafted: int, num_sampled: int, duration_s: float) -> None:
        """Learn from a step that guessed `num_drafted` tokens and sampled `num_sampled`."""
        if self.drafting.max_tokens and not shape.num_prompt_tokens:
            self.drafting.step_took(shape.num_output_rows + num_drafted, num_sampled, duration_s)
        # Guesses come and go with what is said. Without them a step is like others of its shape.
        if num_drafted:
            row_s = self.drafting.row_s
            alike_s = duration_s / (shape.num_output_rows + shape.num_prompt_tokens + num_drafted)
            duration_s -= num_drafted * (alike_s if row_s is None else min(row_s, alike_s))
        self.budget.observe(shape, duration_s)
        self._costs.observe(shape, duration_s)

    def num_prompt_tokens(self, num_output_rows: int, num_drafts: int) -> int:
        """Tokens of prompts that the next step may compute beside so many outputs and guesses for them."""
        row_s = self.drafting.row_s if num_drafts else None
        return self.budget.num_prompt_tokens(num_output_rows, num_drafts, (row_s or 0.0) * num_drafts)

    def output_had(self, num_tokens: int) -> None:
        """Learn from an output that has ended by itself."""
        self.typical_output += (num_tokens - self.typical_output) / _NUM_TYPICAL
