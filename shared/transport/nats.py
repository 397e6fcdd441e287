"""The transport over core NATS."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.errors import (
    ConnectionClosedError,
    ConnectionDrainingError,
    OutboundBufferLimitError,
    SlowConsumerError,
    UnexpectedEOF,
)

from shared.errors import ConfigError, Disconnected, PayloadTooLarge
from shared.log import without_passwords
from shared.transport.jetstream import JetStreamBucket, JetStreamLedger
from shared.transport.protocol import Handler, Listener, Traffic, num_bytes

log = logging.getLogger(__name__)

_RECONNECT_WAIT_S = 0.25
_MAX_RENEWAL_WAIT_S = 5.0
"""Between connections that the server closes again, as it does when it refuses a subscription."""
_SETTLED_AFTER_S = 5.0
"""A connection that stays open for so long was not refused; the next trouble is another one."""
_MAX_UNSENT_BYTES = 32 << 20
"""What is published while the broker is away waits here; beyond it, publishing raises."""
_MAX_UNHANDLED_MESSAGES = 65_536
_MAX_UNHANDLED_BYTES = 256 << 20
_PING_INTERVAL_S = 2
"""A broker that does not answer two pings in a row counts as gone, so a frozen one is noticed in about 6 s."""
_DROP_WARNING_INTERVAL_S = 1.0
"""Who drops messages is busy already; it does not also write a line for each."""


class _Subscription:
    """Interest in a subject that outlives the client it was told to."""

    def __init__(self, transport: "NatsTransport", subject: str, queue: str, handler: Handler) -> None:
        self._transport = transport
        self._subject = subject
        self._queue = queue
        self._handler = handler
        self._inner: NatsSubscription | None = None

    async def tell(self, client: Client) -> None:
        self._inner = await client.subscribe(
            self._subject,
            queue=self._queue,
            cb=self._on_message,
            pending_msgs_limit=_MAX_UNHANDLED_MESSAGES,
            pending_bytes_limit=_MAX_UNHANDLED_BYTES,
        )

    async def unsubscribe(self) -> None:
        self._transport.forget(self)
        inner, self._inner = self._inner, None
        if inner is not None:
            with contextlib.suppress(ConnectionClosedError):
                await inner.unsubscribe()

    async def _on_message(self, message: Msg) -> None:
        self._transport.traffic.received(message.data)
        try:
            await self._handler(message.data, message.headers or {})
        except Exception:
            log.exception("a handler failed", extra={"subject": message.subject})


class NatsTransport:
    """A connection to a NATS server or cluster that reconnects for ever."""

    def __init__(self, url: str, *, name: str, answers_under: str = "_INBOX") -> None:
        """`url` may list several servers, separated by commas. `name` appears in the server's monitoring.

        What the server answers comes back on subjects under `answers_under`, so that it can keep others from them.
        """
        self._servers = [server.strip() for server in url.split(",")]
        self._shown_servers = without_passwords(",".join(self._servers))
        self._name = name
        self._answers_under = answers_under
        self._client = Client()
        self._was_begun = False
        self._is_closing = False
        self._renewal: asyncio.Task[None] | None = None
        self._renewal_pause_s = _RECONNECT_WAIT_S
        self._renewed_at = -math.inf
        self._num_dropped = 0
        self.traffic = Traffic()
        self._subscriptions: list[_Subscription] = []
        self._listeners: list[Listener] = []
        self._troubles: set[str] = set()
        self._warned_of_drops_at = -_DROP_WARNING_INTERVAL_S

    @property
    def max_payload(self) -> int:
        """The server's `max_payload`."""
        return self._client.max_payload

    @property
    def is_connected(self) -> bool:
        """Whether the connection stands."""
        return self._client.is_connected

    @property
    def num_dropped(self) -> int:
        """Messages dropped because a handler was too slow."""
        return self._num_dropped

    async def connect(self) -> None:
        """Connect, trying again until it succeeds; says once in the log why a server cannot be reached.

        Raises ConfigError for an address that is none.
        """
        self._was_begun = True
        try:
            await self._client.connect(
                self._servers,
                name=self._name,
                inbox_prefix=self._answers_under,
                max_reconnect_attempts=-1,
                reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]  # passed to asyncio.sleep
                connect_timeout=2,
                ping_interval=_PING_INTERVAL_S,
                max_outstanding_pings=2,
                pending_size=_MAX_UNSENT_BYTES,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnect,
                reconnected_cb=self._on_reconnect,
                closed_cb=self._on_closed,
            )
        except nats.errors.Error as error:  # with endless attempts, only the addresses can be at fault
            self._was_begun = False
            raise ConfigError(f"{self._shown_servers!r} is not the address of a NATS server: {error}") from error
        self._troubles.clear()

    async def close(self) -> None:
        """Send what was published, if the server is there, then disconnect."""
        self._is_closing = True
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)
        if self._client.is_connected:
            try:
                await self._client.flush(timeout=2)
            except (nats.errors.Error, TimeoutError, OSError) as error:
                log.warning("could not flush before closing", extra={"error": str(error)})
        if self._was_begun:
            try:
                await self._client.close()
            except OSError:
                log.warning("NATS is away: what was not sent yet is lost", extra={"servers": self._shown_servers})

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send `payload` to whoever is subscribed."""
        size = num_bytes(payload, headers)
        if size > self.max_payload:  # the client would count the payload alone, and the server cut the connection
            raise PayloadTooLarge(subject, size, self.max_payload)
        try:
            await self._client.publish(subject, payload, headers=dict(headers) if headers else None)
        except (OutboundBufferLimitError, ConnectionClosedError, ConnectionDrainingError) as error:
            raise Disconnected(f"cannot send to {subject}: {error}") from error
        self.traffic.sent(payload)

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> _Subscription:
        """Have `handler` called for each message on `subject`."""
        if self._renewal is not None:
            await self._renewal
        subscription = _Subscription(self, subject, queue, handler)
        await subscription.tell(self._client)
        self._subscriptions.append(subscription)
        return subscription

    def forget(self, subscription: _Subscription) -> None:
        """It has ended."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def on_reconnect(self, listener: Listener) -> None:
        """Have `listener` called after each reconnection."""
        self._listeners.append(listener)

    def bucket(self, name: str) -> JetStreamBucket:
        """What the mesh keeps under a name."""
        return JetStreamBucket(name, lambda: self._client)

    def ledger(self, name: str, subject: str) -> JetStreamLedger:
        """The mesh's records under a name."""
        return JetStreamLedger(name, subject, lambda: self._client)

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, SlowConsumerError):
            self._num_dropped += 1
            self._say_dropping(error.subject)
        elif isinstance(error, UnexpectedEOF):
            pass  # the connection is lost, and that is said when it is
        elif self._client.is_connected:
            log.warning("NATS error", extra={"error": f"{type(error).__name__}: {error}"})
        else:
            self._say_unreachable(f"{type(error).__name__}: {error}")

    def _say_dropping(self, subject: str) -> None:
        if (now := time.monotonic()) - self._warned_of_drops_at >= _DROP_WARNING_INTERVAL_S:
            self._warned_of_drops_at = now
            log.warning(
                "dropping messages: a handler is too slow", extra={"subject": subject, "num_dropped": self._num_dropped}
            )

    def _say_unreachable(self, trouble: str) -> None:
        if trouble not in self._troubles:
            self._troubles.add(trouble)
            log.warning(
                "NATS cannot be reached; trying until it can", extra={"servers": self._shown_servers, "error": trouble}
            )

    async def _on_disconnect(self) -> None:
        if not self._client.is_closed:
            log.warning("lost the connection to NATS", extra={"servers": self._shown_servers})

    async def _on_reconnect(self) -> None:
        self._troubles.clear()
        log.info("connected to NATS again")
        for listener in self._listeners:
            listener()

    async def _on_closed(self) -> None:
        """The client gives up for good when the server reports an error; we do not."""
        if not self._is_closing and self._renewal is None:
            self._renewal = asyncio.create_task(self._renew(), name="renew the NATS connection")

    async def _renew(self) -> None:
        """Open connections, one after the other, until one stays open with everything subscribed on it."""
        log.warning("NATS refused something and closed the connection; opening another")
        if time.monotonic() - self._renewed_at >= _SETTLED_AFTER_S:
            self._renewal_pause_s = _RECONNECT_WAIT_S
        while True:
            await asyncio.sleep(self._renewal_pause_s)
            self._renewal_pause_s = min(2 * self._renewal_pause_s, _MAX_RENEWAL_WAIT_S)
            self._client = Client()
            await self.connect()
            with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
                for subscription in list(self._subscriptions):
                    await subscription.tell(self._client)
                await self._client.flush(timeout=2)  # a refusal comes back before the answer to this
            if self._client.is_connected:
                break
        self._renewal = None
        self._renewed_at = time.monotonic()
        await self._on_reconnect()
