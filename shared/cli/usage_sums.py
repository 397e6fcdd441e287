"""Sums of usage records, by day, tenant and model, as a table. Pure: records in, lines out."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from shared.messages import Outcome, UsageRecord

_COLUMNS: Final = ("day", "tenant", "model", "requests", "completed", "prompt", "of which cached", "output")
_NUM_TEXT_COLUMNS: Final = 3
_SEPARATOR: Final = "  "


@dataclass(slots=True)
class Sum:
    """What some requests consumed together."""

    num_requests: int = 0
    num_completed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    def add(self, record: UsageRecord) -> None:
        """Count one more request."""
        self.num_requests += 1
        self.num_completed += record.outcome is Outcome.COMPLETED
        self.num_prompt_tokens += record.usage.num_prompt_tokens
        self.num_cached_tokens += record.usage.num_cached_tokens
        self.num_output_tokens += sum(record.usage.num_output_tokens)


class UsageSums:
    """Sums for each day (UTC), tenant and model, and of all."""

    def __init__(self) -> None:
        self.total = Sum()
        self._sums: dict[tuple[str, str, str], Sum] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return self.total.num_requests == 0

    def add(self, record: UsageRecord) -> None:
        """Count one more request."""
        day = datetime.fromtimestamp(record.ended_at, UTC).strftime("%Y-%m-%d")
        self._sums.setdefault((day, record.tenant, record.model), Sum()).add(record)
        self.total.add(record)

    def table(self) -> list[str]:
        """A line for each sum, by day, tenant and model, below headings; a last one for all if there are several."""
        if self.is_empty:
            return []
        rows = [_COLUMNS, *(_row(*key, each) for key, each in sorted(self._sums.items()))]
        if len(self._sums) > 1:
            rows.append(_row("all", "", "", self.total))
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        return [_line(row, widths) for row in rows]


def _row(day: str, tenant: str, model: str, each: Sum) -> tuple[str, ...]:
    numbers = (
        each.num_requests,
        each.num_completed,
        each.num_prompt_tokens,
        each.num_cached_tokens,
        each.num_output_tokens,
    )
    return (day, tenant, model, *(f"{number:,}" for number in numbers))


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    texts = [cell.ljust(width) for cell, width in zip(row[:_NUM_TEXT_COLUMNS], widths, strict=False)]
    numbers = [
        cell.rjust(width) for cell, width in zip(row[_NUM_TEXT_COLUMNS:], widths[_NUM_TEXT_COLUMNS:], strict=True)
    ]
    return _SEPARATOR.join([*texts, *numbers])
