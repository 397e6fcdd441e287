"""The guesses of one executor's steps: which are allowed, with blocks to write them to, and what comes of them.

For how many tokens it pays to guess is `drafting`'s to say. Guesses take nothing from anybody: they get tokens and
blocks that a step can spare, or are not made.
"""

from collections.abc import Sequence

from services.scheduler.core import policy
from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.drafting import Drafting
from services.scheduler.core.fairness import OUTPUT_TOKEN_WEIGHT, FairShares
from services.scheduler.core.pipeline import PlannedStep
from services.scheduler.core.request import Choice
from shared.ids import BlockId
from shared.messages import ExecutorCapacity, StepResult


class Guesses:
    """What guessing adds to the steps of one executor."""

    def __init__(
        self, capacity: ExecutorCapacity, drafting: Drafting, blocks: BlockManager, shares: FairShares
    ) -> None:
        self._max_in_step = capacity.max_step_drafts
        self._drafting = drafting
        self._blocks = blocks
        self._shares = shares

    def allow(
        self, outputs: Sequence[Choice], grown: dict[int, list[BlockId]], *, num_tokens_left: int, num_running: int
    ) -> list[tuple[int, int]]:
        """How many tokens may be guessed for which of a step's outputs, by place; blocks for them come to `grown`.

        `num_tokens_left` is what the step holds beside the outputs, `num_running` how many may need a block soon.
        """
        num_left = min(self._max_in_step, num_tokens_left)
        if num_left <= 0:
            return []
        allowed: list[tuple[int, int]] = []
        headroom = policy.admission_headroom(num_running)
        for row, num_worth in self._drafting.worth_guessing(outputs):
            if num_left <= 0:
                break
            choice = outputs[row]
            num_output = len(choice.output) + choice.num_in_flight + choice.num_drafts_in_flight
            num_tokens = min(num_worth, choice.request.max_tokens - num_output - 1, num_left)
            if num_tokens <= 0:
                continue
            new_blocks = self._blocks.grow(choice, choice.num_drafts_in_flight + 1 + num_tokens, headroom=headroom)
            if new_blocks is None:
                continue
            if new_blocks:
                grown[row] = grown.get(row, []) + new_blocks
            allowed.append((row, num_tokens))
            num_left -= num_tokens
        return allowed

    def learn(self, step: PlannedStep, result: StepResult) -> None:
        """Take in which guesses a step made, and how many of them were right."""
        for choice, count, num_drafted in zip(step.sampled, result.num_tokens, result.num_drafted, strict=True):
            self._drafting.guessed(choice, num_drafted, count - 1)
            choice.request.num_guessed += num_drafted

    def count_computed(self, choice: Choice, num_tokens: int) -> None:
        """So many tokens of a running choice were guessed right: computed, and served, without a plan that said so."""
        choice.num_computed_tokens += num_tokens
        if (num_new := choice.num_computed_tokens - choice.num_tokens_charged) > 0:
            self._shares.charge(choice.request.tenant, OUTPUT_TOKEN_WEIGHT * num_new)
            choice.num_tokens_charged = choice.num_computed_tokens
