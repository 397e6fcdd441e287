"""Sends metrics in a thread of their own, so that a slow receiver holds nobody up."""

import asyncio
import logging
import threading
from queue import SimpleQueue
from typing import Protocol

from shared.telemetry.metrics import Snapshot

log = logging.getLogger(__name__)


class Exporter(Protocol):
    """Where metrics go."""

    def export(self, snapshot: Snapshot, now_ns: int) -> str | None:
        """Send a snapshot of the moment `now_ns` (Unix time); blocks. Why it did not arrive; None if it did."""
        ...

    def close(self) -> None:
        """Send nothing more."""
        ...


class Pusher:
    """One exporter and its thread. Snapshots are cumulative, so one that cannot be sent is not missed."""

    def __init__(self, exporter: Exporter) -> None:
        self.num_pushed = 0
        self._exporter = exporter
        self._is_in_trouble = False
        self._jobs: SimpleQueue[tuple[Snapshot, int] | None] = SimpleQueue()
        self._is_ended = threading.Event()
        threading.Thread(target=self._run, name="metrics", daemon=True).start()

    def push(self, snapshot: Snapshot, now_ns: int) -> None:
        """Have a snapshot sent, unless an earlier one still waits to be."""
        if self._jobs.empty():
            self._jobs.put((snapshot, now_ns))

    async def close(self, last: Snapshot, now_ns: int, timeout_s: float) -> None:
        """Send a last snapshot, for at most `timeout_s`."""
        self._jobs.put((last, now_ns))
        self._jobs.put(None)
        await asyncio.to_thread(self._is_ended.wait, timeout_s)
        self._exporter.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                trouble = self._exporter.export(*job)
            except Exception as error:  # whatever it is, the next ones may get through
                trouble = f"{type(error).__name__}: {error}"
            self.num_pushed += trouble is None
            self._say(trouble)
        self._is_ended.set()

    def _say(self, trouble: str | None) -> None:
        """Write into the log when trouble begins and when it ends, not each time."""
        if trouble is not None and not self._is_in_trouble:
            log.warning("metrics cannot be sent; trying with the next ones", extra={"error": trouble})
        elif trouble is None and self._is_in_trouble:
            log.info("metrics are sent again")
        self._is_in_trouble = trouble is not None
