"""One remote file to one local file, whatever happens on the way.

Bytes go to `<file>.part`; beside it, `<file>.state` says which version of which remote file they are of. A later call
goes on where the last one stopped, if the remote file is still that version: by its pinned checksum, else its ETag,
else its date and size. The file appears under its own name only when it is complete and its checksum was right.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec
import obstore
from obstore.exceptions import PreconditionError

from shared.errors import ModelError
from shared.models.fetch.disk import explain_full_disk
from shared.models.fetch.faults import FAULTS, is_about_range
from shared.models.fetch.patience import Patience
from shared.models.fetch.remote import RemoteFile, Version, look_up
from shared.models.progress import Meter

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult

_CHUNK_BYTES: Final = 1 << 16
"""What may be lost when a connection breaks; smaller ones cost more time than the network does."""
_MAX_RESTARTS: Final = 5


class _State(msgspec.Struct, frozen=True):
    url: str
    version: Version


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
        if self._version is None:
            return False
        if self._part.exists() and self.offset == self._version.size_bytes:
            self._part.rename(self._target)
        if not self._target.exists():
            return False
        checksum = self._remote.checksum
        if checksum is not None:
            is_current = await asyncio.to_thread(checksum.of, self._target) == checksum.digest
        elif self._remote.is_immutable:
            is_current = self._target.stat().st_size == self._version.size_bytes
        else:
            is_current = self._version.is_surely(await look_up(self._remote, self._patience))
        if not is_current:
            self.discard()
        return is_current

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
