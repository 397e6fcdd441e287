"""Another instance on a broker in memory, played by a test."""

import asyncio
from collections.abc import Mapping
from typing import Any

from shared import subjects
from shared.codec import Decoder
from shared.ids import InstanceId
from shared.messages import Message
from shared.transport.memory import MemoryBroker, MemoryTransport

PATIENCE_S = 30.0


class Peer:
    """Somebody with an inbox."""

    def __init__(self, broker: MemoryBroker, instance_id: InstanceId, inbound: Any) -> None:
        """`inbound` is the union of what it may be sent."""
        self.transport = MemoryTransport(broker)
        self._instance_id = instance_id
        self._decoder: Decoder[Message] = Decoder(inbound)
        self._received: asyncio.Queue[Message] = asyncio.Queue()

    async def connect(self) -> None:
        """Listen."""

        async def receive(payload: bytes, _headers: Mapping[str, str]) -> None:
            self._received.put_nowait(self._decoder.decode(payload))

        await self.transport.connect()
        await self.transport.subscribe(subjects.inbox(self._instance_id), receive)

    async def receive(self) -> Message:
        """The next message, which must come."""
        return await asyncio.wait_for(self._received.get(), PATIENCE_S)
