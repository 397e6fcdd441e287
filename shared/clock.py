"""Time as an argument, so that tests move it instead of waiting for it."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time in seconds."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        return time.monotonic()


class FakeClock:
    """A clock that stands still until it is moved."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """The time last set."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`. Raises ValueError if negative."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now += seconds
