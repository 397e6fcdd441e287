"""The detokenizer as its peers see it: batches in, one message for each gateway out, and it forgets who is gone."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from services.detokenizer.service import DetokenizerService
from shared import subjects
from shared.actor import Identity, Tick
from shared.clock import FakeClock
from shared.codec import encode
from shared.ids import InstanceId, RequestId, Service
from shared.messages import (
    ChoiceTokens,
    DecodeTokens,
    DetokenizerStatus,
    FinishReason,
    GatewayInbound,
    GatewayStatus,
    Message,
    Outcome,
    Presence,
    RequestClosed,
    RequestOpened,
    SchedulerInbound,
    SchedulerStatus,
    StopStringFound,
    TextOptions,
    TextProduced,
    Usage,
    int32s,
)
from shared.presence import DEAD_AFTER_S
from shared.transport.memory import MemoryBroker, MemoryTransport
from tests import peers
from tests.detokenizer.vocabularies import Case

ME = Identity(Service.DETOKENIZER, InstanceId("detokenizer-1"), "detokenizer-1")
SCHEDULER, GATEWAY, OTHER = InstanceId("scheduler-1"), InstanceId("gateway-1"), InstanceId("gateway-2")
TIMEOUT_S = 30
PLAIN = TextOptions()


class Peer(peers.Peer):
    """Somebody who talks to the service."""

    async def send(self, message: Message) -> None:
        """Send to the detokenizer."""
        await self.transport.publish(subjects.inbox(ME.instance_id), encode(message))

    async def receive_texts(self) -> TextProduced:
        """The next message, which must be of text."""
        message = await self.receive()
        assert isinstance(message, TextProduced)
        return message

    def has_received(self) -> bool:
        """Whether a message waits."""
        return not self._received.empty()


class Mesh:
    """A detokenizer among peers."""

    def __init__(self, case: Case, max_payload: int = 1 << 20) -> None:
        self.case = case
        broker = MemoryBroker(max_payload=max_payload)
        self.clock = FakeClock(100.0)
        self.transport = MemoryTransport(broker)
        self.service = DetokenizerService(
            ME, self.transport, self.clock, model="m", decoding=case.decoding, max_open_choices=10, max_silence_s=60.0
        )
        self.scheduler = Peer(broker, SCHEDULER, SchedulerInbound)
        self.gateway = Peer(broker, GATEWAY, GatewayInbound)
        self.other_gateway = Peer(broker, OTHER, GatewayInbound)

    @asynccontextmanager
    async def started(self, *, is_running: bool = True) -> AsyncIterator[asyncio.Task[None] | None]:
        """The detokenizer is there, and handles messages if it `is_running`."""
        for peer in (self.scheduler, self.gateway, self.other_gateway):
            await peer.connect()
        await self.transport.connect()
        async with self.service:
            running = asyncio.create_task(self.service.run()) if is_running else None
            yield running
            if running is not None:
                self.service.drain(0)
                await asyncio.wait_for(running, TIMEOUT_S)

    def entry(self, name: str, offset: int, words: str, reason: FinishReason | None = None) -> ChoiceTokens:
        """Entries of the only choice's log."""
        token_ids = int32s(self.case.id_of(word) for word in words.split())
        return ChoiceTokens(RequestId(name), 0, offset, token_ids, reason)


def opened(name: str, gateway_id: InstanceId = GATEWAY, text: TextOptions = PLAIN) -> RequestOpened:
    return RequestOpened(RequestId(name), SCHEDULER, gateway_id, "m", text, 1)


def closed(name: str, num_tokens: int) -> RequestClosed:
    return RequestClosed(RequestId(name), Outcome.COMPLETED, Usage(1, 0, (num_tokens,)))


def gateway_beat(instance_id: InstanceId, *, is_leaving: bool = False) -> Presence:
    return Presence(Service.GATEWAY, instance_id, "g", (), GatewayStatus(""), is_leaving=is_leaving)


def scheduler_beat(*, is_leaving: bool = False) -> Presence:
    return Presence(Service.SCHEDULER, SCHEDULER, "s", ("m",), SchedulerStatus(), is_leaving=is_leaving)


@pytest.fixture
def mesh(case_of: Callable[[str], Case]) -> Mesh:
    return Mesh(case_of("byte level"))


async def test_tokens_become_text_at_the_gateway(mesh: Mesh) -> None:
    async with mesh.started():
        await mesh.scheduler.send(DecodeTokens(SCHEDULER, (opened("a"),), (mesh.entry("a", 0, "the Ġcat"),)))
        assert [text.text for text in (await mesh.gateway.receive_texts()).texts] == ["the cat"]
        last = mesh.entry("a", 2, "<|im_end|>", FinishReason.STOP)
        await mesh.scheduler.send(DecodeTokens(SCHEDULER, (), (last,), (closed("a", 3),)))
        produced = await mesh.gateway.receive_texts()
        assert [(text.text, text.finish_reason) for text in produced.texts] == [("", FinishReason.STOP)]
        assert produced.closed == (closed("a", 3),)
        assert mesh.service.status() == DetokenizerStatus(0, 3)


async def test_a_stop_string_goes_back_to_the_scheduler(mesh: Mesh) -> None:
    async with mesh.started():
        text = TextOptions(stop=(" ca",))
        await mesh.scheduler.send(DecodeTokens(SCHEDULER, (opened("a", text=text),), (mesh.entry("a", 0, "the Ġcat"),)))
        assert await mesh.scheduler.receive() == StopStringFound(RequestId("a"), 0, 2)
        assert [text.text for text in (await mesh.gateway.receive_texts()).texts] == ["the"]


async def test_what_arrives_together_leaves_together_and_one_gateway_gets_nothing_of_the_other(mesh: Mesh) -> None:
    async with mesh.started(is_running=False):
        both = (opened("a"), opened("b", OTHER), opened("c"))
        mesh.service.post(DecodeTokens(SCHEDULER, both, (mesh.entry("a", 0, "the"), mesh.entry("b", 0, "the"))))
        mesh.service.post(DecodeTokens(SCHEDULER, (), (mesh.entry("a", 1, "Ġcat"), mesh.entry("c", 0, "dog"))))
        running = asyncio.create_task(mesh.service.run())
        produced = await mesh.gateway.receive_texts()
        assert [(text.request_id, text.text) for text in produced.texts] == [("a", "the"), ("a", " cat"), ("c", "dog")]
        assert [text.request_id for text in (await mesh.other_gateway.receive_texts()).texts] == ["b"]
        mesh.service.drain(0)
        await asyncio.wait_for(running, TIMEOUT_S)
    assert not mesh.gateway.has_received()
    assert not mesh.other_gateway.has_received()


async def test_a_mailbox_that_never_empties_does_not_hold_text_back(mesh: Mesh) -> None:
    async with mesh.started(is_running=False):
        mesh.service.post(DecodeTokens(SCHEDULER, (opened("a"),)))
        for offset in range(600):
            mesh.service.post(DecodeTokens(SCHEDULER, (), (mesh.entry("a", offset, "the"),)))
        running = asyncio.create_task(mesh.service.run())
        num_texts = [len((await mesh.gateway.receive_texts()).texts)]
        while sum(num_texts) < 600:
            num_texts.append(len((await mesh.gateway.receive_texts()).texts))
        assert sum(num_texts) == 600
        assert len(num_texts) > 3
        mesh.service.drain(0)
        await asyncio.wait_for(running, TIMEOUT_S)


async def test_no_message_exceeds_what_the_broker_carries(case_of: Callable[[str], Case]) -> None:
    mesh = Mesh(case_of("byte level"), max_payload=4096)
    async with mesh.started(is_running=False):
        mesh.service.post(DecodeTokens(SCHEDULER, (opened("a"),)))
        for offset in range(100):
            mesh.service.post(DecodeTokens(SCHEDULER, (), (mesh.entry("a", offset, "Ġcat"),)))
        running = asyncio.create_task(mesh.service.run())
        text = ""
        while len(text) < 400:
            text += "".join(piece.text for piece in (await mesh.gateway.receive_texts()).texts)
        assert text == " cat" * 100
        mesh.service.drain(0)
        await asyncio.wait_for(running, TIMEOUT_S)


async def test_an_unreadable_message_is_counted_and_the_next_one_is_handled(mesh: Mesh) -> None:
    async with mesh.started():
        await mesh.scheduler.transport.publish(subjects.inbox(ME.instance_id), b"\xc1 not msgpack")
        await mesh.scheduler.send(DecodeTokens(SCHEDULER, (opened("a"),), (mesh.entry("a", 0, "the"),)))
        assert (await mesh.gateway.receive_texts()).texts
        assert mesh.service.num_dropped_messages == 1


async def test_tokens_of_an_unknown_request_are_counted_as_dropped(mesh: Mesh) -> None:
    async with mesh.started(is_running=False):
        await mesh.service.handle(DecodeTokens(SCHEDULER, (), (mesh.entry("x", 0, "the"),), (closed("x", 1),)))
        assert mesh.service.num_dropped_messages == 2


async def test_requests_of_a_scheduler_that_leaves_are_dropped(mesh: Mesh) -> None:
    gone = scheduler_beat(is_leaving=True)
    async with mesh.started(is_running=False):
        for beat in (scheduler_beat(), gateway_beat(GATEWAY), gateway_beat(OTHER)):
            await mesh.service.handle(beat)
        await mesh.service.handle(DecodeTokens(SCHEDULER, (opened("a"),)))
        await mesh.service.handle(gone)
        mesh.clock.advance(0.4)
        await mesh.service.handle(Tick())
        assert mesh.service.status().num_open_choices == 1, "its last messages may still be on their way"
        for _ in range(4):
            mesh.clock.advance(0.4)
            for beat in (scheduler_beat(), gateway_beat(GATEWAY), gateway_beat(OTHER)):
                if beat.instance_id != gone.instance_id:
                    await mesh.service.handle(beat)
            await mesh.service.handle(Tick())
        assert mesh.service.status().num_open_choices == 0


async def test_without_the_broker_nobody_counts_as_gone(mesh: Mesh) -> None:
    async with mesh.started(is_running=False):
        await mesh.service.handle(scheduler_beat())
        await mesh.service.handle(DecodeTokens(SCHEDULER, (opened("a"),)))
        mesh.transport._is_connected = False
        for _ in range(12):
            mesh.clock.advance(0.25)
            await mesh.service.handle(Tick())
        assert mesh.service.status().num_open_requests == 1
        mesh.transport._is_connected = True
        mesh.clock.advance(0.25)
        await mesh.service.handle(Tick())
        assert mesh.service.status().num_open_requests == 1, "its beats are only on their way again"
        for _ in range(12):
            mesh.clock.advance(0.25)
            await mesh.service.handle(Tick())
        assert mesh.service.status().num_open_requests == 0


async def test_requests_of_a_scheduler_that_was_never_heard_of_are_dropped_in_time(mesh: Mesh) -> None:
    async with mesh.started(is_running=False):
        await mesh.service.handle(gateway_beat(GATEWAY))
        await mesh.service.handle(DecodeTokens(SCHEDULER, (opened("a"),)))
        for _ in range(int(DEAD_AFTER_S / 0.25) + 1):
            assert mesh.service.status().num_open_choices == 1
            await mesh.service.handle(gateway_beat(GATEWAY))
            mesh.clock.advance(0.25)
            await mesh.service.handle(Tick())
        assert mesh.service.status().num_open_choices == 0


async def test_a_detokenizer_that_was_frozen_keeps_its_requests(mesh: Mesh) -> None:
    async with mesh.started(is_running=False):
        for beat in (scheduler_beat(), gateway_beat(GATEWAY)):
            await mesh.service.handle(beat)
        await mesh.service.handle(Tick())
        await mesh.service.handle(DecodeTokens(SCHEDULER, (opened("a"),)))
        mesh.clock.advance(30)
        await mesh.service.handle(Tick())
        assert mesh.service.status().num_open_choices == 1


async def test_a_request_that_went_to_another_detokenizer_meanwhile_is_dropped_in_the_end(mesh: Mesh) -> None:
    async with mesh.started(is_running=False):
        await mesh.service.handle(DecodeTokens(SCHEDULER, (opened("a"), opened("b"))))
        for second in range(70):
            for beat in (scheduler_beat(), gateway_beat(GATEWAY)):
                await mesh.service.handle(beat)
            await mesh.service.handle(DecodeTokens(SCHEDULER, (), (mesh.entry("b", second, "the"),)))
            mesh.clock.advance(1)
            await mesh.service.handle(Tick())
            assert mesh.service.status().num_open_choices == (2 if second < 60 else 1)


async def test_draining_waits_for_the_open_requests(mesh: Mesh) -> None:
    async with mesh.started(is_running=False):
        running = asyncio.create_task(mesh.service.run())
        await mesh.scheduler.send(DecodeTokens(SCHEDULER, (opened("a"),), (mesh.entry("a", 0, "the"),)))
        await mesh.gateway.receive_texts()
        mesh.service.drain(1000)
        last = mesh.entry("a", 1, "Ġcat", FinishReason.LENGTH)
        await mesh.scheduler.send(DecodeTokens(SCHEDULER, (), (last,)))
        await mesh.gateway.receive_texts()
        assert not running.done()
        await mesh.scheduler.send(DecodeTokens(SCHEDULER, (), (), (closed("a", 2),)))
        await asyncio.wait_for(running, TIMEOUT_S)
    assert (await mesh.gateway.receive_texts()).closed == (closed("a", 2),)


async def test_what_waits_at_the_deadline_of_a_drain_is_still_sent(mesh: Mesh) -> None:
    async with mesh.started(is_running=False):
        await mesh.service.handle(DecodeTokens(SCHEDULER, (opened("a"),), (mesh.entry("a", 0, "the"),)))
    assert [text.text for text in (await mesh.gateway.receive_texts()).texts] == ["the"]
