"""How long this process stood still while a test took the time of something else."""

import asyncio
from contextlib import suppress
from typing import Final, Self

_LOOK_EVERY_S: Final = 0.05
_SHORTEST_S: Final = 0.25
"""A pause of the event loop that is shorter is the work that goes on there, and is not excused."""


class Standstills:
    """Looks at the event loop's clock all the time. An async context manager."""

    def __init__(self) -> None:
        self.total_s = 0.0
        """What a time that was taken meanwhile may have become longer by, and by no fault of what was measured."""
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._looking is not None
        self._looking.cancel()
        with suppress(asyncio.CancelledError):
            await self._looking

    async def _look(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            began = now()
            await asyncio.sleep(_LOOK_EVERY_S)
            late_s = now() - began - _LOOK_EVERY_S
            if late_s > _SHORTEST_S:
                self.total_s += late_s
