"""Logs: one event a line, JSON for machines and aligned text for a terminal.

Code logs through `logging.getLogger(__name__)` with a fixed sentence and the variable parts in `extra`; never prompts
or outputs, unless the operator has asked for them (`SHOAL_LOG_CONTENT`). Libraries, warnings and what nobody has
caught come out in the same form.
"""

import json
import logging
import re
import sys
import threading
import time
from types import TracebackType
from typing import Any, Final, TextIO

from shared.messages import TraceContext

log = logging.getLogger(__name__)

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_COLOURS: Final = {"DEBUG": "\x1b[2m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}


def configure(*, name: str, level: str, style: str, stream: TextIO = sys.stderr) -> None:
    """Send this process's logs to `stream`. `style` is json, pretty or auto (pretty on a terminal)."""
    pretty = style == "pretty" or (style == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Pretty(name, coloured=stream.isatty()) if pretty else _Json(name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)


def log_what_nobody_catches() -> None:
    """Have exceptions that reach the end of a thread, or that nothing can be raised to, logged like all else."""
    threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    sys.excepthook = _log_uncaught
    sys.unraisablehook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt | SystemExit):
        log.critical("an exception that nobody caught", exc_info=(kind, error or kind(), traceback))


def about(request_id: str, trace: TraceContext | None = None) -> dict[str, Any]:
    """The fields of every event about a request; `trace_id`, as in `traceparent`, only if it has a trace."""
    return {"request_id": request_id} | ({"trace_id": trace.trace_id.hex()} if trace is not None else {})


def without_passwords(urls: str) -> str:
    """The text with what stands between `://` and `@` in each address hidden."""
    return re.sub(r"://[^@/\s]*@", "://(hidden)@", urls)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class _Json(logging.Formatter):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "instance": self._name,
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str, ensure_ascii=False)


class _Pretty(logging.Formatter):
    def __init__(self, name: str, *, coloured: bool) -> None:
        super().__init__()
        self._name = name
        self._coloured = coloured

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        details = " ".join(f"{key}={value}" for key, value in _fields(record).items() if value is not None)
        line = f"{moment} {self._name:<15} {record.getMessage()}" + (f"  {details}" if details else "")
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        colour = _COLOURS.get(record.levelname, "") if self._coloured else ""
        return f"{colour}{line}\x1b[0m" if colour else line
