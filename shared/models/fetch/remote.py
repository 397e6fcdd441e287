"""A file elsewhere: where it is, what its content must be, and how one version of it is told from another."""

import datetime
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import obstore

from shared.models.fetch.faults import FAULTS, is_about_range
from shared.models.fetch.patience import Patience

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta
    from obstore.store import ObjectStore

_FIRST_BYTE: Final["GetOptions"] = {"range": (0, 1)}
_NO_DATE: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
"""What obstore reports for a server that sends no Last-Modified."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """What a file's content must hash to: its SHA-256, or git's blob hash (SHA-1 over a header and the content)."""

    kind: Literal["sha256", "git-blob"]
    digest: str

    def of(self, path: Path) -> str:
        """The digest of this kind of a file's content."""
        with path.open("rb") as file:
            if self.kind == "sha256":
                return hashlib.file_digest(file, "sha256").hexdigest()
            start = f"blob {path.stat().st_size}\0".encode()
            return hashlib.file_digest(file, lambda: hashlib.sha1(start, usedforsecurity=False)).hexdigest()


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One object of an object store or a web server."""

    store: "ObjectStore"
    path: str
    url: str
    """For people and for recognizing the file later; without secrets."""
    access_hint: str
    """How to get access to this kind of source, for the error message."""
    size_bytes: int | None = None
    """None if a request has to tell."""
    checksum: Checksum | None = None
    is_immutable: bool = False
    """Whether `url` always means the same content, so that versions need no comparison."""


class Version(msgspec.Struct, frozen=True):
    """What tells one content of a remote file from another."""

    size_bytes: int
    etag: str | None
    modified: datetime.datetime | None

    @classmethod
    def of(cls, meta: "ObjectMeta") -> "Version":
        """The version that a server reports."""
        modified = meta["last_modified"]
        return cls(meta["size"], meta["e_tag"], None if modified <= _NO_DATE else modified)

    def is_surely(self, other: "Version") -> bool:
        """Whether both are the same content; False in doubt."""
        if self.size_bytes != other.size_bytes:
            return False
        if self.etag is not None or other.etag is not None:
            return self.etag == other.etag
        return self.modified is not None and self.modified == other.modified

    @property
    def is_unmarked(self) -> bool:
        """Whether there is nothing but the size to tell versions apart."""
        return self.etag is None and self.modified is None

    @property
    def strong_etag(self) -> str | None:
        """The ETag if it can be a condition (`If-Match` compares only strong ones)."""
        return None if self.etag is None or self.etag.startswith("W/") else self.etag


async def look_up(remote: RemoteFile, patience: Patience) -> Version:
    """The version of a remote file. Raises ModelError if it cannot be had.

    Asks for the first byte instead of the head alone: signed addresses allow nothing but GET.
    """

    async def ask() -> Version:
        try:
            result = await obstore.get_async(remote.store, remote.path, options=_FIRST_BYTE)
        except FAULTS as error:
            if not is_about_range(error):
                raise
            result = await obstore.get_async(remote.store, remote.path)
        return Version.of(result.meta)

    return await patience.persist(ask, url=remote.url, access_hint=remote.access_hint)
