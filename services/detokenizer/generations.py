"""Which telling of each request ended here lately, so that what comes late is told from what is new."""

from collections import OrderedDict
from typing import Final

from shared.ids import RequestId

Generation = tuple[int, int]
"""Attempt and replay: the higher one is the later one."""

_MAX_REMEMBERED: Final = 16_384


class Generations:
    """The latest requests that ended here, each with its last generation."""

    def __init__(self, size: int = _MAX_REMEMBERED) -> None:
        self._size = size
        self._generations: OrderedDict[RequestId, Generation] = OrderedDict()

    def add(self, request_id: RequestId, generation: Generation) -> None:
        """Remember one more; the oldest is forgotten when there are too many."""
        self._generations[request_id] = generation
        self._generations.move_to_end(request_id)
        if len(self._generations) > self._size:
            self._generations.popitem(last=False)

    def get(self, request_id: RequestId) -> Generation | None:
        """The last generation of a request that ended here, if it is remembered."""
        return self._generations.get(request_id)
