"""A recording that is being made, and the folder where recordings are kept.

A recording that cannot go on (its file is full, the disk is) ends and says so in the log; nothing else ends with it.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from services.scheduler.core.settings import SchedulerSettings
from services.scheduler.recording.answers import Answer, answer_to, raised
from services.scheduler.recording.calls import Call, Returned
from services.scheduler.recording.file import FrameWriter
from services.scheduler.recording.records import EndOfRecording, Header, Record
from shared.clock import Clock
from shared.codec import encode
from shared.errors import ConfigError, MessageError
from shared.ids import InstanceId

log = logging.getLogger(__name__)

SUFFIX: Final = ".recording"
NUM_KEPT: Final = 8
"""Recordings in a folder, with the one that begins: as many lives of a process that fails again and again."""
CLOSED: Final = "the scheduler stopped"
FULL: Final = "the file reached its limit"

_FLUSH_INTERVAL_S: Final = 0.25
"""About so much is lost when the process is killed."""
_END_BYTES: Final = 128
"""Room kept for the last record."""


class Recording:
    """A recording that is being made."""

    def __init__(self, writer: FrameWriter, scheduler_id: InstanceId, clock: Clock, *, keeps_plans: bool) -> None:
        """`keeps_plans`: keep whole plans, not only what tells them apart."""
        self.path = writer.path
        self._keeps_plans = keeps_plans
        self._writer = writer
        self._scheduler_id = scheduler_id
        self._clock = clock
        self._started_at = self._flushed_at = clock.now()
        self._has_ended = False

    def begin(self, tenant_weights: Mapping[str, float], lobby: SchedulerSettings) -> None:
        """Say what the fleet is made with."""
        self._writer.append(
            encode(Header(software_version(), self._scheduler_id, time.time(), dict(tenant_weights), lobby))
        )
        self._writer.flush()

    def returned(self, call: Call, returned: Returned) -> None:
        """Record a call and what it returned. Never fails: a recording that cannot go on ends."""
        if not self._has_ended:
            try:
                self._append(call, answer_to(returned, keeps_plan=self._keeps_plans))
            except MessageError as error:
                self._end(str(error))

    def raised(self, call: Call, error: Exception) -> None:
        """Record a call and what it raised. Never fails, likewise."""
        if not self._has_ended:
            try:
                self._append(call, raised(error))
            except MessageError as unreadable:
                self._end(str(unreadable))

    def close(self) -> None:
        """Write what is left and close the file."""
        if not self._has_ended:
            self._has_ended = True
            self._writer.append(encode(EndOfRecording(CLOSED)))
        self._writer.close()

    def _append(self, call: Call, answer: Answer) -> None:
        now = self._clock.now()
        content = encode(Record(now - self._started_at, call, answer))
        if not self._writer.has_room(len(content) + _END_BYTES):
            self._end(FULL)
            return
        self._writer.append(content)
        if now - self._flushed_at >= _FLUSH_INTERVAL_S:
            self._flushed_at = now
            self._writer.flush()
        if self._writer.failure is not None:
            self._end(self._writer.failure)

    def _end(self, reason: str) -> None:
        self._has_ended = True
        self._writer.append(encode(EndOfRecording(reason)))
        self._writer.flush()
        log.warning("the recording ends here", extra={"file": str(self.path), "reason": reason})


def start_recording(
    folder: Path, scheduler_id: InstanceId, clock: Clock, *, max_bytes: int, keeps_plans: bool
) -> Recording:
    """A new recording in a folder, named after the scheduler, whose oldest others are deleted if there are too many.

    Raises ConfigError if it cannot be made.
    """
    path = folder.expanduser() / f"{scheduler_id}{SUFFIX}"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _delete_oldest(path.parent)
        writer = FrameWriter(path, max_bytes)
    except OSError as error:
        raise ConfigError(f"SHOAL_SCHEDULER_RECORDING={folder}: cannot record there: {error}") from error
    log.info("recording", extra={"file": str(path), "max_bytes": max_bytes})
    return Recording(writer, scheduler_id, clock, keeps_plans=keeps_plans)


def software_version() -> str:
    """The version of Shoal that runs here."""
    try:
        return version("shoal")
    except PackageNotFoundError:
        return "unknown"


def _delete_oldest(folder: Path) -> None:
    """Make room for one more. Other schedulers may do the same at the same time."""
    ages = []
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(FileNotFoundError):
            ages.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(ages)[: max(0, len(ages) - NUM_KEPT + 1)]:
        path.unlink(missing_ok=True)
