"""Listening to the beats of a mesh over NATS."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from urllib.parse import urlsplit

from shared import subjects
from shared.cli.mesh import readiness
from shared.codec import Decoder
from shared.errors import MessageError, OperatorError
from shared.log import without_passwords
from shared.messages import GatewayStatus, Presence
from shared.transport import Transport
from shared.transport.nats import NatsTransport

log = logging.getLogger(__name__)

_GATEWAY_TIMEOUT_S = 2.0
"""Four beats."""


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


async def find_gateway(nats_url: str, *, timeout_s: float) -> str:
    """The address of a gateway that beats on this NATS server, as it can be reached from this machine.

    Raises OperatorError if there is none, or none whose address is known.
    """
    heard: asyncio.Queue[str] = asyncio.Queue()

    def on_beat(beat: Presence) -> None:
        if isinstance(beat.status, GatewayStatus) and beat.status.address and not beat.is_draining:
            heard.put_nowait(beat.status.address)

    async with connected(nats_url, timeout_s=timeout_s) as transport:
        await listen(transport, on_beat)
        try:
            address = await asyncio.wait_for(heard.get(), _GATEWAY_TIMEOUT_S)
        except TimeoutError:
            raise OperatorError(
                f"no gateway of Shoal beats on the NATS server at {without_passwords(nats_url)}; "
                f"start one, or name another with --url or --port"
            ) from None
    return _from_here(address, nats_url)


def _from_here(address: str, nats_url: str) -> str:
    """A gateway that listens on every address of its machine is reached on the loopback if that is this machine."""
    gateway, broker = urlsplit(address), urlsplit(nats_url if "://" in nats_url else f"nats://{nats_url}")
    host = gateway.hostname or ""
    if readiness.client_host(host) == host:
        return address
    if broker.hostname in ("127.0.0.1", "::1", "localhost"):
        return readiness.address(host, gateway.port or 80)
    raise OperatorError(f"the gateway at {address} does not say on which machine it is; name it with --url")
