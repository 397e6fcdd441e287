"""The tokenizer's metrics: what is counted only for them, and where the rest is read."""

from collections.abc import Callable
from typing import Final

from services.tokenizer.answers import Answer
from shared.messages import CallFailed, DetokenizeTokens, RequestRefused, SubmitRequest, TokenizePrompt, TokenizerStatus
from shared.telemetry.metrics import Histogram, Instrument, Kind, Reading, Tally

_DURATIONS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_KINDS: Final = {SubmitRequest: "submit", TokenizePrompt: "tokenize", DetokenizeTokens: "detokenize"}


class TokenizerMetrics:
    """Told of every question, once."""

    def __init__(self) -> None:
        self.answered = Tally()
        """By kind and result."""
        self.duration = Histogram(
            "shoal.tokenizer.duration", "s", "Time to answer one question", _DURATIONS, ("place",)
        )

    def took(self, seconds: float, *, is_inline: bool) -> None:
        """An answer was found."""
        self.duration.record(seconds, "inline" if is_inline else "thread")

    def sent(self, answer: Answer) -> None:
        """An answer was given."""
        is_refused = isinstance(answer.message, RequestRefused | CallFailed)
        self.answered.add(1, _KINDS[type(answer.question)], "refused" if is_refused else "answered")


def tokenizer_instruments(
    metrics: TokenizerMetrics, status: Callable[[], TokenizerStatus], num_waiting: Callable[[], int]
) -> list[Instrument]:
    """The instruments of one tokenizer: `status` is what its beat says, `num_waiting` prompts are with its thread."""
    return [
        metrics.duration,
        Reading(
            "shoal.tokenizer.requests",
            Kind.COUNTER,
            "{request}",
            "Questions",
            lambda: metrics.answered.counts,
            ("kind", "result"),
        ),
        Reading(
            "shoal.tokenizer.tokens", Kind.COUNTER, "{token}", "Tokens of prompts encoded", lambda: status().num_tokens
        ),
        Reading("shoal.tokenizer.prompts.waiting", Kind.SUM, "{request}", "Long prompts with the thread", num_waiting),
    ]
