"""The scheduler's metrics. Owns what is counted only for them; the rest is read where it is kept anyway."""

from collections.abc import Sequence
from typing import Final

from shared.telemetry.metrics import Histogram, Tally

COMPUTING: Final = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)
_WAITING: Final = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 120.0, 300.0, 600.0),
)

MOVED: Final = "moved"
REFUSED: Final = "refused"


class SchedulerMetrics:
    """Told of what happens to requests and plans."""

    def __init__(self) -> None:
        self.num_accepted = 0
        self.ended = Tally()
        """By ending and code."""
        self.replayed = Tally()
        """By who asked."""
        self.executors_lost = Tally()
        """By reason."""
        self.num_unused_tokens = 0
        self.num_cut_tokens = 0
        self.num_resumed_tokens = 0
        self.num_moved_tokens = 0
        self.num_plans_resent = 0
        self.queue = Histogram(
            "shoal.scheduler.queue.duration", "s", "From arrival to the first step of a request", _WAITING, ("model",)
        )
        self.plan = Histogram("shoal.scheduler.plan.duration", "s", "Time to make one plan", COMPUTING)
        self.apply = Histogram("shoal.scheduler.apply.duration", "s", "Time to take in one result", COMPUTING)

    @property
    def histograms(self) -> Sequence[Histogram]:
        """All of them."""
        return self.queue, self.plan, self.apply

    def accepted(self, num_resumed_tokens: int) -> None:
        """An attempt of a request was let in, with output that it had elsewhere."""
        self.num_accepted += 1
        self.num_resumed_tokens += num_resumed_tokens

    def refused(self, code: str) -> None:
        """An attempt was not let in."""
        self.ended.add(1, REFUSED, code)

    def over(self, outcome: str, code: str) -> None:
        """An attempt has ended here; the code is that of an error, or empty."""
        self.ended.add(1, outcome, code)

    def moved(self, num_tokens: int) -> None:
        """An attempt was given up with so much output: the request goes on as another one."""
        self.ended.add(1, MOVED, "")
        self.num_moved_tokens += num_tokens
