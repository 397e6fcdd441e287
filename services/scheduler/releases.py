"""Requests that no executor here can go on with, kept until it is known that they go on at another scheduler.

Their gateways are told, and told again, since any message may be lost and any gateway may die before it has submitted
them elsewhere: then this log is the only one. Nothing computes them meanwhile, whatever executor comes. Sends nothing
itself.
"""

from typing import Final

from services.scheduler.streams import Stream
from shared.ids import RequestId

_TELL_AGAIN_AFTER_S: Final = 0.5


class Releases:
    """The released requests, and when their gateways were told."""

    def __init__(self) -> None:
        self._told_at: dict[RequestId, float | None] = {}

    def __len__(self) -> int:
        """How many are released."""
        return len(self._told_at)

    def add(self, stream: Stream) -> None:
        """Release a request that nothing computes any more."""
        stream.is_released = True
        self._told_at[stream.request_id] = None

    def adopted(self, stream: Stream, now: float) -> None:
        """A request has another gateway, which needs a moment to get what there is of the output."""
        if stream.is_released:
            self._told_at[stream.request_id] = now

    def discard(self, request_id: RequestId) -> None:
        """A request is kept no longer; nothing if it was not released."""
        self._told_at.pop(request_id, None)

    def due(self, now: float) -> list[RequestId]:
        """Those whose gateways are to be told now."""
        due = [each for each, at in self._told_at.items() if at is None or now - at >= _TELL_AGAIN_AFTER_S]
        self._told_at.update(dict.fromkeys(due, now))
        return due
