"""How many tokens an executor may guess ahead of each output: as many as pay, learned from steps and from guesses.

A guess costs a row of the step's batch, and saves a step if it is right. It pays if it is likelier right than a row of
the batch is dear: what the row adds to the step's time, times the tokens that steps yield in a time. With one output a
row is cheap, for the weights are read anyway, and doubtful guesses pay; with many, only certain ones.
"""

from typing import Final

from services.scheduler.core.budget import MAX_STEP_S
from services.scheduler.core.request import Choice

_MEMORY: Final = 0.98
"""What a measurement still counts after the next one: times are noisy, and rows differ little between steps."""
_FIRST_BASE_ROWS: Final = 4
"""Until steps of different sizes were seen: a step takes as long without rows as so many rows do."""
_LEAST_SPREAD: Final = 1e-4
"""Of the square of their mean, what the variance of rows must be to tell anything."""
_MIN_PRICE: Final = 0.1
_MAX_PRICE: Final = 0.98
_LEARNING: Final = 1 / 8
"""What a guess counts in the estimate of the next."""
_TRIAL_TOKENS: Final = 32
"""Tokens after which an output whose guesses do not pay gets one to try."""


class Drafting:
    """What guesses cost on one executor, and who gets how many."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens` is the most that the executor guesses for a row; 0: it guesses none."""
        self.max_tokens = max_tokens
        self._weight = self._rows = self._time = self._yield = 0.0
        """Sums over the steps so far, each worth less than the next."""
        self._rows_squared = self._rows_by_time = 0.0

    def num_tokens(self, choice: Choice) -> int:
        """How many an output may have guessed in the next step."""
        price, likelihood = self._price(), choice.draft_success
        num_tokens, right = 0, likelihood
        while num_tokens < self.max_tokens and right > price:
            num_tokens += 1
            right *= likelihood
        if num_tokens == 0 and len(choice.output) % _TRIAL_TOKENS == _TRIAL_TOKENS - 1:
            return min(1, self.max_tokens)
        return num_tokens

    def guessed(self, choice: Choice, num_drafted: int, num_right: int) -> None:
        """Learn from the guesses for one output: `num_right`, and unless all were, one that was wrong."""
        for number in range(min(num_drafted, num_right + 1)):
            choice.draft_success += ((number < num_right) - choice.draft_success) * _LEARNING

    def step_took(self, num_rows: int, num_tokens: int, duration_s: float) -> None:
        """Learn from a step without prompts: rows of its batch, guesses included, and tokens that it yielded."""
        if not 0 < duration_s < MAX_STEP_S or num_tokens == 0:
            return
        self._weight = self._weight * _MEMORY + 1
        self._rows = self._rows * _MEMORY + num_rows
        self._yield = self._yield * _MEMORY + num_tokens
        self._time = self._time * _MEMORY + duration_s
        self._rows_squared = self._rows_squared * _MEMORY + num_rows * num_rows
        self._rows_by_time = self._rows_by_time * _MEMORY + num_rows * duration_s

    @property
    def row_s(self) -> float | None:
        """What a row adds to a step's time, in seconds; None until steps of different sizes were seen."""
        spread = self._weight * self._rows_squared - self._rows**2
        if self._time == 0 or spread < _LEAST_SPREAD * self._rows**2:
            return None
        return max(0.0, (self._weight * self._rows_by_time - self._rows * self._time) / spread)

    def _price(self) -> float:
        """How likely a guess must be right to pay: what a row takes, over what a token takes on average."""
        row_s = self.row_s
        if row_s is None:
            num_rows = self._rows / self._weight if self._weight else 1.0
            return num_rows / (num_rows + _FIRST_BASE_ROWS)
        return min(max(row_s * self._yield / self._time, _MIN_PRICE), _MAX_PRICE)
