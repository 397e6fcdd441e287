"""A broker that takes connections and then hangs keeps nobody: not at the start, not in between, not at the end."""

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.errors import BucketUnavailable, LedgerUnavailable
from shared.transport.connection import Connection
from shared.transport.nats import NatsTransport
from tests.shared.transport.fake_broker import FakeBroker, Manner
from tests.shared.transport.receiver import LITTLE_S, PATIENCE_S, Receiver, settle

PING_INTERVAL_S = 0.2
BAD_MANNERS = [manner for manner in Manner if manner is not Manner.GOOD]


@pytest.fixture(autouse=True)
def impatience(patience: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds in earnest takes tenths here."""
    monkeypatch.setattr("shared.transport.nats._PING_INTERVAL_S", PING_INTERVAL_S)
    monkeypatch.setattr("shared.transport.nats._CONNECT_WITHIN_S", 0.5)


@pytest.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    async with FakeBroker() as broker:
        yield broker


async def until_back(transport: NatsTransport, told: asyncio.Event) -> None:
    await asyncio.wait_for(told.wait(), PATIENCE_S)
    await settle(transport)


@pytest.mark.parametrize("manner", BAD_MANNERS)
async def test_connecting_outlasts_a_broker_that_hangs(broker: FakeBroker, manner: Manner) -> None:
    broker.manner = manner
    transport = NatsTransport(broker.url, name="test")
    connecting = asyncio.create_task(transport.connect())
    await broker.until_connections(2)
    broker.manner = Manner.GOOD
    await asyncio.wait_for(connecting, PATIENCE_S)
    await settle(transport)
    await transport.close()


@pytest.mark.parametrize("manner", BAD_MANNERS)
async def test_reconnecting_outlasts_a_broker_that_hangs(broker: FakeBroker, manner: Manner) -> None:
    transport, receiver, told = NatsTransport(broker.url, name="test"), Receiver(), asyncio.Event()
    await transport.connect()
    await transport.subscribe("orders", receiver)
    transport.on_reconnect(told.set)
    await settle(transport)
    broker.manner = manner
    broker.cut()
    await broker.until_connections(3)
    broker.manner = Manner.GOOD
    broker.cut()
    await until_back(transport, told)
    await transport.publish("orders", b"hello")
    assert await receiver.wait_for(1) == [b"hello"]
    await transport.close()


async def test_a_broker_that_answers_no_ping_counts_as_gone_when_the_third_is_due(broker: FakeBroker) -> None:
    transport = NatsTransport(broker.url, name="test")
    await transport.connect()
    await settle(transport)
    broker.answers_pings = False
    began = time.monotonic()
    await broker.until_connections(2)
    assert broker.num_unanswered_pings == 2
    assert time.monotonic() - began > 2 * PING_INTERVAL_S
    await transport.close()


async def test_a_broker_that_freezes_with_much_unread_is_left_for_another(broker: FakeBroker) -> None:
    async with FakeBroker(Manner.SILENT) as other:
        transport, told = NatsTransport(f"{broker.url},{other.url}", name="test"), asyncio.Event()
        await transport.connect()
        transport.on_reconnect(told.set)
        await settle(transport)
        broker.freeze()
        other.manner = Manner.GOOD
        for _ in range(16):
            await transport.publish("orders", bytes(1 << 20))
        await until_back(transport, told)
        await transport.close()


async def test_closing_gives_a_frozen_broker_little_time(broker: FakeBroker) -> None:
    transport = NatsTransport(broker.url, name="test")
    await transport.connect()
    await settle(transport)
    broker.freeze()
    for _ in range(16):
        await transport.publish("orders", bytes(1 << 20))
    began = time.monotonic()
    await asyncio.wait_for(transport.close(), PATIENCE_S)
    assert time.monotonic() - began < LITTLE_S


async def test_of_several_brokers_one_that_hangs_keeps_nobody_from_the_others(broker: FakeBroker) -> None:
    async with FakeBroker(Manner.SILENT) as silent, FakeBroker(Manner.ONE_PONG) as deaf:
        transport = NatsTransport(",".join([silent.url, deaf.url, broker.url]), name="test")
        await asyncio.wait_for(transport.connect(), PATIENCE_S)
        await settle(transport)
        await transport.close()


async def test_what_is_kept_cannot_be_reached_at_a_frozen_broker_and_that_is_said(broker: FakeBroker) -> None:
    transport = NatsTransport(broker.url, name="test")
    await transport.connect()
    await settle(transport)
    broker.freeze()
    bucket, ledger = transport.bucket("things"), transport.ledger("records", "records.all")
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(BucketUnavailable):
            await bucket.entries()
        with pytest.raises(BucketUnavailable):
            await bucket.put("a", b"b")
        with pytest.raises(LedgerUnavailable):
            await ledger.append("one", b"1")
        with pytest.raises(LedgerUnavailable):
            [record async for record in ledger.entries()]
    await transport.close()


async def test_a_fault_in_what_follows_a_reconnection_costs_nobody_else_the_connection(broker: FakeBroker) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    transport, told = NatsTransport(broker.url, name="test"), asyncio.Event()
    transport.on_reconnect(fail)
    transport.on_reconnect(told.set)
    await transport.connect()
    for _ in range(2):
        await settle(transport)
        broker.cut()
        await until_back(transport, told)
        told.clear()
    await transport.close()


async def test_whatever_goes_wrong_while_connecting_is_tried_again(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, told, faults = NatsTransport(broker.url, name="test"), asyncio.Event(), [AttributeError("no object")]
    opening = transport._open

    async def open_or_fail(server: str) -> Connection:
        if faults:
            raise faults.pop()
        return await opening(server)

    await transport.connect()
    transport.on_reconnect(told.set)
    await settle(transport)
    monkeypatch.setattr(transport, "_open", open_or_fail)
    broker.cut()
    await until_back(transport, told)
    assert not faults
    await transport.close()


async def test_what_waited_and_is_larger_than_the_new_server_takes_goes_alone(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, receiver, told = NatsTransport(broker.url, name="test"), Receiver(), asyncio.Event()
    await transport.connect()
    await transport.subscribe("orders", receiver)
    transport.on_reconnect(told.set)
    await settle(transport)
    broker.manner = Manner.SILENT
    broker.cut()
    await broker.until_connections(2)
    for payload in (b"a", bytes(1000), b"b"):
        await transport.publish("orders", payload)
    monkeypatch.setattr(Connection, "max_payload", 100, raising=False)
    broker.manner = Manner.GOOD
    broker.cut()
    await until_back(transport, told)
    assert await receiver.wait_for(2) == [b"a", b"b"]
    assert transport.num_dropped == 1
    await transport.close()


async def test_a_try_that_ends_after_it_was_given_up_is_nobodys_business(monkeypatch: pytest.MonkeyPatch) -> None:
    complaints: list[dict[str, Any]] = []
    loop, may_end = asyncio.get_running_loop(), asyncio.Event()
    loop.set_exception_handler(lambda _loop, context: complaints.append(context))

    async def connect(*_arguments: Any, **_options: Any) -> None:
        while not may_end.is_set():
            with contextlib.suppress(asyncio.CancelledError):  # as nats-py does now and then
                await may_end.wait()
        raise TimeoutError

    async def ignore(_error: Exception) -> None:
        pass

    monkeypatch.setattr("shared.transport.connection._GIVEN_UP_WITHIN_S", 0.01)
    monkeypatch.setattr(Connection, "connect", connect)
    with pytest.raises(TimeoutError, match="no answer within"):
        await Connection.open(
            "nats://127.0.0.1:1", within_s=0.01, name="test", answers_under="_", ping_interval_s=1, on_error=ignore
        )
    may_end.set()
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()  # asyncio complains when the task goes
    assert complaints == []
