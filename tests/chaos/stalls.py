"""Notices when these tests themselves stood still: then what happened meanwhile says nothing about the mesh."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Final

_TICK_S: Final = 0.1
TOO_LONG_S: Final = 1.0
"""Beats are missed then, and clients lose their patience."""


class StallWatch:
    """How long the event loop stood still, at most, since the watch began."""

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def watch_for_ever(self) -> None:
        """Look again and again."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            self.worst_s = max(self.worst_s, now - before - _TICK_S)
            before = now


@contextlib.asynccontextmanager
async def watching_for_stalls() -> AsyncIterator[StallWatch]:
    """A watch as long as the context lasts."""
    watch = StallWatch()
    watching = asyncio.create_task(watch.watch_for_ever(), name="stall watch")
    try:
        yield watch
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
