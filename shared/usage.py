"""The way of usage records to the broker: each is said until the broker has acknowledged it, and is kept once.

Owns the records that wait, in bounded memory. Does not own what is in them (`services.gateway.usage` and
`services.scheduler.usage`), nor what becomes of them (`shoal usage`). Serving never waits for it.
"""

import asyncio
import logging
import time
from typing import Final

from shared import subjects
from shared.codec import encode
from shared.errors import LedgerUnavailable, MessageError
from shared.ids import RequestId
from shared.log import about
from shared.messages import USAGE_LEDGER, UsageRecord
from shared.transport import Transport

log = logging.getLogger(__name__)

MAX_WAITING: Final = 65_536
"""Records kept while the broker takes none, some 300 bytes each; further ones are lost, and counted."""
_SAID_AT_ONCE: Final = 64
_FIRST_PAUSE_S: Final = 0.1
_MAX_PAUSE_S: Final = 5.0
STOP_WITHIN_S: Final = 2.0
"""How long a process that leaves tries to hand over what waits: its supervisor has not much more patience."""


class UsageOutbox:
    """The usage records of one process that the broker has not acknowledged yet."""

    def __init__(self, transport: Transport, *, max_waiting: int = MAX_WAITING) -> None:
        self.num_lost = 0
        """Records that will never be kept: there was no room for them, or the process left before the broker came."""
        self._ledger = transport.ledger(USAGE_LEDGER, subjects.USAGE)
        self._max_waiting = max_waiting
        self._waiting: dict[RequestId, UsageRecord] = {}
        self._has_news = asyncio.Event()
        self._is_hurried = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._pause_s = _FIRST_PAUSE_S
        self._was_taken = True
        self._was_full = False
        self._task: asyncio.Task[None] | None = None
        transport.on_reconnect(self._is_hurried.set)

    @property
    def num_unrecorded(self) -> int:
        """Requests that ended and of which the broker has no record, so far or for ever."""
        return len(self._waiting) + self.num_lost

    def start(self) -> None:
        """Begin to say what is added."""
        self._task = asyncio.create_task(self._say_for_ever(), name="usage records")

    def add(self, record: UsageRecord) -> None:
        """Have a record kept. Of one request the first record counts."""
        if record.request_id in self._waiting:
            return
        if len(self._waiting) >= self._max_waiting:
            self.num_lost += 1
            if not self._was_full:
                log.error("usage records are being lost: too many wait", extra={"num_waiting": len(self._waiting)})
            self._was_full = True
            return
        self._waiting[record.request_id] = record
        self._is_empty.clear()
        self._has_news.set()

    async def stop(self, *, within_s: float = STOP_WITHIN_S) -> None:
        """Hand over what waits, within a time; what is left then is lost, and the log says how many."""
        if self._task is None:
            return
        self._is_hurried.set()
        deadline = time.monotonic() + within_s
        waiting = asyncio.create_task(self._is_empty.wait())
        await asyncio.wait({waiting, self._task}, timeout=deadline - time.monotonic(), return_when="FIRST_COMPLETED")
        for task in (waiting, self._task):
            task.cancel()
        await asyncio.gather(waiting, self._task, return_exceptions=True)
        if self._waiting:
            log.error("usage records are lost: the broker did not take them", extra={"num_lost": len(self._waiting)})
            self.num_lost += len(self._waiting)
            self._waiting.clear()

    async def _say_for_ever(self) -> None:
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            while self._waiting:
                if not await self._say_some():
                    await self._pause()
            self._is_empty.set()

    async def _say_some(self) -> bool:
        """Say the oldest records, all at once. False if the broker kept none of them."""
        records = [record for record, _ in zip(self._waiting.values(), range(_SAID_AT_ONCE), strict=False)]
        reasons = await asyncio.gather(*map(self._say, records))
        trouble = next((reason for reason in reasons if reason is not None), None)
        if trouble is None:
            if not self._was_taken:
                log.info("usage is recorded again", extra={"num_waiting": len(self._waiting)})
            self._pause_s = _FIRST_PAUSE_S
            self._was_taken, self._was_full = True, False
        elif self._was_taken:
            self._was_taken = False
            log.warning("usage is not recorded at the moment; serving goes on", extra={"error": str(trouble)})
        return trouble is None

    async def _say(self, record: UsageRecord) -> LedgerUnavailable | None:
        """Why the broker may not have a record; None if it has it, or never will."""
        try:
            await self._ledger.append(record.request_id, encode(record))
        except LedgerUnavailable as error:
            return error
        except MessageError as error:
            self.num_lost += 1
            log.error("a usage record cannot be kept", extra=about(record.request_id) | {"error": str(error)})
        del self._waiting[record.request_id]
        return None

    async def _pause(self) -> None:
        """Wait longer each time, but no longer than until the broker is back."""
        self._is_hurried.clear()
        try:
            await asyncio.wait_for(self._is_hurried.wait(), self._pause_s)
        except TimeoutError:
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
