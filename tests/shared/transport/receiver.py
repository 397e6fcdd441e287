"""What the transport tests listen with."""

import asyncio
import uuid
from collections.abc import Mapping

from shared.transport import Transport

PATIENCE_S = 40.0
"""How long a test waits for what must happen; only a failing test waits that long."""
LITTLE_S = 8.0
"""More than anything takes that does not wait for a server, on a busy machine too; less than nats-py waits for one."""


class Receiver:
    """A handler that keeps what it gets."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self._arrived = asyncio.Condition()

    async def __call__(self, payload: bytes, headers: Mapping[str, str]) -> None:
        async with self._arrived:
            self.payloads.append(payload)
            self.headers.append(dict(headers))
            self._arrived.notify_all()

    async def wait_for(self, count: int) -> list[bytes]:
        """The payloads, once there are `count` of them. Fails with what did arrive."""
        try:
            async with asyncio.timeout(PATIENCE_S), self._arrived:
                await self._arrived.wait_for(lambda: len(self.payloads) >= count)
        except TimeoutError:
            raise AssertionError(f"{len(self.payloads)} of {count} arrived: {self.payloads[-5:]}") from None
        return self.payloads


class Gate(Receiver):
    """A receiver that is too slow: it keeps each message, then waits until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = asyncio.Event()

    async def __call__(self, payload: bytes, headers: Mapping[str, str]) -> None:
        await super().__call__(payload, headers)
        await self.is_open.wait()


async def settle(transport: Transport) -> None:
    """Return when all that this transport asked of the broker so far has been done, and what it was sent is here."""
    echo, subject = Receiver(), f"settle.{uuid.uuid4().hex}"
    subscription = await transport.subscribe(subject, echo)
    await transport.publish(subject, b"")
    await echo.wait_for(1)
    await subscription.unsubscribe()
