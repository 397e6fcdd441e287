"""How many tokens an executor may guess ahead of each output: as many as pay, learned from steps and from guesses.

A guess costs a row of the step's batch, and saves a step if it is right. It pays if it is likelier right than a row of
the batch is dear: what the row adds to the step's time, times the tokens that steps yield in a time. With one output a
row is cheap, for the weights are read anyway, and doubtful guesses pay; with many, only certain ones.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from services.scheduler.core.request import Choice
from services.scheduler.core.step_times import StepTimes

_MEMORY: Final = 0.95
"""What a step's yield still counts after the next one."""
_FIRST_PRICE: Final = 0.5
_MIN_PRICE: Final = 0.1
_MAX_PRICE: Final = 0.98
_LEARNING: Final = 1 / 8
"""What a guess counts in the estimate of the next."""
_TRIAL_TOKENS: Final = 32
"""Tokens after which an output whose guesses do not pay gets one to try."""


class Drafting:
    """What guesses cost on one executor, and who gets how many."""

    def __init__(self, max_tokens: int, times: StepTimes) -> None:
        """`max_tokens` is the most that the executor guesses for a row; 0: it guesses none. `times` says how long its
        steps take."""
        self.max_tokens = max_tokens
        self._times = times
        self._weight = self._yield = 0.0

    def worth_guessing(self, outputs: Iterable[Choice]) -> Iterator[tuple[int, int]]:
        """The outputs that may have tokens guessed in the next step: place, and how many."""
        price = self.price
        for row, choice in enumerate(outputs):
            if choice.draft_success > price or len(choice.output) % _TRIAL_TOKENS == _TRIAL_TOKENS - 1:
                yield row, self._num_tokens(choice.draft_success, price)

    def _num_tokens(self, likelihood: float, price: float) -> int:
        """How many it pays to guess where each is right with that likelihood; one at least, for a trial."""
        num_tokens, right = 1, likelihood * likelihood
        while num_tokens < self.max_tokens and right > price:
            num_tokens += 1
            right *= likelihood
        return num_tokens

    def guessed(self, choice: Choice, num_drafted: int, num_right: int) -> None:
        """Learn from the guesses for one output: `num_right`, and unless all were, one that was wrong."""
        for number in range(min(num_drafted, num_right + 1)):
            choice.draft_success += ((number < num_right) - choice.draft_success) * _LEARNING

    def yielded(self, num_tokens: int) -> None:
        """Learn how many tokens outputs got of a step."""
        self._weight = self._weight * _MEMORY + 1
        self._yield = self._yield * _MEMORY + num_tokens

    @property
    def price(self) -> float:
        """How likely a guess must be right to pay: what a row takes, over what a token takes on average, prompts not
        counted."""
        time = self._times.time
        if time is None or not self._yield:
            return _FIRST_PRICE
        token_s = time.of_rows(self._times.mean_rows) * self._weight / self._yield
        return min(max(time.row_s / token_s, _MIN_PRICE), _MAX_PRICE)
