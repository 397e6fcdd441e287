"""How long a step of one executor takes: a constant, so much for each row of outputs, and for each token of a prompt.

Fitted to the latest steps by least squares, each worth less than the next. Steps can be so alike that they do not tell
the three apart; then what is usual decides, with the weight of one step: the constant is what a few rows take, and a
token of a prompt takes half of a row.
"""

from typing import Final, NamedTuple

_MEMORY: Final = 0.9
"""What a measurement still counts after the next one: the last ten or so matter."""
_BELIEF: Final = 1.0
_USUAL_BASE_ROWS: Final = 4.0
_USUAL_PROMPT_ROWS: Final = 0.5
_LEAST_SHARE: Final = 0.01
"""Of what a row or token takes if the whole time is shared out evenly: noise must not make one free."""
_MIN_STEP_S: Final = 1e-9
MAX_STEP_S: Final = 3600.0
"""A time that is longer is none: a clock that jumped."""


class StepTime(NamedTuple):
    """In seconds."""

    base_s: float
    row_s: float
    prompt_token_s: float

    def of_rows(self, num_rows: float) -> float:
        """What a step of so many rows takes."""
        return self.base_s + self.row_s * num_rows


class StepTimes:
    """The latest steps that had outputs."""

    def __init__(self) -> None:
        self._weight = self._rows = self._tokens = self._time = 0.0
        self._rows_rows = self._rows_tokens = self._tokens_tokens = 0.0
        self._rows_time = self._tokens_time = 0.0
        self._fit: StepTime | None = None

    @property
    def has_prompts(self) -> bool:
        """Whether any of the steps computed tokens of prompts."""
        return self._tokens > 0

    @property
    def mean_rows(self) -> float:
        """Rows of a step, guesses included, on average; 1 before the first."""
        return self._rows / self._weight if self._weight else 1.0

    def observe(self, num_rows: int, num_prompt_tokens: int, duration_s: float) -> bool:
        """Learn from a step; False, and nothing learned, if it had no rows, or the time makes no sense."""
        if not _MIN_STEP_S <= duration_s < MAX_STEP_S or num_rows == 0:
            return False
        self._fit = None
        self._weight = self._weight * _MEMORY + 1
        self._rows = self._rows * _MEMORY + num_rows
        self._tokens = self._tokens * _MEMORY + num_prompt_tokens
        self._time = self._time * _MEMORY + duration_s
        self._rows_rows = self._rows_rows * _MEMORY + num_rows * num_rows
        self._rows_tokens = self._rows_tokens * _MEMORY + num_rows * num_prompt_tokens
        self._tokens_tokens = self._tokens_tokens * _MEMORY + num_prompt_tokens * num_prompt_tokens
        self._rows_time = self._rows_time * _MEMORY + num_rows * duration_s
        self._tokens_time = self._tokens_time * _MEMORY + num_prompt_tokens * duration_s
        return True

    @property
    def time(self) -> StepTime | None:
        """What a step takes; None before the first."""
        if self._fit is None and self._weight:
            self._fit = self._fitted()
        return self._fit

    def _fitted(self) -> StepTime:
        """Solve the normal equations, with what is usual as two more equations."""
        a = self._weight + _BELIEF
        b = self._rows - _BELIEF * _USUAL_BASE_ROWS
        c = self._tokens
        d = self._rows_rows + _BELIEF * (_USUAL_BASE_ROWS**2 + _USUAL_PROMPT_ROWS**2)
        e = self._rows_tokens - _BELIEF * _USUAL_PROMPT_ROWS
        f = self._tokens_tokens + _BELIEF
        # Symmetric and positive definite: eliminate without a search for pivots.
        d, e, rows_time = d - b * b / a, e - b * c / a, self._rows_time - b * self._time / a
        f, tokens_time = f - c * c / a, self._tokens_time - c * self._time / a
        token_s = (tokens_time - e * rows_time / d) / (f - e * e / d)
        row_s = (rows_time - e * token_s) / d
        base_s = (self._time - b * row_s - c * token_s) / a
        least = _LEAST_SHARE * self._time / (self._rows + self._tokens)
        return StepTime(max(base_s, 0.0), max(row_s, least), max(token_s, least))
