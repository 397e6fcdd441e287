"""Listening to the beats of a mesh over NATS."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping

from shared import subjects
from shared.codec import Decoder
from shared.errors import MessageError, OperatorError
from shared.log import without_passwords
from shared.messages import Presence
from shared.transport import Transport
from shared.transport.nats import NatsTransport

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def connected(nats_url: str, *, timeout_s: float | None = None) -> AsyncIterator[Transport]:
    """A connection to the mesh's broker, for as long as the context lasts.

    Raises OperatorError if there is none within `timeout_s`, or if that is no address.
    """
    transport = NatsTransport(nats_url, name="shoal")
    try:
        await _connect(transport, nats_url, timeout_s)
        yield transport
    finally:
        await transport.close()


async def _connect(transport: Transport, nats_url: str, timeout_s: float | None) -> None:
    try:
        await asyncio.wait_for(transport.connect(), timeout_s)
    except TimeoutError:
        raise OperatorError(
            f"NATS cannot be reached at {without_passwords(nats_url)}; is a mesh running? start one with `shoal up`"
        ) from None


async def listen(transport: Transport, on_beat: Callable[[Presence], None]) -> None:
    """Have `on_beat` called for each beat."""
    decoder: Decoder[Presence] = Decoder(Presence)

    async def on_message(payload: bytes, _headers: Mapping[str, str]) -> None:
        try:
            on_beat(decoder.decode(payload))
        except MessageError as error:
            log.debug("not a beat", extra={"error": str(error)})

    await transport.subscribe(subjects.PRESENCE, on_message)
