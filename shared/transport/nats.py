"""The transport over core NATS. The only module, with `shared.leases`, that imports nats."""

import asyncio
import logging
from collections.abc import Mapping

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.errors import (
    ConnectionClosedError,
    ConnectionDrainingError,
    MaxPayloadError,
    OutboundBufferLimitError,
    SlowConsumerError,
)

from shared.errors import Disconnected, PayloadTooLarge
from shared.transport.protocol import Handler, Listener

log = logging.getLogger(__name__)

_RECONNECT_WAIT_S = 0.25
_MAX_UNSENT_BYTES = 32 << 20
"""What is published while the broker is away waits here; beyond it, publishing raises."""
_MAX_UNHANDLED_MESSAGES = 65_536
_MAX_UNHANDLED_BYTES = 256 << 20
_PING_INTERVAL_S = 2
"""A broker that does not answer two pings in a row counts as gone, so a frozen one is noticed in about 4 s."""


class _Subscription:
    def __init__(self, inner: NatsSubscription) -> None:
        self._inner = inner

    async def unsubscribe(self) -> None:
        await self._inner.unsubscribe()


class NatsTransport:
    """A connection to a NATS server or cluster that reconnects for ever."""

    def __init__(self, url: str, *, name: str) -> None:
        """`url` may list several servers, separated by commas. `name` appears in the server's monitoring."""
        self._servers = [server.strip() for server in url.split(",")]
        self._name = name
        self._client = Client()
        self._num_dropped = 0
        self._listeners: list[Listener] = []
        self._says_unreachable = False

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
        """Connect, trying again until it succeeds; says once in the log that the server cannot be reached."""
        await self._client.connect(
            self._servers,
            name=self._name,
            max_reconnect_attempts=-1,
            reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]  # passed to asyncio.sleep
            connect_timeout=2,
            ping_interval=_PING_INTERVAL_S,
            max_outstanding_pings=2,
            pending_size=_MAX_UNSENT_BYTES,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnect,
            reconnected_cb=self._on_reconnect,
        )
        self._says_unreachable = False

    async def close(self) -> None:
        """Send what was published, if the server is there, then disconnect."""
        if self._client.is_connected:
            try:
                await self._client.flush(timeout=2)
            except (nats.errors.Error, TimeoutError, OSError) as error:
                log.warning("could not flush before closing", extra={"error": str(error)})
        await self._client.close()

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send `payload` to whoever is subscribed."""
        try:
            await self._client.publish(subject, payload, headers=dict(headers) if headers else None)
        except MaxPayloadError:
            raise PayloadTooLarge(subject, len(payload), self.max_payload) from None
        except (OutboundBufferLimitError, ConnectionClosedError, ConnectionDrainingError) as error:
            raise Disconnected(f"cannot send to {subject}: {error}") from error

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> _Subscription:
        """Have `handler` called for each message on `subject`."""

        async def on_message(message: Msg) -> None:
            await handler(message.data, message.headers or {})

        inner = await self._client.subscribe(
            subject,
            queue=queue,
            cb=on_message,
            pending_msgs_limit=_MAX_UNHANDLED_MESSAGES,
            pending_bytes_limit=_MAX_UNHANDLED_BYTES,
        )
        return _Subscription(inner)

    def on_reconnect(self, listener: Listener) -> None:
        """Have `listener` called after each reconnection."""
        self._listeners.append(listener)

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, SlowConsumerError):
            self._num_dropped += 1
            log.warning("dropped a message: handler too slow", extra={"subject": error.subject})
        elif isinstance(error, OSError | asyncio.TimeoutError):
            self._say_unreachable(error)
        else:
            log.warning("NATS error", extra={"error": f"{type(error).__name__}: {error}"})

    def _say_unreachable(self, error: Exception) -> None:
        if not self._says_unreachable:
            self._says_unreachable = True
            log.warning(
                "NATS cannot be reached; trying until it can",
                extra={"servers": self._servers, "error": str(error)},
            )

    async def _on_disconnect(self) -> None:
        if not self._client.is_closed:
            log.warning("lost the connection to NATS", extra={"servers": self._servers})

    async def _on_reconnect(self) -> None:
        self._says_unreachable = False
        log.info("connected to NATS again")
        for listener in self._listeners:
            listener()
