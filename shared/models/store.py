"""The model store: a folder of models, each complete or absent.

Owns where models lie, how one enters and leaves, and the lock that keeps two pulls of one model apart. Does not know
where models come from (`shared.models.pull` does), so services import it without any download or conversion library.

    <home>/models/<name>/     complete models, each with its manifest
    <home>/partial/<name>/    what an unfinished pull has so far
    <home>/locks/<name>.lock  held by a pull or a removal while it works
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shared.errors import ModelError
from shared.models import manifest as manifests
from shared.models.manifest import Manifest
from shared.models.names import folder_name, name_of_folder


class ModelStore:
    """The models under one home folder (`SHOAL_HOME`). Nothing is created before something is stored."""

    def __init__(self, home: Path) -> None:
        self.home = home.expanduser().absolute()
        self._models = self.home / "models"
        self._partial = self.home / "partial"

    # What services and the command line read.

    def folder(self, name: str) -> Path:
        """The folder of a model. Raises ModelError in plain words if it is absent or visibly damaged."""
        self.manifest(name)
        return self._models / folder_name(name)

    def manifest(self, name: str) -> Manifest:
        """What the store knows of a model. Raises ModelError if it is absent, or a file is missing or has shrunk."""
        folder = self._models / folder_name(name)
        if not folder.is_dir():
            raise ModelError(self._absence(name))
        found = manifests.read_manifest(folder)
        try:
            manifests.check_sizes(folder, found)
        except ModelError as error:
            raise ModelError(f"the model {name} is damaged: {error}; fetch it again with {_refetch(found)}") from error
        return found

    def has(self, name: str) -> bool:
        """Whether a model of this name is there, sound or not."""
        return (self._models / folder_name(name)).is_dir()

    def list(self) -> Sequence[Manifest]:
        """The models by name. What is no model, or has no readable manifest, is passed over."""
        found = []
        for folder in self._models.iterdir() if self._models.is_dir() else ():
            with contextlib.suppress(ModelError, NotADirectoryError):
                found.append(manifests.read_manifest(folder))
        return sorted(found, key=lambda manifest: manifest.name.lower())

    def unfinished(self) -> Sequence[str]:
        """The models of which a pull has begun and not ended, by name."""
        folders = self._partial.iterdir() if self._partial.is_dir() else ()
        return sorted(name_of_folder(folder.name) for folder in folders)

    def verify(self, name: str) -> Manifest:
        """Compare every file of a model with its checksum. Raises ModelError that names all files that differ."""
        found = self.manifest(name)
        folder = self._models / folder_name(name)
        bad = [file.path for file in found.files if manifests.file_sha256(folder / file.path) != file.sha256]
        if bad:
            raise ModelError(
                f"the model {name} is damaged: the content of {', '.join(bad)} has changed; "
                f"fetch it again with {_refetch(found)}"
            )
        return found

    # What a pull does.

    @contextlib.contextmanager
    def lock(self, name: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Be the only one, of all processes, that changes this model. `on_wait` is called if another one is."""
        path = self.home / "locks" / f"{folder_name(name)}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            self._recover(name)
            yield

    def partial(self, name: str) -> Path:
        """Where the pull that holds the lock keeps what it has so far; on the file system of the models."""
        return self._partial / folder_name(name)

    def add(self, name: str, staging: Path, *, source: str, license_name: str | None = None) -> Manifest:
        """Turn a finished folder into the model `name`, in place of the one that may be there.

        `staging` must lie on the store's file system, and is gone afterwards. The caller holds the lock. Raises
        ModelError, and changes nothing, if the folder is not a model that can be served.
        """
        manifest = manifests.describe_folder(staging, name=name, source=source, license_name=license_name)
        manifests.write_manifest(staging, manifest)
        for path in staging.iterdir():
            _sync(path)
        _sync(staging)
        folder = self._models / folder_name(name)
        self._models.mkdir(parents=True, exist_ok=True)
        replaced = self._replaced(name)
        if folder.exists():
            _remove_tree(replaced)
            replaced.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(replaced)
        staging.rename(folder)
        _sync(self._models)
        _remove_tree(replaced)
        return manifest

    def remove(self, name: str) -> None:
        """Delete a model, sound or not, and what an unfinished pull has left. Raises ModelError if there is neither."""
        if not self.has(name) and not self.partial(name).exists():
            raise ModelError(self._absence(name))
        with self.lock(name):
            if self.has(name):
                leaving = self.partial(name) / "leaving"
                _remove_tree(leaving)
                leaving.parent.mkdir(parents=True, exist_ok=True)
                (self._models / folder_name(name)).rename(leaving)
                _sync(self._models)
            _remove_tree(self.partial(name))

    def _replaced(self, name: str) -> Path:
        return self.partial(name) / "replaced"

    def _recover(self, name: str) -> None:
        """If a pull died between moving the old model away and the new one in, put the old one back."""
        replaced, folder = self._replaced(name), self._models / folder_name(name)
        if replaced.is_dir() and not folder.exists():
            replaced.rename(folder)

    def _absence(self, name: str) -> str:
        names = [manifest.name for manifest in self.list()]
        there = f"there are {', '.join(names)}" if names else "the store is empty"
        return f"no model named {name} in {self._models}; get it with `shoal pull {name}` ({there})"


def _refetch(manifest: Manifest) -> str:
    return f"`shoal pull --force {manifest.source} --name {manifest.name}`"


def _sync(path: Path) -> None:
    """Have a file's or folder's content on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_tree(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)
