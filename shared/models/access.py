"""What the system says when it lets nobody read or write a file of a model, as a sentence for whoever can mend it."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shared.errors import ModelError

_REFUSALS: Final = frozenset(
    (
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP),
        *(errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG),
    )
)


@contextlib.contextmanager
def explain_refusals(home: Path) -> Iterator[None]:
    """Turn the system's refusals into a ModelError that names the file; inside `home` it says how to use another."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        place = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else home
        advice = "; choose another folder for models with SHOAL_HOME" if place.is_relative_to(home) else ""
        raise ModelError(f"{place} cannot be used: {os.strerror(error.errno)}{advice}") from error
