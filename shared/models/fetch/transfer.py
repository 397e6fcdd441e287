"""One remote file to one local file, whatever happens on the way.

Bytes go to `<file>.part`; beside it, `<file>.state` says which version of which remote file they are of. A later call
goes on where the last one stopped, if the remote file is still that version: by its pinned checksum, else its ETag,
else its date and size. The file appears under its own name only when it is complete and its checksum was right.
"""

import asyncio
import contextlib
import datetime
import hashlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Literal

import msgspec
import obstore
from obstore.exceptions import PreconditionError

from shared.errors import ModelError
from shared.models.fetch.disk import explain_full_disk
from shared.models.fetch.faults import FAULTS, is_about_range
from shared.models.fetch.patience import Patience
from shared.models.progress import Meter

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta
    from obstore.store import ObjectStore

_CHUNK_BYTES: Final = 1 << 18
_MAX_RESTARTS: Final = 5
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


class _State(msgspec.Struct, frozen=True):
    url: str
    version: Version


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


async def download(remote: RemoteFile, target: Path, *, patience: Patience, meter: Meter) -> None:
    """Have the content of `remote` in `target`. Raises ModelError if it cannot be had, or is not what was pinned."""
    transfer = _Transfer(remote, target, patience, meter)
    with explain_full_disk(target.parent):
        if await transfer.is_done():
            return
        was_resumed = transfer.offset > 0
        await transfer.run()
        if await transfer.finish():
            return
        if was_resumed:  # the first part may be of another version than the rest
            transfer.discard()
            await transfer.run()
            if await transfer.finish():
                return
        transfer.discard()
    assert remote.checksum is not None
    raise ModelError(
        f"{remote.url}: the checksum is wrong: expected {remote.checksum.kind} {remote.checksum.digest}, "
        f"got {transfer.found_digest}; nothing was installed"
    )


class _Transfer:
    def __init__(self, remote: RemoteFile, target: Path, patience: Patience, meter: Meter) -> None:
        self._remote = remote
        self._target = target
        self._part = target.with_name(target.name + ".part")
        self._state_file = target.with_name(target.name + ".state")
        self._patience = patience
        self._meter = meter
        self._num_restarts = 0
        self.found_digest = ""
        self._version = self._read_state()
        if self._version is None or self.offset > self._version.size_bytes:
            self.discard()

    @property
    def offset(self) -> int:
        """How many bytes are there."""
        with contextlib.suppress(FileNotFoundError):
            return self._part.stat().st_size
        return 0

    def discard(self) -> None:
        self._part.unlink(missing_ok=True)
        self._target.unlink(missing_ok=True)
        self._state_file.unlink(missing_ok=True)
        self._version = None

    async def is_done(self) -> bool:
        """Whether an earlier call already fetched the whole file, and it has not changed since."""
        if self._version is None or not self._target.exists():
            return False
        if not self._remote.is_immutable and not self._version.is_surely(await look_up(self._remote, self._patience)):
            self.discard()
            return False
        return True

    async def run(self) -> None:
        """Fetch what is missing, as often as it takes."""
        num_failures, can_resume = 0, True
        while self._version is None or self.offset < self._version.size_bytes:
            before = self.offset
            try:
                await self._fetch(before if can_resume else 0)
            except FAULTS as error:
                if before and isinstance(error, PreconditionError):
                    self._restart()
                    continue
                if before and can_resume and is_about_range(error):
                    can_resume = False
                    continue
                num_failures = 1 if self.offset > before else num_failures + 1
                await self._patience.bear(
                    error, num_failures, url=self._remote.url, access_hint=self._remote.access_hint
                )

    async def finish(self) -> bool:
        """Give the complete file its name. False if its checksum is wrong."""
        checksum = self._remote.checksum
        if checksum is not None:
            self.found_digest = await asyncio.to_thread(checksum.of, self._part)
            if self.found_digest != checksum.digest:
                return False
        self._part.rename(self._target)
        return True

    async def _fetch(self, offset: int) -> None:
        """One request for the bytes from `offset` on. Starts over if they are of another version."""
        options: GetOptions = {"range": {"offset": offset}} if offset else {}
        known = self._version
        if offset and known is not None and known.strong_etag is not None and not self._remote.is_immutable:
            options["if_match"] = known.strong_etag
        result = await obstore.get_async(self._remote.store, self._remote.path, options=options)
        version = Version.of(result.meta)
        if offset and known is not None and not self._continues(known, version):
            self._restart()
            return
        self._version = version
        self._state_file.write_bytes(msgspec.json.encode(_State(self._remote.url, version)))
        with self._part.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            await self._write(file, result)

    def _continues(self, known: Version, now: Version) -> bool:
        """In doubt, a pinned checksum decides at the end."""
        if self._remote.is_immutable or known.is_surely(now):
            return known.size_bytes == now.size_bytes
        in_doubt = known.size_bytes == now.size_bytes and known.is_unmarked and now.is_unmarked
        return in_doubt and self._remote.checksum is not None

    def _restart(self) -> None:
        self._num_restarts += 1
        if self._num_restarts > _MAX_RESTARTS:
            raise ModelError(f"{self._remote.url} changed {_MAX_RESTARTS} times while it was fetched; try again later")
        self.discard()

    async def _write(self, file: BinaryIO, result: "GetResult") -> None:
        stream: AsyncIterator[bytes] = result.stream(min_chunk_size=_CHUNK_BYTES)
        async for chunk in stream:
            file.write(chunk)
            self._meter(file.tell())
        file.flush()
        os.fsync(file.fileno())

    def _read_state(self) -> Version | None:
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            state = msgspec.json.decode(self._state_file.read_bytes(), type=_State)
            if state.url == self._remote.url:
                return state.version
        return None
