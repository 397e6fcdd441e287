"""What this gateway wants no more and may still run somewhere: at schedulers that could not be told.

A scheduler that was frozen, or cut off from the broker, comes back with requests that have ended here, or go on at
another scheduler. When it is heard again it is told to drop them. Bounded: what is forgotten costs the mesh some work
for nobody.
"""

from collections import OrderedDict
from typing import Final

from shared.ids import InstanceId, RequestId
from shared.messages import CancelRequest

_MAX_REMEMBERED: Final = 16_384


class LeftBehind:
    """The attempts of requests that were left at schedulers, oldest first."""

    def __init__(self, gateway_id: InstanceId) -> None:
        self._gateway_id = gateway_id
        self._attempts: OrderedDict[tuple[InstanceId, RequestId], tuple[int, bool]] = OrderedDict()

    def add(self, scheduler_id: InstanceId, request_id: RequestId, attempt: int, *, goes_on: bool) -> None:
        """An attempt may go on at a scheduler that cannot be told. With `goes_on` the request goes on elsewhere; else a
        scheduler that still holds this gateway for lost would record an end that is not the request's."""
        self._attempts[scheduler_id, request_id] = attempt, goes_on
        if len(self._attempts) > _MAX_REMEMBERED:
            self._attempts.popitem(last=False)

    def take(self, scheduler_id: InstanceId) -> list[CancelRequest]:
        """What to tell a scheduler that is heard again."""
        left = [key for key in self._attempts if key[0] == scheduler_id]
        told = []
        for key in left:
            attempt, goes_on = self._attempts.pop(key)
            told.append(CancelRequest(key[1], self._gateway_id, attempt, goes_on=goes_on))
        return told
