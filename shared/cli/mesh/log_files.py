"""The log file of one process, bounded in size, and the reading of what services and NATS write into it."""

import contextlib
import json
import logging
import re
from collections import deque
from dataclasses import dataclass
from io import FileIO
from itertools import pairwise
from pathlib import Path

_MAX_BYTES = 16 << 20
_NUM_KEPT = 3
"""Older files beside the current one."""
_NUM_TAIL_LINES = 30

_NATS_LINE = re.compile(r"\[\d+\] \S+ \S+ \[(INF|DBG|TRC|WRN|ERR|FTL)\] (.*)")
_NATS_LEVELS = {"WRN": logging.WARNING, "ERR": logging.ERROR, "FTL": logging.CRITICAL}
_EVENT_FIELDS = ("time", "level", "instance", "logger", "event", "exception")


class LogFile:
    """Takes lines. What an earlier mesh wrote is moved aside, and so is what has become too much."""

    def __init__(self, path: Path, *, max_bytes: int = _MAX_BYTES) -> None:
        """Raises OSError if the file cannot be written."""
        self.path = path
        self.tail: deque[str] = deque(maxlen=_NUM_TAIL_LINES)
        """The last lines."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()

    def write(self, line: bytes) -> None:
        """Append one line, given without its end. One that the disk does not take is only in the tail."""
        self.tail.append(line.decode(errors="replace"))
        with contextlib.suppress(OSError):
            if self._num_bytes + len(line) > self._max_bytes:
                self._file.close()
                self._file = self._open()
            self._num_bytes += self._file.write(line + b"\n")

    def close(self) -> None:
        """Write no more."""
        self._file.close()

    def _open(self) -> FileIO:
        older = [self.path, *(self.path.with_name(f"{self.path.name}.{number}") for number in range(1, _NUM_KEPT + 1))]
        is_worth_keeping = self.path.exists() and self.path.stat().st_size > 0
        for newer, target in reversed(list(pairwise(older))) if is_worth_keeping else ():
            if newer.exists():
                newer.replace(target)
        self._num_bytes = 0
        return self.path.open("wb", buffering=0)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line, understood as far as it can be."""

    level: int | None
    """As in `logging`; None for what is no event, such as a traceback or an operator's sentence."""
    text: str
    details: str = ""


def read_line(line: str) -> LogLine:
    """What a line of a service or of the NATS server says."""
    if match := _NATS_LINE.fullmatch(line):
        return LogLine(_NATS_LEVELS.get(match[1], logging.INFO), match[2])
    try:
        event = json.loads(line)
        level = logging.getLevelNamesMapping()[event["level"].upper()]
        details = " ".join(f"{key}={value}" for key, value in event.items() if key not in _EVENT_FIELDS)
        exception = f"\n{event['exception']}" if event.get("exception") else ""
        return LogLine(level, f"{event['event']}{exception}", details)
    except (ValueError, KeyError, TypeError, AttributeError):
        return LogLine(None, line)
