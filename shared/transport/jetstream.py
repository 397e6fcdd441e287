"""Buckets and ledgers in JetStream, the part of NATS that keeps things."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, TypeVar

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StreamInfo
from nats.js.client import JetStreamContext
from nats.js.kv import KV_DEL, KV_PURGE, KeyValue

from shared.errors import BucketUnavailable, LedgerUnavailable, PayloadTooLarge, ShoalError
from shared.transport.protocol import num_bytes

T = TypeVar("T")

_TIMEOUT_S = 2.0
_END_OF_STREAM = None
"""What a watcher says after the last entry that was there when it began."""

_DUPLICATE_WINDOW_S: Final = 3600.0
"""The server remembers the ids of records for so long, some hundred bytes each."""
_NAME_IN_USE: Final = 10058
"""The server's code for a stream that exists with other settings: its operator's, which stand."""
_NUM_REPLICAS: Final = 3
"""How many servers of a cluster keep what is kept: the loss of one is then no loss."""
_TOO_FEW_SERVERS: Final = (10074, 10005)
"""The server's codes for being alone, and for a cluster of fewer than that."""
_FETCHED_AT_ONCE: Final = 512
_IDLE_CONSUMER_S: Final = 30.0
"""A reader that went away is forgotten by the server after this."""


async def _on_enough_servers(make: Callable[[int], Awaitable[T]]) -> T:
    """What `make` makes with so many replicas as there should be, or with one where there are too few servers."""
    try:
        return await make(_NUM_REPLICAS)
    except nats.js.errors.APIError as error:
        if error.err_code not in _TOO_FEW_SERVERS:
            raise
        return await make(1)


class _Kept:
    """What JetStream keeps under a name."""

    _kind: ClassVar[str]
    _error: ClassVar[type[ShoalError]]

    def __init__(self, name: str, client: Callable[[], Client]) -> None:
        """`client` gives the client of the moment; a transport renews its own."""
        self._name = name
        self._client = client

    def _context(self) -> JetStreamContext:
        return self._client().jetstream(timeout=_TIMEOUT_S)

    @contextlib.contextmanager
    def _unavailable(self) -> Iterator[None]:
        try:
            yield
        except (nats.errors.Error, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise self._error(
                f"the {self._kind} {self._name} cannot be used: {reason}; "
                "the NATS server must be there and have JetStream on"
            ) from error


class JetStreamBucket(_Kept):
    """A key-value bucket of JetStream, made by whoever keeps something in it first."""

    _kind = "bucket"
    _error = BucketUnavailable

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
        with self._unavailable():
            bucket = await self._find()
            if bucket is None:
                return {}
            # The watcher calls it an end when all has been sent, though it may not have come; so keys are counted too.
            num_keys = (await bucket.status()).values
            entries: dict[str, KeyValue.Entry] = {}
            is_end = False
            watcher: Any = await bucket.watchall()  # has no types
            try:
                while not is_end or len(entries) < num_keys:
                    if (entry := await watcher.updates(_TIMEOUT_S)) is _END_OF_STREAM:
                        is_end = True
                    else:
                        entries[entry.key] = entry
            finally:
                await watcher.stop()
        return {key: entry.value or b"" for key, entry in entries.items() if entry.operation not in (KV_DEL, KV_PURGE)}

    async def _find(self) -> KeyValue | None:
        """The bucket, if there is one; asked for each time, because a server that was set up anew has none."""
        try:
            return await self._context().key_value(self._name)
        except nats.js.errors.BucketNotFoundError:
            return None

    async def _make(self) -> KeyValue:
        return await _on_enough_servers(
            lambda replicas: self._context().create_key_value(bucket=self._name, replicas=replicas)
        )


class JetStreamLedger(_Kept):
    """A stream of JetStream that keeps its records for ever, made by whoever appends first.

    An operator may give the stream limits, replicas or a larger window for duplicates; these are left as they are.
    """

    _kind = "stream"
    _error = LedgerUnavailable

    def __init__(self, name: str, subject: str, client: Callable[[], Client]) -> None:
        super().__init__(name, client)
        self._subject = subject

    async def append(self, record_id: str, payload: bytes) -> None:
        """Keep a record once, and return when the server has acknowledged it."""
        headers = {"Nats-Msg-Id": record_id}
        client = self._client()
        if not client.is_connected:  # the client would keep it for later, and every repetition too
            raise LedgerUnavailable(f"the stream {self._name} cannot be used: there is no connection to NATS")
        if (size := num_bytes(payload, headers)) > client.max_payload:
            raise PayloadTooLarge(self._subject, size, client.max_payload)
        with self._unavailable():
            try:
                await self._publish(payload, headers)
            except nats.js.errors.NoStreamResponseError:
                await self._make()
                await self._publish(payload, headers)

    async def entries(self, since: float | None = None) -> AsyncIterator[bytes]:
        """The records, oldest first; none as long as nobody has made the stream."""
        with self._unavailable():
            reader = await self._reader(since)
        if reader is None:
            return
        try:
            with self._unavailable():
                num_left = (await reader.consumer_info()).num_pending or 0
            while num_left > 0:
                with self._unavailable():
                    messages = await reader.fetch(min(num_left, _FETCHED_AT_ONCE), timeout=_TIMEOUT_S)
                for message in messages:
                    num_left = message.metadata.num_pending
                    yield message.data
        finally:
            with contextlib.suppress(nats.errors.Error):  # its connection is lost, and the subscription with it
                await reader.unsubscribe()

    async def _publish(self, payload: bytes, headers: dict[str, str]) -> None:
        await self._context().publish(self._subject, payload, stream=self._name, headers=dict(headers))

    async def _make(self) -> None:
        def make(num_replicas: int) -> Awaitable[StreamInfo]:
            return self._context().add_stream(
                name=self._name,
                subjects=[self._subject],
                duplicate_window=_DUPLICATE_WINDOW_S,
                num_replicas=num_replicas,
            )

        try:
            await _on_enough_servers(make)
        except nats.js.errors.BadRequestError as error:
            if error.err_code != _NAME_IN_USE:
                raise

    async def _reader(self, since: float | None) -> JetStreamContext.PullSubscription | None:
        config = ConsumerConfig(
            ack_policy=AckPolicy.NONE, inactive_threshold=_IDLE_CONSUMER_S, mem_storage=True, num_replicas=1
        )
        if since is not None:
            config.deliver_policy = DeliverPolicy.BY_START_TIME
            config.opt_start_time = datetime.fromtimestamp(since, UTC)
        try:
            return await self._context().pull_subscribe(self._subject, stream=self._name, config=config)
        except nats.js.errors.NotFoundError:
            return None
