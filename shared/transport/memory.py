"""The transport inside one process: a broker as an object. For tests, and for a mesh in a single process.

Behaves as core NATS does: at most once, in order, queue groups, a largest payload, nothing for absent subscribers.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from shared.errors import BucketUnavailable, Disconnected, LedgerUnavailable, PayloadTooLarge
from shared.transport.protocol import Handler, Listener, Traffic, num_bytes

log = logging.getLogger(__name__)

_MAX_UNHANDLED_MESSAGES = 65_536


class MemoryBucket:
    """A bucket that lasts as long as its broker."""

    def __init__(self, is_available: Callable[[], bool], values: dict[str, bytes]) -> None:
        self._is_available = is_available
        self._values = values

    async def put(self, key: str, value: bytes) -> None:
        """Keep `value` under `key`."""
        self._check()
        self._values[key] = value

    async def delete(self, key: str) -> None:
        """Keep nothing under `key`."""
        self._check()
        self._values.pop(key, None)

    async def entries(self) -> dict[str, bytes]:
        """All that is kept."""
        self._check()
        return dict(self._values)

    def _check(self) -> None:
        if not self._is_available():
            raise BucketUnavailable("the broker is away")


@dataclass(slots=True)
class Records:
    """What a broker keeps of one ledger."""

    payloads: dict[str, bytes] = field(default_factory=dict)
    """By record id, oldest first."""
    kept_at: dict[str, float] = field(default_factory=dict)
    num_said: int = 0
    """How often anything was appended, repetitions included."""


class MemoryLedger:
    """A ledger that lasts as long as its broker, and never forgets an id."""

    def __init__(self, transport: "MemoryTransport", name: str, subject: str) -> None:
        self._transport = transport
        self._name = name
        self._subject = subject

    async def append(self, record_id: str, payload: bytes) -> None:
        """Keep a record once."""
        self._check()
        broker = self._transport.broker
        if (size := num_bytes(payload, {"Nats-Msg-Id": record_id})) > broker.max_payload:
            raise PayloadTooLarge(self._subject, size, broker.max_payload)
        records = broker.ledgers[self._name]
        records.num_said += 1
        records.payloads.setdefault(record_id, payload)
        records.kept_at.setdefault(record_id, time.time())
        await asyncio.sleep(0)
        if broker.num_acknowledgements_to_lose > 0:
            broker.num_acknowledgements_to_lose -= 1
            raise LedgerUnavailable("the acknowledgement was lost")

    async def entries(self, since: float | None = None) -> AsyncIterator[bytes]:
        """The records, oldest first."""
        self._check()
        records = self._transport.broker.ledgers[self._name]
        for record_id, payload in list(records.payloads.items()):
            if since is None or records.kept_at[record_id] >= since:
                yield payload

    def _check(self) -> None:
        if not self._transport.is_connected:
            raise LedgerUnavailable("the broker is away")
        if not self._transport.broker.keeps_records:
            raise LedgerUnavailable("the broker keeps no records")


class MemoryBroker:
    """What the transports of one mesh share."""

    def __init__(self, *, max_payload: int = 1 << 20) -> None:
        self.max_payload = max_payload
        self._subscriptions: list[_Subscription] = []
        self._turns: Counter[str] = Counter()
        self.buckets: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
        """What is kept, by bucket and key."""
        self.ledgers: defaultdict[str, Records] = defaultdict(Records)
        self.keeps_records = True
        """Set it to False for a server without JetStream, as far as ledgers go."""
        self.num_acknowledgements_to_lose = 0
        """So many of the next records are kept, and whoever appended them does not hear of it."""

    @property
    def num_undelivered(self) -> int:
        """Messages that wait for a handler."""
        return sum(subscription.num_messages for subscription in self._subscriptions)

    def add(self, subscription: "_Subscription") -> None:
        """Start delivering to it."""
        self._subscriptions.append(subscription)

    def remove(self, subscription: "_Subscription") -> None:
        """Stop delivering to it."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def deliver(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        """Hand one message to every plain subscriber and to one of each queue group."""
        groups: dict[str, list[_Subscription]] = {}
        for subscription in self._subscriptions:
            if matches(subscription.subject, subject):
                if subscription.queue:
                    groups.setdefault(subscription.queue, []).append(subscription)
                else:
                    subscription.put(payload, headers)
        for queue, members in groups.items():
            self._turns[queue] += 1
            members[self._turns[queue] % len(members)].put(payload, headers)


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject matches a pattern in which `*` is one token and a final `>` is one or more."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        given, rest = given[: len(wanted)], given[len(wanted) :]
        if not rest:
            return False
    return len(wanted) == len(given) and all(w in ("*", g) for w, g in zip(wanted, given, strict=True))


class _Subscription:
    """One subscriber's queue, and the task that empties it one message at a time."""

    def __init__(self, transport: "MemoryTransport", subject: str, queue: str, handler: Handler) -> None:
        self.subject = subject
        self.queue = queue
        self._transport = transport
        self._handler = handler
        self._messages: deque[tuple[bytes, Mapping[str, str]]] = deque()
        self._wake = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def num_messages(self) -> int:
        return len(self._messages)

    def put(self, payload: bytes, headers: Mapping[str, str]) -> None:
        if len(self._messages) >= _MAX_UNHANDLED_MESSAGES:
            self._transport.count_dropped()
            return
        self._messages.append((payload, headers))
        self._wake.set()

    async def unsubscribe(self) -> None:
        self._transport.broker.remove(self)
        self._transport.forget(self)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._messages:
                payload, headers = self._messages.popleft()
                self._transport.traffic.received(payload)
                try:
                    await self._handler(payload, headers)
                except Exception:
                    log.exception("a handler failed", extra={"subject": self.subject})


class MemoryTransport:
    """One participant's connection to a `MemoryBroker`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker
        self._subscriptions: list[_Subscription] = []
        self._listeners: list[Listener] = []
        self._is_connected = False
        self._num_dropped = 0
        self.traffic = Traffic()

    @property
    def max_payload(self) -> int:
        """The broker's limit in bytes."""
        return self.broker.max_payload

    @property
    def is_connected(self) -> bool:
        """Whether `connect` was called and `close` was not."""
        return self._is_connected

    @property
    def num_dropped(self) -> int:
        """Messages dropped because a handler was too slow."""
        return self._num_dropped

    def count_dropped(self) -> None:
        """One more message was dropped."""
        self._num_dropped += 1

    def forget(self, subscription: _Subscription) -> None:
        """It has ended."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    async def connect(self) -> None:
        """Connect at once."""
        self._is_connected = True

    async def close(self) -> None:
        """End every subscription."""
        self._is_connected = False
        for subscription in list(self._subscriptions):
            await subscription.unsubscribe()

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send `payload` to whoever is subscribed."""
        if not self._is_connected:
            raise Disconnected(f"cannot send to {subject}: not connected")
        size = num_bytes(payload, headers)
        if size > self.max_payload:
            raise PayloadTooLarge(subject, size, self.max_payload)
        self.traffic.sent(payload)
        self.broker.deliver(subject, payload, headers or {})

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> _Subscription:
        """Have `handler` called for each message on `subject`."""
        subscription = _Subscription(self, subject, queue, handler)
        self._subscriptions.append(subscription)
        self.broker.add(subscription)
        return subscription

    def on_reconnect(self, listener: Listener) -> None:
        """Have `listener` called by `reconnect`."""
        self._listeners.append(listener)

    def bucket(self, name: str) -> MemoryBucket:
        """What the mesh keeps under a name."""
        return MemoryBucket(lambda: self._is_connected, self.broker.buckets[name])

    def ledger(self, name: str, subject: str) -> MemoryLedger:
        """The mesh's records under a name."""
        return MemoryLedger(self, name, subject)

    def reconnect(self) -> None:
        """Pretend that the connection was lost and found again."""
        for listener in self._listeners:
            listener()
