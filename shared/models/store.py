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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from shared.errors import ModelError
from shared.models import manifest as manifests
from shared.models.access import explain_refusals
from shared.models.manifest import DamagedManifest, Manifest
from shared.models.names import folder_name, is_name, name_of_folder
from shared.models.sources import ALIASES

SOURCE_NOTE: Final = "source"
"""The file of an unfinished pull that says what it is of."""


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
        if not self.has(name):
            raise ModelError(self._absence(name))
        with explain_refusals(self.home):
            try:
                found = manifests.read_manifest(folder)
            except DamagedManifest as error:
                source = name if _can_be_pulled(name) else "SOURCE"
                again = f"`shoal pull --force {source} --name {name}`"
                raise ModelError(f"the model {name} is damaged: {error}; fetch it again with {again}") from error
            try:
                manifests.check_sizes(folder, found)
            except ModelError as error:
                again = f"`shoal pull --force {found.source} --name {name}`"
                raise ModelError(f"the model {name} is damaged: {error}; fetch it again with {again}") from error
        return found

    def has(self, name: str) -> bool:
        """Whether a model of this name is there, sound or not."""
        with explain_refusals(self.home):
            return (self._models / folder_name(name)).is_dir()

    def list(self) -> Sequence[Manifest]:
        """The models by name. What has no readable manifest is passed over; `unreadable` tells of it."""
        found = [manifest for manifest in self._read_all().values() if isinstance(manifest, Manifest)]
        return sorted(found, key=lambda manifest: manifest.name.lower())

    def unreadable(self) -> Mapping[str, str]:
        """What is wrong with each model whose manifest cannot be read, by name."""
        return {name: str(error) for name, error in sorted(self._read_all().items()) if isinstance(error, ModelError)}

    def unfinished(self) -> Mapping[str, int]:
        """The models of which an interrupted pull has left something, by name, and how many bytes."""
        with explain_refusals(self.home):
            folders = self._partial.iterdir() if self._partial.is_dir() else ()
            sizes = {name_of_folder(folder.name): _num_bytes(folder) for folder in sorted(folders)}
        return {name: size for name, size in sizes.items() if size}

    def verify(self, name: str) -> Manifest:
        """Compare every file of a model with its checksum. Raises ModelError that names all files that differ."""
        found = self.manifest(name)
        folder = self._models / folder_name(name)
        bad = [file.path for file in found.files if manifests.file_sha256(folder / file.path) != file.sha256]
        if bad:
            raise ModelError(
                f"the model {name} is damaged: the content of {', '.join(bad)} has changed; "
                f"fetch it again with `shoal pull --force {found.source} --name {name}`"
            )
        return found

    # What a pull does.

    @contextlib.contextmanager
    def lock(self, name: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Be the only one, of all processes, that changes this model. `on_wait` is called if another one is.

        Raises ModelError if this user may not write there.
        """
        path = self.home / "locks" / f"{folder_name(name)}.lock"
        with explain_refusals(self.home):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
        with file:
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

    def remove(self, name: str, on_wait: Callable[[], None] = lambda: None) -> None:
        """Delete a model, sound or not, and what an unfinished pull has left. Raises ModelError if there is neither."""
        if not self.has(name) and not self.partial(name).exists():
            raise ModelError(self._absence(name))
        with self.lock(name, on_wait), explain_refusals(self.home):
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
        there = f"it has {', '.join(names)}" if names else "it is empty"
        how = f"get it with `shoal pull {name}`" if _can_be_pulled(name) else "`shoal pull SOURCE` gets others"
        return f"no model named {name} is in the store {self._models} ({there}); {how}"

    def _read_all(self) -> dict[str, Manifest | ModelError]:
        """The manifest of each model, or why it cannot be read. Raises ModelError if the store itself cannot be."""
        if self.home.exists() and not self.home.is_dir():
            raise ModelError(f"{self.home} is no folder; choose another place for models with SHOAL_HOME")
        found: dict[str, Manifest | ModelError] = {}
        with explain_refusals(self.home):
            for folder in self._models.iterdir() if self._models.is_dir() else ():
                name = name_of_folder(folder.name)
                if is_name(name) and folder.is_dir():
                    try:
                        found[name] = manifests.read_manifest(folder)
                    except ModelError as error:
                        found[name] = error
        return found


def _can_be_pulled(name: str) -> bool:
    """Whether the name alone says where the model is."""
    return name in ALIASES or "/" in name


def _num_bytes(workspace: Path) -> int:
    """What a pull has left, without the note of its source; a file that has two names counts once."""
    stats = [path.stat() for path in workspace.rglob("*") if path.is_file() and path != workspace / SOURCE_NOTE]
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values())


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
