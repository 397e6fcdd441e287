"""How fast requests began to run lately, and so how long somebody has to wait who finds the queue full."""

from collections import deque
from typing import Final, NamedTuple

RETRY_AFTER_S: Final = 1.0
"""When nothing is known about how long it will take; nobody is told less."""

_MAX_RETRY_AFTER_S: Final = 60.0
_WINDOW_S: Final = 10.0


class _Start(NamedTuple):
    tenant: str
    num_tokens: int
    at: float


class Pace:
    """The starts of the last ten seconds."""

    def __init__(self) -> None:
        self._starts: deque[_Start] = deque()

    def started(self, tenant: str, num_tokens: int, now: float) -> None:
        """A request with so many tokens that waited runs now."""
        self._starts.append(_Start(tenant, num_tokens, now))
        self._forget(now)

    def seconds_for(self, num_requests: int, now: float, tenant: str | None = None) -> float:
        """How long until so many requests, of a tenant or of anybody, will have left the queue at this pace."""
        return _seconds(num_requests, len(self._lately(now, tenant)))

    def seconds_for_tokens(self, num_tokens: int, now: float, tenant: str | None = None) -> float:
        """The same for requests with so many tokens together."""
        return _seconds(num_tokens, sum(start.num_tokens for start in self._lately(now, tenant)))

    def _lately(self, now: float, tenant: str | None) -> list[_Start]:
        self._forget(now)
        return [start for start in self._starts if tenant in (None, start.tenant)]

    def _forget(self, now: float) -> None:
        while self._starts and self._starts[0].at < now - _WINDOW_S:
            self._starts.popleft()


def _seconds(amount: int, amount_lately: int) -> float:
    if not amount_lately:
        return RETRY_AFTER_S
    return min(_MAX_RETRY_AFTER_S, max(RETRY_AFTER_S, amount * _WINDOW_S / amount_lately))
