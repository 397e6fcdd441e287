"""What Shoal asks of a broker: fire-and-forget messages on subjects, with queue groups. At most once, in order.

Two implementations, `NatsTransport` and `MemoryTransport`, pass the same contract tests. Loss is allowed here and
repaired above: receivers notice gaps by sequence and ask again.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from shared.transport.bucket import Bucket
from shared.transport.ledger import Ledger

Handler = Callable[[bytes, Mapping[str, str]], Awaitable[None]]
"""Called with the payload and headers of one message; messages of one subscription come one after the other.

What it raises is logged; the next message comes all the same.
"""

Listener = Callable[[], None]


def num_bytes(payload: bytes, headers: Mapping[str, str] | None) -> int:
    """What a message counts against the broker's `max_payload`: NATS sends headers as lines before the payload."""
    if not headers:
        return len(payload)
    lines = sum(len(f"{key}: {value}\r\n".encode()) for key, value in headers.items())
    return len("NATS/1.0\r\n") + lines + len("\r\n") + len(payload)


@dataclass(slots=True)
class Traffic:
    """What went over one connection since it was made. Bytes are those of payloads."""

    num_sent: int = 0
    num_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    def sent(self, payload: bytes) -> None:
        """Count one message that was given to the broker, or waits for it to come back."""
        self.num_sent += 1
        self.bytes_sent += len(payload)

    def received(self, payload: bytes) -> None:
        """Count one message that is being handed to its subscriber."""
        self.num_received += 1
        self.bytes_received += len(payload)


class Subscription(Protocol):
    """Interest in a subject."""

    async def unsubscribe(self) -> None:
        """End it; what already arrived may still be handled."""
        ...


class Transport(Protocol):
    """A connection to the broker."""

    @property
    def max_payload(self) -> int:
        """The largest message in bytes, headers included, that the broker carries."""
        ...

    @property
    def is_connected(self) -> bool:
        """Whether messages get through at this moment."""
        ...

    @property
    def num_dropped(self) -> int:
        """Messages that arrived here and were dropped because a handler was too slow."""
        ...

    @property
    def traffic(self) -> Traffic:
        """What was sent and received, but for buckets and ledgers."""
        ...

    async def connect(self) -> None:
        """Connect, trying again until it succeeds."""
        ...

    async def close(self) -> None:
        """Send what was published, then disconnect."""
        ...

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send `payload` to whoever is subscribed.

        Raises PayloadTooLarge if the broker would refuse it, and Disconnected if the broker is away and the buffer
        for unsent messages is full.
        """
        ...

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Have `handler` called for each message on `subject` (`*` one token, `>` the rest).

        Of all subscribers that share a `queue` name, one gets each message.
        """
        ...

    def on_reconnect(self, listener: Listener) -> None:
        """Have `listener` called after each reconnection: messages may have been lost."""
        ...

    def bucket(self, name: str) -> Bucket:
        """What the mesh keeps under a name (letters, digits, `-` and `_`). Made when something is first kept in it."""
        ...

    def ledger(self, name: str, subject: str) -> Ledger:
        """The mesh's records under a name, which travel on a subject of their own. Made with its first record."""
        ...
