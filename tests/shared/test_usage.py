"""Usage records on their way to the broker: kept once, whatever is lost, refused or restarted on the way."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from shared import subjects
from shared.codec import Decoder
from shared.ids import InstanceId, RequestId
from shared.messages import USAGE_LEDGER, Outcome, Usage, UsageRecord
from shared.transport import Transport
from shared.transport.memory import MemoryBroker, MemoryTransport
from shared.transport.nats import NatsTransport
from shared.usage import UsageOutbox
from tests.conftest import NatsServer
from tests.shared.transport.receiver import PATIENCE_S

NOT_RECORDED = "usage is not recorded at the moment; serving goes on"


def record(number: int, *, tenant: str = "acme", outcome: Outcome = Outcome.COMPLETED) -> UsageRecord:
    usage = Usage(10, 4, (number,))
    return UsageRecord(RequestId(f"req-{number}"), tenant, "tiny", outcome, usage, 1.5, InstanceId("gateway-1"))


async def kept(transport: Transport) -> list[UsageRecord]:
    decoder = Decoder[UsageRecord](UsageRecord)
    ledger = transport.ledger(USAGE_LEDGER, subjects.USAGE)
    return [decoder.decode(payload) async for payload in ledger.entries()]


async def until_recorded(outbox: UsageOutbox) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while outbox.num_unrecorded:  # noqa: ASYNC110  # the broker's acknowledgement sets no event of ours
            await asyncio.sleep(0.01)


@pytest.fixture
async def transport(memory_broker: MemoryBroker) -> AsyncIterator[MemoryTransport]:
    transport = MemoryTransport(memory_broker)
    await transport.connect()
    yield transport
    await transport.close()


@pytest.fixture
async def outbox(transport: MemoryTransport) -> AsyncIterator[UsageOutbox]:
    outbox = UsageOutbox(transport)
    outbox.start()
    yield outbox
    await outbox.stop(within_s=0)


async def test_records_arrive_whole_and_in_order(transport: MemoryTransport, outbox: UsageOutbox) -> None:
    records = [record(number) for number in range(200)]
    for each in records:
        outbox.add(each)
    assert outbox.num_unrecorded == 200
    await until_recorded(outbox)
    assert await kept(transport) == records


async def test_a_lost_acknowledgement_doubles_nothing(
    memory_broker: MemoryBroker, transport: MemoryTransport, outbox: UsageOutbox
) -> None:
    memory_broker.num_acknowledgements_to_lose = 7
    for number in range(5):
        outbox.add(record(number))
    await until_recorded(outbox)
    assert await kept(transport) == [record(number) for number in range(5)]
    assert memory_broker.ledgers[USAGE_LEDGER].num_said > 5, "nothing was said again, so this shows nothing"


async def test_the_first_record_of_a_request_counts(transport: MemoryTransport, outbox: UsageOutbox) -> None:
    outbox.add(record(1))
    outbox.add(record(1, outcome=Outcome.CANCELLED))  # still waits
    await until_recorded(outbox)
    outbox.add(record(1, outcome=Outcome.FAILED))  # is with the broker
    await until_recorded(outbox)
    assert await kept(transport) == [record(1)]


async def test_a_broker_that_keeps_nothing_is_warned_of_once_and_what_is_not_recorded_is_counted(
    memory_broker: MemoryBroker, transport: MemoryTransport, caplog: pytest.LogCaptureFixture
) -> None:
    memory_broker.keeps_records = False
    outbox = UsageOutbox(transport, max_waiting=3)
    outbox.start()
    for number in range(5):
        outbox.add(record(number))
    async with asyncio.timeout(PATIENCE_S):
        while NOT_RECORDED not in caplog.messages:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)  # time for further attempts
    assert caplog.messages.count(NOT_RECORDED) == 1
    assert caplog.messages.count("usage records are being lost: too many wait") == 1
    assert (outbox.num_lost, outbox.num_unrecorded) == (2, 5)
    memory_broker.keeps_records = True
    transport.reconnect()
    async with asyncio.timeout(PATIENCE_S):
        while outbox.num_unrecorded > 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await kept(transport) == [record(number) for number in range(3)]
    await outbox.stop()


async def test_a_record_that_cannot_travel_holds_up_no_other(
    transport: MemoryTransport, outbox: UsageOutbox, caplog: pytest.LogCaptureFixture
) -> None:
    outbox.add(record(1, tenant="x" * transport.max_payload))
    outbox.add(record(2))
    async with asyncio.timeout(PATIENCE_S):
        while outbox.num_unrecorded > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await kept(transport) == [record(2)]
    assert outbox.num_lost == 1


async def test_stopping_hands_over_what_waits(transport: MemoryTransport, outbox: UsageOutbox) -> None:
    for number in range(100):
        outbox.add(record(number))
    await outbox.stop(within_s=PATIENCE_S)
    assert await kept(transport) == [record(number) for number in range(100)]


async def test_stopping_without_a_broker_takes_its_time_and_no_more(
    memory_broker: MemoryBroker, outbox: UsageOutbox, caplog: pytest.LogCaptureFixture
) -> None:
    memory_broker.keeps_records = False
    outbox.add(record(1))
    outbox.add(record(2))
    async with asyncio.timeout(PATIENCE_S):
        await outbox.stop(within_s=0.2)
    assert outbox.num_lost == outbox.num_unrecorded == 2
    (lost,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert vars(lost)["num_lost"] == 2


async def test_every_record_is_kept_once_over_a_broker_that_is_killed_again_and_again(
    private_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    private_nats_server.start()
    transport = NatsTransport(private_nats_server.url, name="test")
    await transport.connect()
    outbox = UsageOutbox(transport)
    outbox.start()
    number = 0
    for _ in range(3):
        for _ in range(40):
            outbox.add(record(number))
            number += 1
            await asyncio.sleep(0.002)
        private_nats_server.stop()
        for _ in range(10):
            outbox.add(record(number))
            number += 1
        private_nats_server.start()
    await until_recorded(outbox)
    monkeypatch.setattr("shared.transport.jetstream._TIMEOUT_S", PATIENCE_S)
    everything = await kept(transport)
    assert sorted(each.usage.num_output_tokens[0] for each in everything) == list(range(number))
    await outbox.stop()
    await transport.close()
