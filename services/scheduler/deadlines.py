"""When requests run out of time. Knows nothing of requests but their ids."""

import heapq
from typing import Final

from shared.ids import RequestId

_NUM_SPARE: Final = 100
"""Moments of requests that have ended to keep before looking for them."""


class Deadlines:
    """The moments at which requests have to have ended."""

    def __init__(self) -> None:
        self._moments: dict[RequestId, float] = {}
        self._heap: list[tuple[float, RequestId]] = []

    def set(self, request_id: RequestId, moment: float) -> None:
        """A request has to have ended at a moment of the clock."""
        self._moments[request_id] = moment
        heapq.heappush(self._heap, (moment, request_id))
        if len(self._heap) > 2 * len(self._moments) + _NUM_SPARE:
            self._heap = [(due, each) for each, due in self._moments.items()]
            heapq.heapify(self._heap)

    def discard(self, request_id: RequestId) -> None:
        """A request has ended."""
        self._moments.pop(request_id, None)

    def left(self, request_id: RequestId, now: float) -> float | None:
        """The seconds that a request has left, at least 0; None if it has no deadline."""
        moment = self._moments.get(request_id)
        return None if moment is None else max(0.0, moment - now)

    def passed(self, now: float) -> list[RequestId]:
        """The requests whose moment has come; they have no deadline any more."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            moment, request_id = heapq.heappop(self._heap)
            if self._moments.get(request_id) == moment:
                del self._moments[request_id]
                late.append(request_id)
        return late

    def __len__(self) -> int:
        """Requests that have a deadline."""
        return len(self._moments)
