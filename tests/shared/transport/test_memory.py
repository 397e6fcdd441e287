"""What only the transport in memory can do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import PayloadTooLarge
from shared.transport.memory import MemoryBroker, MemoryTransport, matches
from tests.shared.transport.receiver import Receiver

TOKENS = st.text("abc", min_size=1, max_size=2)
SUBJECTS = st.lists(TOKENS, min_size=1, max_size=4).map(".".join)


async def test_a_pretended_reconnection_calls_every_listener(memory_broker: MemoryBroker) -> None:
    transport, calls = MemoryTransport(memory_broker), list[str]()
    transport.on_reconnect(lambda: calls.append("first"))
    transport.on_reconnect(lambda: calls.append("second"))
    await transport.connect()
    assert calls == []
    transport.reconnect()
    assert calls == ["first", "second"]


async def test_the_largest_payload_is_the_brokers() -> None:
    transport = MemoryTransport(MemoryBroker(max_payload=10))
    await transport.connect()
    assert transport.max_payload == 10
    with pytest.raises(PayloadTooLarge):
        await transport.publish("a", b"x" * 11)


async def test_unsubscribing_forgets_the_subscription(memory_broker: MemoryBroker) -> None:
    transport, receiver = MemoryTransport(memory_broker), Receiver()
    await transport.connect()
    for _ in range(3):
        subscription = await transport.subscribe("a", receiver)
        await subscription.unsubscribe()
        await subscription.unsubscribe()
    await transport.publish("a", b"late")
    await transport.close()
    assert receiver.payloads == []


@given(SUBJECTS)
def test_a_subject_matches_itself_and_every_pattern_made_from_it(subject: str) -> None:
    tokens = subject.split(".")
    assert matches(subject, subject)
    assert matches(">", subject)
    for position in range(len(tokens)):
        assert matches(".".join([*tokens[:position], "*", *tokens[position + 1 :]]), subject)
        assert matches(".".join([*tokens[:position], ">"]), subject)
    assert not matches(f"{subject}.>", subject)
    assert not matches(f"{subject}.*", subject)


@given(SUBJECTS, SUBJECTS)
def test_a_pattern_without_wildcards_matches_only_itself(pattern: str, subject: str) -> None:
    assert matches(pattern, subject) == (pattern == subject)
