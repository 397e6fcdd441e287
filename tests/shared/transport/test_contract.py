"""What every transport promises: one suite for the one in memory and the one over a real NATS server."""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from shared.errors import Disconnected, PayloadTooLarge
from shared.transport import Traffic, Transport
from shared.transport.memory import MemoryBroker, MemoryTransport
from shared.transport.nats import NatsTransport
from tests.shared.transport.receiver import PATIENCE_S, Gate, Receiver, settle

Make = Callable[[], Transport]
Join = Callable[[], Awaitable[Transport]]


@pytest.fixture(params=["memory", "nats"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes transports of one mesh, not yet connected."""
    if request.param == "memory":
        broker = MemoryBroker()
        return lambda: MemoryTransport(broker)
    url = request.getfixturevalue("nats_url")
    return lambda: NatsTransport(url, name="test")


@pytest.fixture
async def join(make: Make) -> AsyncIterator[Join]:
    """Makes connected transports of one mesh, and closes them."""
    async with AsyncExitStack() as stack:

        async def join() -> Transport:
            transport = make()
            await transport.connect()
            stack.push_async_callback(transport.close)
            return transport

        yield join


@pytest.fixture
def subject() -> str:
    """A subject that no other test uses."""
    return f"test.{uuid.uuid4().hex}"


async def test_messages_of_one_sender_arrive_complete_and_in_order(join: Join, subject: str) -> None:
    sender, listener, receiver = await join(), await join(), Receiver()
    await listener.subscribe(subject, receiver)
    await settle(listener)
    sent = [str(number).encode() for number in range(1000)]
    for payload in sent:
        await sender.publish(subject, payload)
    assert await receiver.wait_for(1000) == sent


@pytest.mark.parametrize("payload", [b"", b"\r\nPUB x 0\r\n", bytes(range(256)), b"\x00" * 100_000], ids=len)
async def test_any_bytes_arrive_as_they_were(join: Join, subject: str, payload: bytes) -> None:
    transport, receiver = await join(), Receiver()
    await transport.subscribe(subject, receiver)
    await transport.publish(subject, payload)
    assert await receiver.wait_for(1) == [payload]


async def test_every_subscriber_gets_every_message_the_sender_too(join: Join, subject: str) -> None:
    transports, receivers = [await join() for _ in range(3)], [Receiver() for _ in range(3)]
    for transport, receiver in zip(transports, receivers, strict=True):
        await transport.subscribe(subject, receiver)
        await settle(transport)
    await transports[0].publish(subject, b"hello")
    for receiver in receivers:
        assert await receiver.wait_for(1) == [b"hello"]


async def test_what_is_sent_and_received_is_counted(join: Join, subject: str) -> None:
    sender, listener, receiver = await join(), await join(), Receiver()
    await listener.subscribe(subject, receiver)
    await settle(listener)
    settled = replace(listener.traffic)
    for payload in (b"", b"abc", b"defgh"):
        await sender.publish(subject, payload, {"a": "b"})
    with pytest.raises(PayloadTooLarge):
        await sender.publish(subject, b"x" * (sender.max_payload + 1))
    await receiver.wait_for(3)
    assert sender.traffic == Traffic(num_sent=3, bytes_sent=8)
    assert listener.traffic.num_received - settled.num_received == 3
    assert listener.traffic.bytes_received - settled.bytes_received == 8
    assert listener.traffic.num_sent == settled.num_sent


async def test_messages_without_a_subscriber_are_gone(join: Join, subject: str) -> None:
    sender, listener, receiver = await join(), await join(), Receiver()
    await sender.publish(subject, b"early")
    await settle(sender)
    await listener.subscribe(subject, receiver)
    await settle(listener)
    await sender.publish(subject, b"late")
    assert await receiver.wait_for(1) == [b"late"]


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("a.b", ["a.b"], ["a", "a.b.c", "a.c", "A.b"]),
        ("a.*", ["a.b", "a.c"], ["a", "a.b.c", "b.a"]),
        ("*.b", ["a.b", "x.b"], ["a.c", "b", "a.a.b"]),
        ("a.*.c", ["a.b.c"], ["a.b.d", "a.c", "a.b.b.c"]),
        ("a.>", ["a.b", "a.b.c.d"], ["a", "b.a"]),
        ("*.b.>", ["a.b.c", "x.b.c.d"], ["a.b", "a.c.b"]),
    ],
)
async def test_wildcards(join: Join, subject: str, pattern: str, matching: list[str], other: list[str]) -> None:
    transport, receiver = await join(), Receiver()
    await transport.subscribe(f"{subject}.{pattern}", receiver)
    for suffix in [*other, *matching]:
        await transport.publish(f"{subject}.{suffix}", suffix.encode())
    await settle(transport)
    assert receiver.payloads == [suffix.encode() for suffix in matching]


async def test_a_queue_group_shares_messages_and_others_get_them_all(join: Join, subject: str) -> None:
    sender, members, rivals, plain = await join(), [Receiver() for _ in range(3)], [Receiver(), Receiver()], Receiver()
    for receiver, queue in [*((m, "members") for m in members), *((r, "rivals") for r in rivals), (plain, "")]:
        listener = await join()
        await listener.subscribe(subject, receiver, queue=queue)
        await settle(listener)
    sent = [str(number).encode() for number in range(300)]
    for payload in sent:
        await sender.publish(subject, payload)
    await plain.wait_for(300)
    for group in (members, rivals):
        while sum(len(receiver.payloads) for receiver in group) < 300:
            await asyncio.wait_for(asyncio.sleep(0.001), PATIENCE_S)
        assert Counter(payload for receiver in group for payload in receiver.payloads) == Counter(sent)
        # Of 300 fair draws a member of three gets 100 on average, with a deviation of 8.
        assert all(len(receiver.payloads) > 50 for receiver in group)


async def test_the_largest_payload_arrives_and_one_byte_more_is_refused(join: Join, subject: str) -> None:
    transport, receiver = await join(), Receiver()
    await transport.subscribe(subject, receiver)
    assert transport.max_payload == 1 << 20
    with pytest.raises(PayloadTooLarge) as caught:
        await transport.publish(subject, b"x" * (transport.max_payload + 1))
    assert (caught.value.size, caught.value.limit) == ((1 << 20) + 1, 1 << 20)
    await transport.publish(subject, b"x" * transport.max_payload)
    assert len((await receiver.wait_for(1))[0]) == 1 << 20


async def test_headers_count_against_the_largest_payload(join: Join, subject: str) -> None:
    """The server cuts the connection of a client that forgets them."""
    transport, receiver = await join(), Receiver()
    await transport.subscribe(subject, receiver)
    headers, num_header_bytes = {"trace": "1234"}, len("NATS/1.0\r\ntrace: 1234\r\n\r\n")
    with pytest.raises(PayloadTooLarge):
        await transport.publish(subject, b"x" * (transport.max_payload - num_header_bytes + 1), headers)
    await transport.publish(subject, b"x" * (transport.max_payload - num_header_bytes), headers)
    await receiver.wait_for(1)
    assert transport.is_connected


async def test_headers_arrive(join: Join, subject: str) -> None:
    transport, receiver = await join(), Receiver()
    await transport.subscribe(subject, receiver)
    await transport.publish(subject, b"a", {"traceparent": "00-abc-def-01", "other": "x y"})
    await transport.publish(subject, b"b")
    await transport.publish(subject, b"c", {})
    await receiver.wait_for(3)
    assert receiver.headers == [{"traceparent": "00-abc-def-01", "other": "x y"}, {}, {}]


async def test_unsubscribing_ends_one_subscription_and_no_other(join: Join, subject: str) -> None:
    transport, ended, other = await join(), Receiver(), Receiver()
    subscription = await transport.subscribe(subject, ended)
    await transport.subscribe(subject, other)
    await transport.publish(subject, b"before")
    await ended.wait_for(1)
    await subscription.unsubscribe()
    await transport.publish(subject, b"after")
    assert await other.wait_for(2) == [b"before", b"after"]
    await settle(transport)
    assert ended.payloads == [b"before"]


async def test_unsubscribing_again_or_after_closing_does_nothing(make: Make, subject: str) -> None:
    transport = make()
    await transport.connect()
    first, second = await transport.subscribe(subject, Receiver()), await transport.subscribe(subject, Receiver())
    await first.unsubscribe()
    await first.unsubscribe()
    await transport.close()
    await second.unsubscribe()


async def test_messages_of_one_subscription_never_overlap(join: Join, subject: str) -> None:
    transport, gate = await join(), Gate()
    await transport.subscribe(subject, gate)
    for payload in (b"1", b"2"):
        await transport.publish(subject, payload)
    await settle(transport)
    assert gate.payloads == [b"1"]
    gate.is_open.set()
    assert await gate.wait_for(2) == [b"1", b"2"]


async def test_a_slow_handler_holds_up_no_other_subscription(join: Join, subject: str) -> None:
    transport, gate, receiver = await join(), Gate(), Receiver()
    await transport.subscribe(subject, gate)
    await transport.subscribe(subject, receiver)
    for payload in (b"1", b"2"):
        await transport.publish(subject, payload)
    assert await receiver.wait_for(2) == [b"1", b"2"]
    gate.is_open.set()


async def test_a_handler_too_slow_loses_the_newest_messages_and_they_are_counted(
    join: Join, subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("memory", "nats"):
        monkeypatch.setattr(f"shared.transport.{module}._MAX_UNHANDLED_MESSAGES", 10)
    transport, gate = await join(), Gate()
    await transport.subscribe(subject, gate)
    await transport.publish(subject, b"0")
    await gate.wait_for(1)
    for number in range(1, 50):
        await transport.publish(subject, str(number).encode())
    await settle(transport)
    assert transport.num_dropped == 39
    gate.is_open.set()
    assert await gate.wait_for(11) == [str(number).encode() for number in range(11)]
    await transport.publish(subject, b"later")
    assert (await gate.wait_for(12))[-1] == b"later"
    assert transport.num_dropped == 39


async def test_a_handler_that_raises_is_logged_and_the_next_message_comes(
    join: Join, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    transport, receiver = await join(), Receiver()

    async def fail_first(payload: bytes, headers: Mapping[str, str]) -> None:
        await receiver(payload, headers)
        if payload == b"1":
            raise ValueError("no")

    await transport.subscribe(subject, fail_first)
    with caplog.at_level(logging.ERROR):
        for payload in (b"1", b"2"):
            await transport.publish(subject, payload)
        assert await receiver.wait_for(2) == [b"1", b"2"]
    assert [record.getMessage() for record in caplog.records] == ["a handler failed"]


async def test_connected_is_what_lies_between_connect_and_close(make: Make, subject: str) -> None:
    transport = make()
    states = [transport.is_connected]
    with pytest.raises(Disconnected):
        await transport.publish(subject, b"early")
    await transport.connect()
    states.append(transport.is_connected)
    await transport.close()
    states.append(transport.is_connected)
    assert states == [False, True, False]
    with pytest.raises(Disconnected):
        await transport.publish(subject, b"late")


async def test_a_transport_that_never_connected_can_be_closed(make: Make) -> None:
    await make().close()


async def test_closing_twice_is_closing_once(make: Make) -> None:
    transport = make()
    await transport.connect()
    await transport.close()
    await transport.close()


async def test_closing_first_sends_what_was_published(
    make: Make, join: Join, subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.transport.nats._CLOSE_WITHIN_S", PATIENCE_S)
    listener, receiver, sender = await join(), Receiver(), make()
    await listener.subscribe(subject, receiver)
    await settle(listener)
    await sender.connect()
    sent = [str(number).encode() * 100 for number in range(1000)]
    for payload in sent:
        await sender.publish(subject, payload)
    await sender.close()
    assert await receiver.wait_for(1000) == sent


async def test_after_closing_nothing_is_delivered(join: Join, make: Make, subject: str) -> None:
    sender, listener, receiver = await join(), make(), Receiver()
    await listener.connect()
    await listener.subscribe(subject, receiver)
    await settle(listener)
    await listener.close()
    await sender.publish(subject, b"late")
    await settle(sender)
    assert receiver.payloads == []


async def test_many_messages_from_many_senders_all_arrive(join: Join, subject: str) -> None:
    listener, receiver = await join(), Receiver()
    await listener.subscribe(f"{subject}.*", receiver)
    await settle(listener)

    async def send(name: str) -> None:
        sender = await join()
        for number in range(5000):
            await sender.publish(f"{subject}.{name}", f"{name}{number}".encode())
            if number % 100 == 0:
                await asyncio.sleep(0)

    await asyncio.gather(*(send(name) for name in "abcd"))
    payloads = await receiver.wait_for(20_000)
    assert listener.num_dropped == 0
    for name in "abcd":
        from_one = [payload for payload in payloads if payload.startswith(name.encode())]
        assert from_one == [f"{name}{number}".encode() for number in range(5000)]
