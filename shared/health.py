"""Whether a service on this machine works: files that its process touches, and the question how old they are.

`python -m shared.health` answers with its exit status, 0 or 1, for containers and other supervisors: whether the
service can do its work now. `--alive` asks for less: whether a restart could help. A service that waits for the broker
or loads its model cannot work yet, and is alive. Imports nothing of Shoal, so that asking every second costs little.
Owns the files; what "works" and "alive" mean, its caller says.
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
STUCK_AFTER_S: Final = 30.0
"""What has not come to its turn for so long will not: as long as `shoal up` waits before it starts a process again."""


def touch(file: Path) -> None:
    """Say that it works at this moment. Raises OSError if the file cannot be written."""
    file.touch()


def alive_file(file: Path) -> Path:
    """What is touched beside the health file `file` as long as the process is alive, able to work or not."""
    return file.with_name(f"{file.name}.alive")


def complaint(file: Path, now: float) -> str | None:
    """What is wrong according to `file` at `now` (seconds since the epoch), or None if nothing is."""
    return _too_old(file, now, STALE_AFTER_S, "has handled nothing for {:.1f} s, or has no connection to NATS")


def complaint_of_life(file: Path, now: float) -> str | None:
    """Why a restart is the only help for the process with the health file `file`, or None if it is alive."""
    return _too_old(alive_file(file), now, STUCK_AFTER_S, "is stuck: has come to nothing for {:.1f} s")


def _too_old(file: Path, now: float, limit_s: float, text: str) -> str | None:
    try:
        age_s = now - file.stat().st_mtime
    except OSError as error:
        return f"not started: {file}: {error.strerror}"
    return text.format(age_s) if age_s > limit_s else None


def main() -> int:
    """Ask about the process whose settings are in this environment; the exit status."""
    name = os.environ.get(VARIABLE)
    if not name:
        print(f"{VARIABLE} is not set", file=sys.stderr)
        return 1
    if sys.argv[1:] not in ([], ["--alive"]):
        print("usage: python -m shared.health [--alive]", file=sys.stderr)
        return 1
    ask = complaint_of_life if sys.argv[1:] else complaint
    if (text := ask(Path(name), time.time())) is not None:
        print(text, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
