"""The transport over core NATS."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Mapping

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.errors import (
    ConnectionClosedError,
    ConnectionDrainingError,
    OutboundBufferLimitError,
    SlowConsumerError,
)

from shared.errors import ConfigError, Disconnected, PayloadTooLarge
from shared.log import without_passwords
from shared.transport.connection import Connection, Refused
from shared.transport.jetstream import JetStreamBucket, JetStreamLedger
from shared.transport.protocol import Handler, Listener, Traffic, num_bytes
from shared.transport.unsent import Unsent

log = logging.getLogger(__name__)

_CONNECT_WITHIN_S = 2.0
"""A server that does not come to an end with a new connection in this time is left for the next one."""
_CLOSE_WITHIN_S = 0.75
"""How long closing waits for the server to take what was published. With the two seconds for usage records it is less
than the three that `shoal up` leaves a process after its drain deadline."""
_RECONNECT_WAIT_S = 0.25
_MAX_REFUSED_WAIT_S = 5.0
"""Between connections that the server closes again, as it does when it refuses a subscription."""
_SETTLED_AFTER_S = 5.0
"""A connection that stays open for so long was not refused; the next trouble is another one."""
_MAX_UNSENT_BYTES = 32 << 20
"""What is published while the broker is away waits here; beyond it, publishing raises."""
_MAX_UNHANDLED_MESSAGES = 65_536
_MAX_UNHANDLED_BYTES = 256 << 20
_PING_INTERVAL_S = 2.0
"""A broker that leaves two pings in a row unanswered until the third is due counts as gone: a frozen one is noticed
within 6 s, and no sooner than after 4."""
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
    """A connection to a NATS server or cluster that is made again for ever. Owns what outlives each `Connection`."""

    def __init__(self, url: str, *, name: str, answers_under: str = "_INBOX") -> None:
        """`url` may list several servers, separated by commas. `name` appears in the server's monitoring.

        What the server answers comes back on subjects under `answers_under`, so that it can keep others from them.
        """
        self._servers = [server.strip() for server in url.split(",")]
        self._shown_servers = without_passwords(",".join(self._servers))
        self._name = name
        self._answers_under = answers_under
        self._connection = Connection()
        self._is_open = False
        """Between `connect` and `close`, whether there is a server or not."""
        self._keeping: asyncio.Task[None] | None = None
        self._refused_wait_s = _RECONNECT_WAIT_S
        self._unsent = Unsent(_MAX_UNSENT_BYTES)
        self._num_dropped = 0
        self.traffic = Traffic()
        self._subscriptions: list[_Subscription] = []
        self._listeners: list[Listener] = []
        self._troubles: set[str] = set()
        self._warned_of_drops_at = -_DROP_WARNING_INTERVAL_S

    @property
    def max_payload(self) -> int:
        """The server's `max_payload`."""
        return self._connection.max_payload

    @property
    def is_connected(self) -> bool:
        """Whether the connection stands."""
        return self._connection.is_connected

    @property
    def num_dropped(self) -> int:
        """Messages dropped because a handler was too slow."""
        return self._num_dropped

    async def connect(self) -> None:
        """Connect, trying again until it succeeds; says once in the log why a server cannot be reached.

        Raises ConfigError for an address that is none.
        """
        try:
            Connection.check(self._servers)
        except nats.errors.Error as error:
            raise ConfigError(f"{self._shown_servers!r} is not the address of a NATS server: {error}") from error
        random.shuffle(self._servers)  # so that not all of a mesh are at the same one
        self._is_open = True
        await self._join()
        self._keeping = asyncio.create_task(self._keep(), name="keep a connection to NATS")

    async def close(self) -> None:
        """Send what was published, if the server takes it at once, then disconnect."""
        self._is_open = False
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._connection.is_connected:
            try:
                await self._connection.settle(_CLOSE_WITHIN_S)
            except (nats.errors.Error, OSError) as error:
                log.warning("could not flush before closing", extra={"error": _described(error)})
        await self._connection.end()
        if self._unsent:
            log.warning("NATS is away: what was not sent yet is lost", extra={"servers": self._shown_servers})
            self._unsent.clear()

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send `payload` to whoever is subscribed."""
        size = num_bytes(payload, headers)
        if size > self.max_payload:  # the client would count the payload alone, and the server cut the connection
            raise PayloadTooLarge(subject, size, self.max_payload)
        if self._connection.is_connected:
            await self._send(self._connection, subject, payload, headers)
        elif self._is_open:
            self._unsent.add(subject, payload, headers)
        else:
            raise Disconnected(f"cannot send to {subject}: there is no connection to NATS")
        self.traffic.sent(payload)

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> _Subscription:
        """Have `handler` called for each message on `subject`; if the broker is away, of those after its return."""
        subscription = _Subscription(self, subject, queue, handler)
        self._subscriptions.append(subscription)
        if self._connection.is_connected:
            try:
                await subscription.tell(self._connection)
            except nats.errors.Error:
                self.forget(subscription)  # or no later connection could be told everything
                raise
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
        return JetStreamBucket(name, lambda: self._connection)

    def ledger(self, name: str, subject: str) -> JetStreamLedger:
        """The mesh's records under a name."""
        return JetStreamLedger(name, subject, lambda: self._connection)

    # One connection after the other.

    async def _keep(self) -> None:
        """Whenever the connection is lost, make another."""
        while True:
            began = time.monotonic()
            await self._connection.lost.wait()
            trouble = self._connection.trouble
            await self._connection.end()
            if time.monotonic() - began >= _SETTLED_AFTER_S:
                self._refused_wait_s = _RECONNECT_WAIT_S
            if isinstance(trouble, Refused):
                await self._wait_after_refusal(trouble)
            else:
                log.warning(
                    "lost the connection to NATS", extra={"servers": self._shown_servers, "error": _described(trouble)}
                )
            await self._join()
            log.info("connected to NATS again")
            for listener in self._listeners:
                try:
                    listener()
                except Exception:  # its fault costs nobody the connection
                    log.exception("a bug in what is done after a reconnection")

    async def _join(self) -> None:
        """Try one server after the other, until one has been told everything. The one that is lost comes last."""
        while True:
            for server in [*self._servers]:
                self._servers.remove(server)
                self._servers.append(server)
                try:
                    self._connection = await self._open(server)
                except Refused as error:
                    await self._wait_after_refusal(error)
                except Exception as error:  # of the many libraries below: whatever it is, the next try may go well
                    self._say_unreachable(_described(error))
                else:
                    self._troubles.clear()
                    return
            await asyncio.sleep(_RECONNECT_WAIT_S)

    async def _open(self, server: str) -> Connection:
        connection = await Connection.open(
            server,
            within_s=_CONNECT_WITHIN_S,
            name=self._name,
            answers_under=self._answers_under,
            ping_interval_s=_PING_INTERVAL_S,
            on_error=self._on_error,
        )
        try:
            await self._tell(connection)
        except BaseException:
            await connection.end()
            raise
        return connection

    async def _tell(self, connection: Connection) -> None:
        """Subscribe to everything and send what has waited. Nothing of either is new between the return and the next
        `await`. Raises an error of nats-py, or Disconnected, if the server refuses something, or hangs."""
        told: set[_Subscription] = set()
        is_settled = False
        while (news := [each for each in self._subscriptions if each not in told]) or not is_settled or self._unsent:
            for subscription in news:
                await subscription.tell(connection)
                told.add(subscription)
            if news or not is_settled:
                await connection.settle(_CONNECT_WITHIN_S)  # a refusal comes back before the answer to this
                is_settled = True
            if connection.trouble is not None:
                raise connection.trouble
            if self._unsent:
                await self._send_oldest(connection)

    async def _send_oldest(self, connection: Connection) -> None:
        """Send what has waited longest. One that this server cannot take goes alone."""
        subject, payload, headers = self._unsent.oldest
        if (size := num_bytes(payload, headers)) <= connection.max_payload:
            await self._send(connection, subject, payload, headers)
        else:
            self._num_dropped += 1
            log.warning("dropped a message that is larger than NATS takes", extra={"subject": subject, "bytes": size})
        self._unsent.remove()

    @staticmethod
    async def _send(connection: Connection, subject: str, payload: bytes, headers: Mapping[str, str] | None) -> None:
        try:
            await connection.publish(subject, payload, headers=dict(headers) if headers else None)
        except (OutboundBufferLimitError, ConnectionClosedError, ConnectionDrainingError) as error:
            raise Disconnected(f"cannot send to {subject}: {error}") from error

    async def _wait_after_refusal(self, error: Refused) -> None:
        log.warning(
            "NATS refused something and closed the connection; opening another", extra={"error": _described(error)}
        )
        await asyncio.sleep(self._refused_wait_s)
        self._refused_wait_s = min(2 * self._refused_wait_s, _MAX_REFUSED_WAIT_S)

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, SlowConsumerError):
            self._num_dropped += 1
            self._say_dropping(error.subject)
        else:
            log.warning("NATS error", extra={"error": _described(error)})

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


def _described(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}"
