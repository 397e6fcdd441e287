"""Buckets in JetStream, the part of NATS that keeps things."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.client import JetStreamContext
from nats.js.kv import KeyValue

from shared.errors import BucketUnavailable

_TIMEOUT_S = 2.0
_END_OF_STREAM = None
"""What a watcher says after the last entry that was there when it began."""


class JetStreamBucket:
    """A key-value bucket of JetStream, made by whoever keeps something in it first."""

    def __init__(self, name: str, client: Callable[[], Client]) -> None:
        """`client` gives the client of the moment; a transport renews its own."""
        self._name = name
        self._client = client

    async def put(self, key: str, value: bytes) -> None:
        """Keep `value` under `key`."""
        with self._unavailable():
            bucket = await self._find() or await self._make()
            await bucket.put(key, value)

    async def delete(self, key: str) -> None:
        """Keep nothing under `key`."""
        with self._unavailable():
            bucket = await self._find()
            if bucket is not None:
                await bucket.delete(key)

    async def entries(self) -> dict[str, bytes]:
        """All that is kept: nothing, as long as nobody has made the bucket."""
        found: dict[str, bytes] = {}
        with self._unavailable():
            bucket = await self._find()
            if bucket is None:
                return found
            watcher: Any = await bucket.watchall(ignore_deletes=True)  # has no types
            try:
                while (entry := await watcher.updates(_TIMEOUT_S)) is not _END_OF_STREAM:
                    found[entry.key] = entry.value or b""
            finally:
                await watcher.stop()
        return found

    async def _find(self) -> KeyValue | None:
        """The bucket, if there is one; asked for each time, because a server that was set up anew has none."""
        try:
            return await self._context().key_value(self._name)
        except nats.js.errors.BucketNotFoundError:
            return None

    async def _make(self) -> KeyValue:
        return await self._context().create_key_value(bucket=self._name)

    def _context(self) -> JetStreamContext:
        return self._client().jetstream(timeout=_TIMEOUT_S)

    @contextlib.contextmanager
    def _unavailable(self) -> Iterator[None]:
        try:
            yield
        except (nats.errors.Error, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise BucketUnavailable(
                f"the bucket {self._name} cannot be used: {reason}; the NATS server must be there and have JetStream on"
            ) from error
