"""The executor's metrics: what is counted only for them, and where the rest is read."""

from collections.abc import Callable
from typing import Final

from shared.messages import ExecutorCapacity, ExecutorStatus, StepResult
from shared.telemetry.metrics import Histogram, Instrument, Kind, Reading

_DURATIONS: Final = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TOKENS: Final = (*_ROWS, 512, 1024, 2048, 4096)


class ExecutorMetrics:
    """Told of every step, once."""

    def __init__(self) -> None:
        self.num_sampled = 0
        self.num_failed_rows = 0
        self.duration = Histogram("shoal.executor.step.duration", "s", "One step", _DURATIONS)
        self.rows = Histogram("shoal.executor.step.rows", "{choice}", "Choices in a step", _ROWS)
        self.tokens = Histogram("shoal.executor.step.tokens", "{token}", "Tokens computed in a step", _TOKENS)

    def step_took(self, num_rows: int, num_tokens: int, result: StepResult) -> None:
        """A step of so many rows and tokens is done. The last token of a row that failed means nothing."""
        self.duration.record(result.duration_s)
        self.rows.record(num_rows)
        self.tokens.record(num_tokens)
        self.num_sampled += len(result.token_ids) - len(result.failures)
        self.num_failed_rows += len(result.failures)


def executor_instruments(
    metrics: ExecutorMetrics,
    status: Callable[[], ExecutorStatus],
    num_waiting: Callable[[], int],
    capacity: ExecutorCapacity,
    kv_cache_bytes: int,
) -> list[Instrument]:
    """The instruments of one executor: `status` is what its beat says, `num_waiting` plans are not finished."""
    return [
        metrics.duration,
        metrics.rows,
        metrics.tokens,
        _count("busy", "s", "Time spent inside steps", lambda: status().busy_s),
        _count("tokens.computed", "{token}", "Tokens computed", lambda: status().num_tokens),
        _count("tokens.sampled", "{token}", "Output tokens sampled", lambda: metrics.num_sampled),
        Reading(
            "shoal.executor.guesses",
            Kind.COUNTER,
            "{token}",
            "Tokens guessed ahead",
            lambda: _guesses(status()),
            ("result",),
        ),
        _count("rows.failed", "{choice}", "Rows that had no token", lambda: metrics.num_failed_rows),
        Reading("shoal.executor.plans.waiting", Kind.SUM, "{step}", "Plans taken, not finished", num_waiting),
        Reading(
            "shoal.executor.held", Kind.SUM, "1", "Whether a scheduler holds it", lambda: status().held_by is not None
        ),
        _count("epochs", "{epoch}", "Times a scheduler took it", lambda: status().epoch),
        _size("slots", "{choice}", "Choices that can run at once", capacity.model, capacity.max_slots),
        _size("blocks", "{block}", "Blocks of KV cache", capacity.model, capacity.num_blocks),
        _size("kv_cache.size", "By", "Bytes of KV cache", capacity.model, kv_cache_bytes),
    ]


def _guesses(status: ExecutorStatus) -> dict[str, float]:
    return {"right": status.num_guessed_right, "wrong": status.num_guessed - status.num_guessed_right}


def _count(name: str, unit: str, help: str, read: Callable[[], float]) -> Reading:  # noqa: A002
    return Reading(f"shoal.executor.{name}", Kind.COUNTER, unit, help, read)


def _size(name: str, unit: str, help: str, model: str, number: int) -> Reading:  # noqa: A002
    return Reading(f"shoal.executor.{name}", Kind.SUM, unit, help, lambda: {model: number}, ("model",))
