"""What is pinned in the whole mesh, read from the broker's bucket while the scheduler goes on.

The bucket is read at the start, when somebody says that it has changed, after a reconnection, and every now and then.
Does not decide what a pin does; that is the fleet's.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from services.scheduler.core.fleet import Fleet
from services.scheduler.core.pins import Pin
from shared.codec import Decoder
from shared.errors import BucketUnavailable, MessageError
from shared.messages import PINS_BUCKET, PinnedPrefix
from shared.transport import Transport

log = logging.getLogger(__name__)

_READ_AGAIN_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class PinsRead:
    """What the bucket holds now, by name."""

    pins: Mapping[str, PinnedPrefix]


class PinReader:
    """Reads the bucket in a task of its own and tells when it holds something else than before."""

    def __init__(self, transport: Transport, tell: Callable[[PinsRead], None]) -> None:
        """`tell` is called in the event loop."""
        self._bucket = transport.bucket(PINS_BUCKET)
        self._tell = tell
        self._again = asyncio.Event()
        self._decoder: Decoder[PinnedPrefix] = Decoder(PinnedPrefix)
        self._raw: dict[str, bytes] = {}
        self._was_available = True
        self._task: asyncio.Task[None] | None = None
        transport.on_reconnect(self.read_again)

    def start(self) -> None:
        """Begin to read."""
        self._task = asyncio.create_task(self._read_for_ever(), name="read pins")

    def read_again(self) -> None:
        """Read now: something has changed, or may have."""
        self._again.set()

    async def stop(self) -> None:
        """Read no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read_for_ever(self) -> None:
        while True:
            self._again.clear()
            await self._read()
            try:
                await asyncio.wait_for(self._again.wait(), _READ_AGAIN_S)
            except TimeoutError:
                continue

    async def _read(self) -> None:
        try:
            raw = await self._bucket.entries()
        except BucketUnavailable as error:
            if self._was_available:
                log.warning("pinned prefixes cannot be read; those known stay", extra={"error": str(error)})
            self._was_available = False
            return
        self._was_available = True
        if raw != self._raw:
            self._raw = raw
            self._tell(PinsRead(dict(self._decoded(raw))))

    def _decoded(self, raw: Mapping[str, bytes]) -> list[tuple[str, PinnedPrefix]]:
        pins = []
        for name, payload in raw.items():
            try:
                pins.append((name, self._decoder.decode(payload)))
            except MessageError as error:
                log.warning("a pin cannot be read", extra={"pin": name, "error": str(error)})
        return pins


def follow_pins(fleet: Fleet, wanted: Mapping[str, PinnedPrefix], *, shares_prefixes: bool) -> None:
    """Have the fleet pin what is wanted, and nothing else; what it pins already it keeps as it is."""
    for name in [name for name in fleet.pins if name not in wanted]:
        fleet.unpin(name)
    for name, prefix in wanted.items():
        salts = () if shares_prefixes else (("tenant", prefix.tenant),)
        pin = Pin(name, prefix.model, prefix.token_ids, salts, prefix.tenant)
        if fleet.pins.get(name) != pin:
            fleet.pin(pin)
