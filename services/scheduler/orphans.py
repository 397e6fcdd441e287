"""Which requests have lost their gateway, and for how long: somebody may still adopt them, but not for ever."""

from collections.abc import Iterable
from typing import Final

from services.scheduler.streams import Stream
from shared.ids import InstanceId

_REMEMBERED_S: Final = 60.0
"""How long a lost gateway is remembered that has no requests here: one of its submissions may still be on its way."""
_RELEASED_LONGER_S: Final = 5.0
"""How much longer a released request is kept: if it goes on at another scheduler, that one shall write down its end."""


class Orphans:
    """The gateways that are lost."""

    def __init__(self, grace_s: float) -> None:
        self.num_streams = 0
        """Requests that had no gateway when last looked at."""
        self._grace_s = grace_s
        self._lost_since: dict[InstanceId, float] = {}

    def lost(self, gateway_id: InstanceId, now: float) -> None:
        """A gateway is dead, or has left."""
        self._lost_since.setdefault(gateway_id, now)

    def found(self, gateway_id: InstanceId) -> None:
        """A gateway is heard (again): it was only frozen, and has its requests back."""
        self._lost_since.pop(gateway_id, None)

    def has(self, gateway_id: InstanceId) -> bool:
        """Whether a gateway is lost."""
        return gateway_id in self._lost_since

    def to_give_up(self, streams: Iterable[Stream], now: float) -> list[Stream]:
        """The streams that nobody will hear: those whose gateway was lost so long ago that nobody comes for them any
        more, those that cannot be resumed, and those that have ended and only wait for a detokenizer."""
        if not self._lost_since:
            self.num_streams = 0
            return []
        orphans = [stream for stream in streams if stream.opened.gateway_id in self._lost_since]
        self.num_streams = len(orphans)
        self._forget_gateways({stream.opened.gateway_id for stream in orphans}, now)
        return [each for each in orphans if now - self._lost_since[each.opened.gateway_id] >= self._patience_s(each)]

    def _patience_s(self, stream: Stream) -> float:
        somebody_may_come = bool(stream.submission.client) and stream.closed is None
        return (self._grace_s if somebody_may_come else 0.0) + (_RELEASED_LONGER_S if stream.is_released else 0.0)

    def _forget_gateways(self, needed: set[InstanceId], now: float) -> None:
        self._lost_since = {
            gateway_id: since
            for gateway_id, since in self._lost_since.items()
            if gateway_id in needed or now - since < _REMEMBERED_S
        }
