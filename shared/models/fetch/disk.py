"""Room on the disk: checked before a fetch, and explained when it runs out all the same."""

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from shared.errors import ModelError
from shared.models.units import show_bytes

_RESERVE_BYTES = 64_000_000
"""Left free for everything else on the machine."""


class NoRoom(ModelError):
    """The disk is too small; what has arrived is of use once there is room."""


def require_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises NoRoom if fewer than `needed_bytes` and a reserve are free where `folder` lies."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes + _RESERVE_BYTES:
        raise NoRoom(
            f"{what} needs {show_bytes(needed_bytes)} in {folder}, but only {show_bytes(free_bytes)} are free there; "
            f"make room, or choose another disk with SHOAL_HOME"
        )


@contextlib.contextmanager
def explain_full_disk(folder: Path) -> Iterator[None]:
    """Turn the system's error for a full disk or an exceeded quota into NoRoom."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NoRoom(
            f"the disk of {folder} is full; make room, or choose another disk with SHOAL_HOME, and pull again: "
            f"what has arrived is kept"
        ) from error
