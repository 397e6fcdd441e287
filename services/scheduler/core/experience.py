"""What the steps and outputs of one executor were like lately: how long steps took, how long outputs became."""

from typing import Final

from services.scheduler.core.budget import PromptBudget, StepLimits, StepShape
from services.scheduler.core.drafting import Drafting
from services.scheduler.core.step_cost import StepCost, StepCosts
from services.scheduler.core.step_times import StepTimes

_FIRST_TYPICAL_OUTPUT: Final = 64.0
"""Tokens that an output is taken to have before any has ended."""
_NUM_TYPICAL: Final = 32
"""Outputs that the typical one is an average of."""


class Experience:
    """Learned from each result of one executor."""

    def __init__(self, limits: StepLimits, max_draft_tokens: int = 0) -> None:
        """`max_draft_tokens` is what the executor can guess ahead of an output."""
        self.times = StepTimes()
        self.budget = PromptBudget(limits, self.times)
        self.drafting = Drafting(max_draft_tokens, self.times)
        self.typical_output = _FIRST_TYPICAL_OUTPUT
        """Tokens that outputs have had lately."""
        self._costs = StepCosts()

    @property
    def step_cost(self) -> StepCost | None:
        """What steps cost here, over the latest ones; None before the first."""
        return self._costs.cost

    def step_took(self, shape: StepShape, num_drafted: int, num_sampled: int, duration_s: float) -> None:
        """Learn from a step that guessed `num_drafted` tokens and sampled `num_sampled`."""
        if self.times.observe(shape.num_output_rows + num_drafted, shape.num_prompt_tokens, duration_s):
            self.drafting.yielded(num_sampled)
        if num_drafted:
            shape = StepShape(shape.num_output_rows + num_drafted, shape.num_prompt_tokens)
        self._costs.observe(shape, duration_s)

    def output_had(self, num_tokens: int) -> None:
        """Learn from an output that has ended by itself."""
        self.typical_output += (num_tokens - self.typical_output) / _NUM_TYPICAL
