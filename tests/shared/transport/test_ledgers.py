"""What every ledger promises: one suite for those in memory and those in JetStream of a real server."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator

import nats
import pytest
from nats.js.api import StreamConfig

from shared.errors import LedgerUnavailable, PayloadTooLarge
from shared.transport import Ledger, Transport
from shared.transport.nats import NatsTransport
from tests.conftest import NatsServer
from tests.shared.transport.receiver import PATIENCE_S


@pytest.fixture
async def server_transport(
    private_nats_server: NatsServer, patience_with_jetstream: None
) -> AsyncIterator[NatsTransport]:
    private_nats_server.start()
    transport = NatsTransport(private_nats_server.url, name="test")
    await transport.connect()
    yield transport
    await transport.close()


@pytest.fixture
def name() -> str:
    """A ledger that no other test uses."""
    return f"TEST_{uuid.uuid4().hex}"


@pytest.fixture
def ledger(transport: Transport, name: str) -> Ledger:
    return transport.ledger(name, f"test.{name}")


async def _all(ledger: Ledger, since: float | None = None) -> list[bytes]:
    return [payload async for payload in ledger.entries(since)]


async def test_a_new_ledger_is_empty(ledger: Ledger) -> None:
    assert await _all(ledger) == []


async def test_records_are_kept_in_order_for_everybody(transport: Transport, ledger: Ledger, name: str) -> None:
    sent = [str(number).encode() for number in range(1200)]
    for number, payload in enumerate(sent):
        await ledger.append(f"id-{number}", payload)
    assert await _all(transport.ledger(name, f"test.{name}")) == sent


async def test_a_record_said_again_is_kept_once_as_it_was_first(ledger: Ledger) -> None:
    await ledger.append("a", b"1")
    await ledger.append("b", b"2")
    await ledger.append("a", b"3")
    assert await _all(ledger) == [b"1", b"2"]


async def test_records_that_are_said_at_once_are_all_kept(ledger: Ledger) -> None:
    """The first of them finds no ledger, and so do others that are on their way."""
    await asyncio.gather(*(ledger.append(str(number % 50), str(number % 50).encode()) for number in range(100)))
    assert sorted(await _all(ledger)) == sorted(str(number).encode() for number in range(50))


async def test_ledgers_share_nothing(transport: Transport, ledger: Ledger, name: str) -> None:
    await ledger.append("a", b"1")
    assert await _all(transport.ledger(f"{name}_other", f"test.{name}.other")) == []


async def test_records_from_before_a_moment_are_passed_over(ledger: Ledger) -> None:
    await ledger.append("a", b"1")
    await asyncio.sleep(0.01)  # the server's clock and ours are one, but its times are rounded
    moment = time.time()
    await asyncio.sleep(0.01)
    await ledger.append("b", b"2")
    assert await _all(ledger, moment) == [b"2"]
    assert await _all(ledger, time.time() + 60) == []


async def test_a_record_larger_than_any_message_is_refused_for_good(transport: Transport, ledger: Ledger) -> None:
    with pytest.raises(PayloadTooLarge):
        await ledger.append("a", bytes(transport.max_payload))
    assert await _all(ledger) == []


async def test_without_a_broker_every_call_says_so(ledger: Ledger, transport: Transport) -> None:
    await transport.close()
    with pytest.raises(LedgerUnavailable):
        await ledger.append("a", b"1")
    with pytest.raises(LedgerUnavailable):
        await _all(ledger)


async def test_records_and_the_memory_of_their_ids_outlive_a_killed_server(
    private_nats_server: NatsServer, server_transport: NatsTransport, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = server_transport.ledger(name, f"test.{name}")
    sent = [str(number).encode() for number in range(50)]
    for payload in sent:
        await ledger.append(payload.decode(), payload)
    private_nats_server.stop()
    private_nats_server.start()
    monkeypatch.setattr("shared.transport.jetstream._TIMEOUT_S", 1.0)  # what was lost on the way is said again
    async with asyncio.timeout(PATIENCE_S):
        for payload in sent:
            while True:
                try:
                    await ledger.append(payload.decode(), b"again")
                    break
                except LedgerUnavailable:
                    await asyncio.sleep(0.05)
    monkeypatch.setattr("shared.transport.jetstream._TIMEOUT_S", PATIENCE_S)
    assert await _all(ledger) == sent


async def test_a_server_without_jetstream_is_named_as_the_reason(
    private_nats_server: NatsServer, patience_with_jetstream: None, name: str
) -> None:
    private_nats_server.has_jetstream = False
    private_nats_server.start()
    transport = NatsTransport(private_nats_server.url, name="test")
    await transport.connect()
    ledger = transport.ledger(name, f"test.{name}")
    with pytest.raises(LedgerUnavailable, match="JetStream"):
        await ledger.append("a", b"1")
    with pytest.raises(LedgerUnavailable, match="JetStream"):
        await _all(ledger)
    await transport.close()


async def test_what_an_operator_set_for_the_stream_stands(
    private_nats_server: NatsServer, server_transport: NatsTransport, name: str
) -> None:
    client = await nats.connect(private_nats_server.url)
    own = StreamConfig(name=name, subjects=[f"test.{name}"], max_msgs=2, duplicate_window=7200)
    await client.jetstream().add_stream(own)
    ledger = server_transport.ledger(name, f"test.{name}")
    for number in range(4):
        await ledger.append(str(number), str(number).encode())
    assert await _all(ledger) == [b"2", b"3"]
    config = (await client.jetstream().stream_info(name)).config
    assert (config.max_msgs, config.duplicate_window) == (2, 7200)
    await client.close()


async def test_the_server_remembers_ids_for_an_hour(
    private_nats_server: NatsServer, server_transport: NatsTransport, name: str
) -> None:
    await server_transport.ledger(name, f"test.{name}").append("a", b"1")
    client = await nats.connect(private_nats_server.url)
    assert (await client.jetstream().stream_info(name)).config.duplicate_window == 3600
    await client.close()
