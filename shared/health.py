"""Whether a service on this machine works: a file that its process touches, and the question how old it is.

`python -m shared.health` answers with its exit status, 0 or 1, for containers and other supervisors. Imports nothing
of Shoal, so that asking every second costs little. Owns the file; what "works" means, its caller says.
"""

import os
import sys
import time
from pathlib import Path
from typing import Final

VARIABLE: Final = "SHOAL_HEALTH_FILE"
TOUCH_INTERVAL_S: Final = 0.5
STALE_AFTER_S: Final = 5.0
"""Longer than a loaded machine keeps a working process from its turn."""


def touch(file: Path) -> None:
    """Say that it works at this moment. Raises OSError if the file cannot be written."""
    file.touch()


def complaint(file: Path, now: float) -> str | None:
    """What is wrong according to `file` at `now` (seconds since the epoch), or None if nothing is."""
    try:
        age_s = now - file.stat().st_mtime
    except OSError as error:
        return f"not started: {file}: {error.strerror}"
    if age_s > STALE_AFTER_S:
        return f"has handled nothing for {age_s:.1f} s, or has no connection to NATS"
    return None


def main() -> int:
    """Ask about the process whose settings are in this environment; the exit status."""
    name = os.environ.get(VARIABLE)
    if not name:
        print(f"{VARIABLE} is not set", file=sys.stderr)
        return 1
    if (text := complaint(Path(name), time.time())) is not None:
        print(text, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
