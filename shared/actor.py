"""The base of every service: a bounded mailbox, one message at a time, and three phases.

Start subscribes and announces, run handles messages, stop takes nothing new, drains within a deadline and closes.
Because handlers never overlap, they need no locks. A subclass has one `match` over its inbound union; each arm calls
a method named after the event.
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from shared import subjects
from shared.clock import Clock
from shared.codec import Decoder, encode
from shared.errors import Disconnected, MessageError
from shared.ids import InstanceId, Service
from shared.messages import Message, Presence, Status
from shared.presence import BEAT_INTERVAL_S
from shared.telemetry.metrics import Instrument, MetricsPage
from shared.transport import Handler, Transport

log = logging.getLogger(__name__)

M = TypeVar("M")

_MAX_MESSAGES_IN_A_ROW = 64
"""After so many, `on_idle` and other tasks of the process get their turn."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which instance an actor is."""

    service: Service
    instance_id: InstanceId
    name: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes: delivered through the mailbox at a fixed interval."""


class Actor(ABC, Generic[M]):
    """One service instance on a transport. An async context manager: entering starts it, leaving closes it."""

    tick_interval_s = 0.25
    mailbox_size = 65_536

    def __init__(self, identity: Identity, transport: Transport, inbound: Any, clock: Clock) -> None:
        """`inbound` is the union of messages that this actor handles."""
        self.identity = identity
        self.transport = transport
        self.clock = clock
        self.is_draining = False
        self.metrics_address = ""
        """Where the metrics of this process are shown; empty if nowhere."""
        self.num_dropped_messages = 0
        self.num_handled_ticks = 0
        """Those handled: it stands still when the mailbox is not worked on."""
        self.num_handled: dict[type, int] = defaultdict(int)
        """Messages handled, by their class."""
        self._decoder: Decoder[M] = Decoder(inbound)
        self._mailbox: deque[M | Tick] = deque()
        self._wake = asyncio.Event()
        self._beat_is_due = asyncio.Event()
        self._drain_until = float("inf")
        self._background: list[asyncio.Task[None]] = []

    # What a subclass provides.

    @abstractmethod
    async def handle(self, message: M | Tick) -> None:
        """React to one message. An exception from here ends the process."""

    @abstractmethod
    def status(self) -> Status:
        """What the next beat says of this instance."""

    @abstractmethod
    def models(self) -> tuple[str, ...]:
        """The models that this instance can serve at this moment."""

    def instruments(self) -> Sequence[Instrument]:
        """The metrics that this service has beside those that all have."""
        return ()

    def show_metrics(self, page: MetricsPage) -> None:
        """All metrics of this process can be had from `page`, should this service have a place to show them."""

    async def on_start(self) -> None:
        """Subscribe to more than the inbox; acquire what needs I/O."""

    async def on_idle(self) -> None:
        """Called when the mailbox has been emptied, or many messages were handled without a pause: the moment to act
        on all that arrived together."""

    def is_idle(self) -> bool:
        """Whether a draining actor may leave."""
        return True

    async def on_stop(self) -> None:
        """Release what `on_start` acquired."""

    @property
    def mailbox_depth(self) -> int:
        """Messages that wait to be handled."""
        return len(self._mailbox)

    # What a subclass uses.

    async def send(self, subject: str, message: Message) -> bool:
        """Publish a message. False if it could not be sent; the protocols repair what is lost."""
        try:
            await self.transport.publish(subject, encode(message))
        except MessageError as error:
            log.error("message cannot be sent", extra={"subject": subject, "error": str(error)})
            return False
        except Disconnected as error:
            log.warning("message not sent", extra={"subject": subject, "error": str(error)})
            return False
        return True

    async def send_to(self, instance_id: InstanceId, message: Message) -> bool:
        """Publish a message to one instance's inbox. False if it could not be sent."""
        return await self.send(subjects.inbox(instance_id), message)

    async def listen(self, subject: str, *, queue: str = "") -> None:
        """Have messages on a subject delivered to the mailbox."""
        await self.transport.subscribe(subject, self._deliverer(), queue=queue)

    def post(self, message: M | Tick) -> None:
        """Put what this instance itself has to say into the mailbox, however full it is: nobody would say it again.

        Call it from the event loop's thread.
        """
        self._mailbox.append(message)
        self._wake.set()

    def announce(self) -> None:
        """Beat at once: something has changed that others wait for, such as what this instance serves or who has it."""
        self._beat_is_due.set()

    # Phases.

    async def __aenter__(self) -> Self:
        await self.listen(subjects.inbox(self.identity.instance_id))
        await self.on_start()
        self._background = [
            asyncio.create_task(self._tick_for_ever(), name="ticks"),
            asyncio.create_task(self._beat_for_ever(), name="beats"),
        ]
        for task in self._background:
            task.add_done_callback(lambda _task: self._wake.set())
        return self

    async def run(self) -> None:
        """Handle messages until drained. Raises whatever a handler raises."""
        num_in_a_row = 0
        while self.clock.now() < self._drain_until:
            if self._mailbox:
                message = self._mailbox.popleft()
                await self.handle(message)
                self.num_handled_ticks += isinstance(message, Tick)
                self.num_handled[type(message)] += 1
                num_in_a_row += 1
                if num_in_a_row < _MAX_MESSAGES_IN_A_ROW:
                    continue
                await asyncio.sleep(0)
            self._wake.clear()  # before `on_idle`, so that what happens meanwhile is not slept through
            await self.on_idle()
            num_in_a_row = 0
            self._raise_if_background_failed()
            if self._mailbox:
                continue
            if self.is_draining and self.is_idle():
                return
            await self._wake.wait()

    def drain(self, deadline_s: float) -> None:
        """Take nothing new, finish what runs, and let `run` return after `deadline_s` at the latest."""
        if not self.is_draining:
            log.info("draining", extra={"deadline_s": deadline_s})
        self.is_draining = True
        self._drain_until = min(self._drain_until, self.clock.now() + deadline_s)
        self._wake.set()
        self.announce()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.on_stop()
        await self._beat(is_leaving=True)

    def _offer(self, message: M | Tick) -> None:
        """Put a message into the mailbox if there is room; the protocols repair what is lost."""
        if len(self._mailbox) >= self.mailbox_size:
            self.num_dropped_messages += 1
        else:
            self.post(message)

    def _deliverer(self) -> Handler:
        async def deliver(payload: bytes, _headers: Mapping[str, str]) -> None:
            try:
                message = self._decoder.decode(payload)
            except MessageError as error:
                self.num_dropped_messages += 1
                log.warning("dropped a message", extra={"error": str(error)})
                return
            self._offer(message)

        return deliver

    async def _tick_for_ever(self) -> None:
        while True:
            self._offer(Tick())
            await asyncio.sleep(self.tick_interval_s)

    async def _beat_for_ever(self) -> None:
        while True:
            self._beat_is_due.clear()
            await self._beat()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_INTERVAL_S):
                    await self._beat_is_due.wait()

    async def _beat(self, *, is_leaving: bool = False) -> None:
        if not self.transport.is_connected:
            return
        beat = Presence(
            service=self.identity.service,
            instance_id=self.identity.instance_id,
            name=self.identity.name,
            models=self.models(),
            status=self.status(),
            num_dropped_messages=self.num_dropped_messages + self.transport.num_dropped,
            is_draining=self.is_draining,
            is_leaving=is_leaving,
            metrics_address=self.metrics_address,
        )
        await self.send(subjects.presence(self.identity.service), beat)

    def _raise_if_background_failed(self) -> None:
        for task in self._background:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
