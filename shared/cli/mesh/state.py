"""Which meshes of `shoal up` run on this machine: one small file a mesh, by the port of its gateway.

<home>/run/<port>.json    where the mesh is, for `shoal status` and `shoal chat`
<home>/run/<port>/lock    held by the `shoal up` that runs it; whoever holds it is alive, however others died
<home>/run/<port>/logs    the log of each process
<home>/run/<port>/metrics.json    where each process shows its metrics, as Prometheus reads it (`file_sd_configs`)
<home>/run/<port>/nats    the files of an embedded NATS server
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

import msgspec

from shared.errors import OperatorError

_PROBE_S = 0.2
"""Who only looks whether a mesh lives holds its lock for a moment too."""


class MeshState(msgspec.Struct, frozen=True):
    """Where one mesh is."""

    address: str
    """Of its first gateway."""
    port: int
    nats_url: str
    model: str
    pid: int
    """Of its `shoal up`."""
    other_addresses: tuple[str, ...] = ()
    """Of its further gateways."""


class MeshFolder:
    """What one mesh keeps on disk."""

    def __init__(self, home: Path, port: int) -> None:
        self.port = port
        self.folder = home / "run" / str(port)
        self.logs = self.folder / "logs"
        self.nats = self.folder / "nats"
        self.targets = self.folder / "metrics.json"
        self._state = home / "run" / f"{port}.json"
        self._lock = self.folder / "lock"

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Be the only `shoal up` on this port; forgets the state at the end, and the folder if nothing was kept in it.

        Raises OperatorError if there is another one, or if nothing can be written.
        """
        lock = self._take_lock()
        if lock is None:
            state = self.read()
            whose = f", started by process {state.pid}" if state else ""
            raise OperatorError(
                f"a mesh runs on port {self.port} already{whose}; stop it or choose another with --port"
            )
        with lock:
            self.forget()  # what a killed one left
            try:
                yield
            finally:
                self.forget()
                with contextlib.suppress(FileNotFoundError):
                    if [path.name for path in self.folder.iterdir()] == [self._lock.name]:
                        self.remove()

    def remove(self) -> None:
        """Delete all that the mesh kept. Nobody else may hold the claim."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _take_lock(self) -> TextIO | None:
        """The lock file, locked; None if another process holds it. Raises OperatorError if it cannot be written."""
        while True:
            lock = self._open_lock()
            if not _try_lock(lock, patience_s=_PROBE_S):
                lock.close()
                return None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock.fileno()), self._lock.stat()):
                    return lock
            lock.close()  # its last owner has deleted it in the meantime

    def _open_lock(self) -> TextIO:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return self._lock.open("a")
        except OSError as error:
            raise OperatorError(f"cannot write to {self.folder}: {error.strerror}; choose another --home") from error

    def write(self, state: MeshState) -> None:
        """Say where the mesh is. The file may name a password of NATS, so only its owner can read it."""
        new = self._state.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_bytes(msgspec.json.encode(state))
        new.replace(self._state)

    def write_targets(self, targets: Mapping[str, str]) -> None:
        """Say where processes show their metrics: `host:port` of each by its name."""
        groups = [{"targets": [target], "labels": {"name": name}} for name, target in targets.items()]
        new = self.targets.with_suffix(".new")
        new.write_bytes(msgspec.json.format(msgspec.json.encode(groups)))
        new.replace(self.targets)

    def forget(self) -> None:
        """Say that there is no mesh."""
        self._state.unlink(missing_ok=True)
        self.targets.unlink(missing_ok=True)

    def read(self) -> MeshState | None:
        """What was last written, whether its mesh is alive or not; None if nothing."""
        try:
            return msgspec.json.decode(self._state.read_bytes(), type=MeshState)
        except (OSError, msgspec.MsgspecError):
            return None

    def running(self) -> MeshState | None:
        """Where the mesh is, if it is alive."""
        try:
            lock = self._lock.open("r")
        except OSError:
            return None
        with lock:
            return None if _try_lock(lock) else self.read()


def running_meshes(home: Path) -> list[MeshState]:
    """The meshes of this home folder that are alive, by port."""
    ports = sorted(int(path.stem) for path in (home / "run").glob("*.json") if path.stem.isdecimal())
    return [state for port in ports if (state := MeshFolder(home, port).running())]


def _try_lock(file: TextIO, *, patience_s: float = 0.0) -> bool:
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)
        else:
            return True
