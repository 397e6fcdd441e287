"""When a dead process is started again, and when that is given up. Decides only; knows no processes."""

from collections import deque
from dataclasses import dataclass

from shared.clock import Clock


@dataclass(frozen=True, slots=True)
class RestartRules:
    """At most `max_restarts` within `window_s`: the first at once, each further one after twice the pause."""

    max_restarts: int = 5
    window_s: float = 60.0
    second_delay_s: float = 0.5
    max_delay_s: float = 8.0


class RestartPolicy:
    """The memory of one process's deaths."""

    def __init__(self, clock: Clock, rules: RestartRules | None = None) -> None:
        self._clock = clock
        self._rules = rules or RestartRules()
        self._restarts: deque[float] = deque()

    def next_delay_s(self) -> float | None:
        """How long to wait before starting the process that just died again; None if it dies too often."""
        now, rules = self._clock.now(), self._rules
        while self._restarts and now - self._restarts[0] >= rules.window_s:
            self._restarts.popleft()
        num_recent = len(self._restarts)
        if num_recent >= rules.max_restarts:
            return None
        delay_s = 0.0 if num_recent == 0 else min(rules.second_delay_s * 2.0 ** (num_recent - 1), rules.max_delay_s)
        self._restarts.append(now + delay_s)
        return delay_s
