"""What happens to the transport over NATS when the server is late, restarts, freezes or is not there."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise

import pytest
from nats.errors import BadSubjectError

from shared.cli.mesh.ports import free_port
from shared.errors import BucketUnavailable, ConfigError, Disconnected, PayloadTooLarge
from shared.transport.nats import NatsTransport
from tests.conftest import NatsServer
from tests.shared.transport.fake_broker import FakeBroker
from tests.shared.transport.receiver import LITTLE_S, PATIENCE_S, Gate, Receiver, settle


class _Events(logging.Handler):
    """What the transport logs, as something to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.moments: list[float] = []
        """When, by the loop's clock."""
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())
        self.moments.append(asyncio.get_running_loop().time())
        task = asyncio.get_running_loop().create_task(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def wait_for(self, event: str, times: int = 1) -> None:
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: self.seen.count(event) >= times)


@pytest.fixture
async def events() -> AsyncIterator[_Events]:
    handler, logger = _Events(), logging.getLogger("shared.transport.nats")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def server(private_nats_server: NatsServer) -> Iterator[NatsServer]:
    private_nats_server.start()
    yield private_nats_server
    with contextlib.suppress(AssertionError):
        private_nats_server.thaw()


@contextlib.asynccontextmanager
async def _connected(url: str) -> AsyncIterator[NatsTransport]:
    transport = NatsTransport(url, name="test")
    try:
        await asyncio.wait_for(transport.connect(), PATIENCE_S)
        yield transport
    finally:
        await transport.close()


UNREACHABLE = "NATS cannot be reached; trying until it can"
LOST = "lost the connection to NATS"
REFUSED = "NATS refused something and closed the connection; opening another"
AGAIN = "connected to NATS again"


async def test_connecting_waits_for_a_server_that_is_not_there_yet(
    private_nats_server: NatsServer, events: _Events
) -> None:
    transport = NatsTransport(private_nats_server.url, name="test")
    connecting = asyncio.create_task(transport.connect())
    await events.wait_for(UNREACHABLE)
    done, _ = await asyncio.wait({connecting}, timeout=1.0)  # time for several more attempts
    assert not done
    private_nats_server.start()
    await asyncio.wait_for(connecting, PATIENCE_S)
    assert transport.is_connected
    assert events.seen.count(UNREACHABLE) == 1
    await settle(transport)
    await transport.close()


async def test_messages_published_while_the_server_is_away_arrive_after_its_restart(
    server: NatsServer, events: _Events
) -> None:
    # The sender listens itself: a listener of its own might be back later than the messages, and so miss them.
    async with _connected(server.url) as transport:
        receiver = Receiver()
        await transport.subscribe("orders", receiver)
        await settle(transport)
        server.stop()
        await events.wait_for(LOST)
        sent = [str(number).encode() for number in range(100)]
        for payload in sent:
            await transport.publish("orders", payload)
        server.start()
        assert await receiver.wait_for(100) == sent


async def test_subscriptions_live_on_and_listeners_are_told_after_a_restart(
    server: NatsServer, events: _Events
) -> None:
    async with _connected(server.url) as transport:
        receiver, told = Receiver(), asyncio.Event()
        await transport.subscribe("orders", receiver)
        transport.on_reconnect(told.set)
        await settle(transport)
        assert not told.is_set()
        for payload in (b"first", b"second"):
            server.stop()
            server.start()
            await asyncio.wait_for(told.wait(), PATIENCE_S)
            told.clear()
            await transport.publish("orders", payload)
            await receiver.wait_for(2 if payload == b"second" else 1)
        assert receiver.payloads == [b"first", b"second"]
        assert events.seen.count(LOST) == events.seen.count(AGAIN) == 2


async def test_publishing_is_refused_when_the_buffer_for_unsent_messages_is_full(
    server: NatsServer, events: _Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.transport.nats._MAX_UNSENT_BYTES", 10_000)
    async with _connected(server.url) as transport:
        server.stop()
        await events.wait_for(LOST)
        for _ in range(9):
            await transport.publish("orders", b"x" * 1000)
        with pytest.raises(Disconnected):
            await transport.publish("orders", b"x" * 1000)


async def test_closing_while_the_server_is_away_takes_no_time(server: NatsServer, events: _Events) -> None:
    async with _connected(server.url) as transport:
        server.stop()
        await events.wait_for(LOST)
        await transport.publish("orders", b"never")
        await asyncio.wait_for(transport.close(), LITTLE_S)
        assert not transport.is_connected


async def test_a_connection_attempt_can_be_given_up(private_nats_server: NatsServer, events: _Events) -> None:
    transport = NatsTransport(private_nats_server.url, name="test")
    connecting = asyncio.create_task(transport.connect())
    await events.wait_for(UNREACHABLE)
    connecting.cancel()
    await asyncio.wait({connecting}, timeout=PATIENCE_S)
    await asyncio.wait_for(transport.close(), LITTLE_S)
    assert connecting.cancelled()


async def test_a_frozen_server_counts_as_gone(
    server: NatsServer, events: _Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.transport.nats._PING_INTERVAL_S", 0.5)
    async with _connected(server.url) as transport:
        server.freeze()
        await events.wait_for(LOST)
        assert not transport.is_connected
        monkeypatch.setattr("shared.transport.nats._PING_INTERVAL_S", 3600.0)
        server.thaw()
        await events.wait_for(AGAIN)
        await settle(transport)


async def test_an_error_that_the_server_reports_does_not_end_the_connection_for_good(events: _Events) -> None:
    async with FakeBroker() as broker, _connected(broker.url) as transport:
        receiver, ended, told = Receiver(), Receiver(), asyncio.Event()
        await transport.subscribe("orders", receiver)
        await (await transport.subscribe("orders", ended)).unsubscribe()
        transport.on_reconnect(told.set)
        await settle(transport)
        broker.say("-ERR 'Unknown Protocol Operation'")
        await asyncio.wait_for(told.wait(), PATIENCE_S)
        await transport.publish("orders", b"hello")
        assert await receiver.wait_for(1) == [b"hello"]
        await settle(transport)
        assert ended.payloads == []
        assert events.seen == [REFUSED, AGAIN]


async def test_what_one_subject_is_refused_for_is_said_and_the_connection_stays(events: _Events) -> None:
    async with FakeBroker() as broker, _connected(broker.url) as transport:
        await settle(transport)
        broker.say("-ERR 'Permissions Violation for Publish to \"orders\"'")
        await settle(transport)
        assert events.seen == ["NATS error"]
        assert broker.num_connections == 1


async def test_subscriptions_made_while_the_server_is_away_count_from_its_return(
    server: NatsServer, events: _Events
) -> None:
    async with _connected(server.url) as transport:
        server.stop()
        await events.wait_for(LOST)
        receiver, ended = Receiver(), Receiver()
        await transport.subscribe("orders", receiver)
        await (await transport.subscribe("orders", ended)).unsubscribe()
        await transport.publish("orders", b"hello")
        server.start()
        assert await receiver.wait_for(1) == [b"hello"]
        await settle(transport)
        assert ended.payloads == []


async def test_a_subject_that_is_none_is_refused_and_spoils_no_later_connection(
    server: NatsServer, events: _Events
) -> None:
    async with _connected(server.url) as transport:
        with pytest.raises(BadSubjectError):
            await transport.subscribe("no subject", Receiver())
        server.stop()
        server.start()
        await events.wait_for(AGAIN)
        await settle(transport)


async def test_of_several_servers_any_will_do(server: NatsServer) -> None:
    async with _connected(f"nats://127.0.0.1:{free_port()}, {server.url}") as transport:
        await settle(transport)


async def test_answers_come_back_where_the_server_lets_this_user_listen(
    private_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.transport.jetstream._TIMEOUT_S", PATIENCE_S)
    private_nats_server.config = """
        authorization { users: [{ user: me, password: mine, permissions: {
            publish: [orders, "$JS.API.>", "$KV.>"], subscribe: ["_INBOX.mine.>"] } }] }
    """
    private_nats_server.start()
    url = private_nats_server.url.replace("://", "://me:mine@")
    transport = NatsTransport(url, name="test", answers_under="_INBOX.mine")
    await transport.connect()
    await transport.bucket("things").put("one", b"1")
    assert await transport.bucket("things").entries() == {"one": b"1"}
    await transport.close()

    monkeypatch.setattr("shared.transport.jetstream._TIMEOUT_S", 0.5)  # no answer will come
    stranger = NatsTransport(url, name="test")
    await stranger.connect()
    with pytest.raises(BucketUnavailable):
        await stranger.bucket("things").entries()
    await stranger.close()


async def test_the_largest_payload_is_the_servers(private_nats_server: NatsServer) -> None:
    private_nats_server.config = "max_payload: 2048"
    private_nats_server.start()
    async with _connected(private_nats_server.url) as transport:
        assert transport.max_payload == 2048
        with pytest.raises(PayloadTooLarge):
            await transport.publish("orders", b"x" * 2049)
        await transport.publish("orders", b"x" * 2048)
        await settle(transport)


async def test_a_wrong_password_is_said_once_and_never_shown(
    private_nats_server: NatsServer, events: _Events, caplog: pytest.LogCaptureFixture
) -> None:
    private_nats_server.config = "authorization { user: me, password: right }"
    private_nats_server.start()
    url = private_nats_server.url.replace("://", "://me:hunter2@")
    transport = NatsTransport(url, name="test")
    connecting = asyncio.create_task(transport.connect())
    await events.wait_for(UNREACHABLE)
    await asyncio.wait({connecting}, timeout=1.0)  # time for several more attempts
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
    await transport.close()
    reasons = [vars(record)["error"] for record in caplog.records]
    assert any("Authorization" in reason for reason in reasons)
    assert len(set(reasons)) == len(reasons)
    assert not any("hunter2" in str(vars(record)) for record in caplog.records)


@pytest.mark.parametrize("url", ["", "nats://", "nats://me:hunter2@host:99999", "ws://a:1,nats://b:1"])
async def test_what_is_no_address_is_refused_in_a_sentence(url: str) -> None:
    transport = NatsTransport(url, name="test")
    with pytest.raises(ConfigError, match="is not the address of a NATS server") as caught:
        await transport.connect()
    assert "hunter2" not in str(caught.value)
    await transport.close()


async def test_dropped_messages_are_counted_each_but_logged_once_a_second(
    nats_url: str, events: _Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.transport.nats._MAX_UNHANDLED_MESSAGES", 1)
    monkeypatch.setattr("shared.transport.nats._DROP_WARNING_INTERVAL_S", 3600.0)
    async with _connected(nats_url) as transport:
        gate = Gate()
        await transport.subscribe("slow.logged", gate)
        await transport.publish("slow.logged", b"0")
        await gate.wait_for(1)
        for _ in range(100):
            await transport.publish("slow.logged", b"x")
        await settle(transport)
        assert transport.num_dropped == 99
        assert events.seen == ["dropping messages: a handler is too slow"]
        gate.is_open.set()


async def test_a_server_that_refuses_again_and_again_is_asked_ever_less_often(
    private_nats_server: NatsServer, events: _Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.transport.nats._RECONNECT_WAIT_S", 0.125)
    monkeypatch.setattr("shared.transport.nats._SETTLED_AFTER_S", 3600.0)
    private_nats_server.config = "max_subscriptions: 1"
    private_nats_server.start()
    transport = NatsTransport(private_nats_server.url, name="tester")
    await transport.connect()
    await transport.subscribe("orders.one", Receiver())
    await transport.subscribe("orders.two", Receiver())  # one more than the server takes
    await events.wait_for(REFUSED, times=5)
    await transport.close()
    moments = [moment for event, moment in zip(events.seen, events.moments, strict=True) if event == REFUSED]
    pauses = [later - earlier for earlier, later in pairwise(moments)]
    assert all(pause > least for pause, least in zip(pauses, (0.125, 0.25, 0.5, 1.0), strict=False)), pauses
