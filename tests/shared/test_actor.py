"""The base of every service: one message at a time, a bounded mailbox, three phases."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from shared import subjects
from shared.actor import Actor, Identity, Tick
from shared.clock import FakeClock
from shared.codec import Decoder, encode
from shared.errors import ShoalError
from shared.ids import InstanceId, Service
from shared.messages import (
    AttachExecutor,
    DetachExecutor,
    DetokenizerStatus,
    Presence,
    Status,
    TokensDetokenized,
)
from shared.transport import Transport
from shared.transport.memory import MemoryBroker, MemoryTransport
from tests.shared.transport.receiver import PATIENCE_S, Receiver

ME = Identity(Service.DETOKENIZER, InstanceId("detokenizer-1"), "detok")
INBOX = subjects.inbox(ME.instance_id)

Inbound = AttachExecutor | DetachExecutor


class _Boom(ShoalError):
    pass


class _Actor(Actor[Inbound]):
    """Keeps what it was told, in order; can be made to block, to fail and to stay busy."""

    tick_interval_s = 0.01
    mailbox_size = 8

    def __init__(self, transport: Transport, clock: FakeClock) -> None:
        super().__init__(ME, transport, Inbound, clock)
        self.events: list[str] = []
        self.changed = asyncio.Condition()
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_ticks = 0
        self.is_busy = False
        self.status_error: Exception | None = None
        self.on_idle_hook: Callable[[], None] = lambda: None

    async def handle(self, message: Inbound | Tick) -> None:
        if isinstance(message, Tick):
            self.num_ticks += 1
            await self.note(None)
            return
        name = str(getattr(message, "scheduler_id"))  # noqa: B009
        await self.note(f"begin {name}")
        await self.gate.wait()
        if name == "boom":
            raise _Boom(name)
        await self.note(f"end {name}")

    async def on_start(self) -> None:
        await self.note("start")

    async def on_idle(self) -> None:
        if self.events[-1:] != ["idle"]:
            await self.note("idle")
        self.on_idle_hook()

    async def on_stop(self) -> None:
        await self.note("stop")

    def is_idle(self) -> bool:
        return not self.is_busy

    def status(self) -> Status:
        if self.status_error is not None:
            raise self.status_error
        return DetokenizerStatus(num_open_choices=3)

    def models(self) -> tuple[str, ...]:
        return ("tiny",)

    async def note(self, event: str | None) -> None:
        async with self.changed:
            if event is not None:
                self.events.append(event)
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(condition)


class _World:
    """An actor on a broker, its clock, and somebody else on the same broker."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.clock = FakeClock()
        self.transport, self.other = MemoryTransport(broker), MemoryTransport(broker)
        self.actor = _Actor(self.transport, self.clock)
        self.beats = Receiver()

    async def tell(self, name: str) -> None:
        await self.other.publish(INBOX, encode(AttachExecutor(InstanceId(name))))

    def beat(self, number: int) -> Presence:
        return Decoder[Presence](Presence).decode(self.beats.payloads[number])


@pytest.fixture
async def world(memory_broker: MemoryBroker) -> AsyncIterator[_World]:
    world = _World(memory_broker)
    async with AsyncExitStack() as stack:
        for transport in (world.transport, world.other):
            await transport.connect()
            stack.push_async_callback(transport.close)
        await world.other.subscribe(subjects.PRESENCE, world.beats)
        yield world


async def _finished(running: Awaitable[None]) -> None:
    await asyncio.wait_for(running, PATIENCE_S)


async def test_start_comes_first_and_stop_last(world: _World) -> None:
    async with world.actor as actor:
        assert actor.events == ["start"]
        await world.tell("a")
        running = asyncio.create_task(actor.run())
        await actor.until(lambda: "end a" in actor.events)
        actor.drain(deadline_s=10)
        await _finished(running)
        assert "stop" not in actor.events
    assert actor.events[-1] == "stop"


async def test_one_message_at_a_time_in_the_order_of_arrival(world: _World) -> None:
    async with world.actor as actor:
        actor.gate.clear()
        for name in "abc":
            await world.tell(name)
        running = asyncio.create_task(actor.run())
        await actor.until(lambda: "begin a" in actor.events)
        await actor.transport.publish("unrelated", b"")
        assert "begin b" not in actor.events
        actor.gate.set()
        await actor.until(lambda: "end c" in actor.events)
        handled = [event for event in actor.events if event[-2:] in (" a", " b", " c")]
        assert handled == ["begin a", "end a", "begin b", "end b", "begin c", "end c"]
        actor.drain(deadline_s=10)
        await _finished(running)


async def test_idle_is_told_once_for_all_that_arrived_together(world: _World) -> None:
    world.actor.tick_interval_s = 3600
    async with world.actor as actor:
        for name in "abc":
            actor.post(AttachExecutor(InstanceId(name)))
        running = asyncio.create_task(actor.run())
        await actor.until(lambda: actor.events[-1] == "idle")
        assert actor.events == ["start", *(f"{what} {name}" for name in "abc" for what in ("begin", "end")), "idle"]
        actor.drain(deadline_s=10)
        await _finished(running)


async def test_what_a_full_mailbox_cannot_take_is_dropped_and_counted(world: _World) -> None:
    world.actor.tick_interval_s = 3600
    async with world.actor as actor:
        for number in range(20):
            await world.tell(str(number))
        while world.transport.broker.num_undelivered:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert actor.num_dropped_messages == 13  # one of the 21 is a tick
        running = asyncio.create_task(actor.run())
        await actor.until(lambda: len(actor.events) > 14)
        actor.drain(deadline_s=10)
        await _finished(running)
        assert "begin 8" not in actor.events


async def test_what_an_actor_tells_itself_is_never_dropped(world: _World) -> None:
    async with world.actor as actor:
        for number in range(20):
            actor.post(AttachExecutor(InstanceId(str(number))))
        running = asyncio.create_task(actor.run())
        await actor.until(lambda: "end 19" in actor.events)
        actor.drain(deadline_s=10)
        await _finished(running)
        assert sum(event.startswith("end") for event in actor.events) == 20


async def test_a_bad_message_is_dropped_counted_and_logged(world: _World, caplog: pytest.LogCaptureFixture) -> None:
    async with world.actor as actor:
        running = asyncio.create_task(actor.run())
        with caplog.at_level(logging.WARNING):
            await world.other.publish(INBOX, b"garbage")
            await world.other.publish(INBOX, encode(TokensDetokenized("call-1", "not for me")))
            await world.tell("a")
            await actor.until(lambda: "end a" in actor.events)
        assert actor.num_dropped_messages == 2
        assert [record.getMessage() for record in caplog.records] == ["dropped a message"] * 2
        actor.drain(deadline_s=10)
        await _finished(running)


async def test_further_subjects_reach_the_mailbox_and_a_queue_group_shares(world: _World) -> None:
    async with world.actor as actor:
        await actor.listen("work.*", queue="workers")
        rival = Receiver()
        await world.other.subscribe("work.*", rival, queue="workers")
        running = asyncio.create_task(actor.run())
        for number in range(4):
            await world.other.publish("work.now", encode(AttachExecutor(InstanceId(str(number)))))
        await rival.wait_for(2)
        await actor.until(lambda: sum(event.startswith("end") for event in actor.events) == 2)
        actor.drain(deadline_s=10)
        await _finished(running)


async def test_ticks_come_again_and_again(world: _World) -> None:
    async with world.actor as actor:
        running = asyncio.create_task(actor.run())
        await actor.until(lambda: actor.num_ticks >= 5)
        actor.drain(deadline_s=10)
        await _finished(running)


async def test_ticks_that_wait_behind_a_stuck_handler_do_not_count_as_handled(world: _World) -> None:
    async with world.actor as actor:
        running = asyncio.create_task(actor.run())
        await actor.until(lambda: actor.num_handled_ticks >= 2)
        actor.gate.clear()
        await world.tell("slow")
        await actor.until(lambda: "begin slow" in actor.events)
        num_before = actor.num_handled_ticks
        await asyncio.sleep(5 * actor.tick_interval_s)
        assert actor.num_handled_ticks == num_before
        actor.gate.set()
        await actor.until(lambda: actor.num_handled_ticks > num_before)
        actor.drain(deadline_s=10)
        await _finished(running)


async def test_messages_to_an_instance_arrive_at_its_inbox(world: _World) -> None:
    receiver = Receiver()
    await world.other.subscribe(subjects.inbox(InstanceId("executor-9")), receiver)
    assert await world.actor.send_to(InstanceId("executor-9"), DetachExecutor(ME.instance_id, 3))
    assert await receiver.wait_for(1) == [encode(DetachExecutor(ME.instance_id, 3))]


async def test_what_cannot_be_sent_is_logged_and_said_by_the_return_value(
    world: _World, caplog: pytest.LogCaptureFixture
) -> None:
    too_large = TokensDetokenized("call-1", "x" * (1 << 20))
    unspeakable = TokensDetokenized("call-1", "\ud800")
    assert await world.actor.send("a", too_large) is False
    assert await world.actor.send("a", unspeakable) is False
    await world.transport.close()
    assert await world.actor.send("a", TokensDetokenized("call-1", "fine")) is False
    assert [record.getMessage() for record in caplog.records] == [
        "message cannot be sent",
        "message cannot be sent",
        "message not sent",
    ]


# Presence.


async def test_a_started_actor_beats_with_who_and_how_it_is(world: _World) -> None:
    async with world.actor:
        await world.beats.wait_for(2)
        assert world.beat(0) == Presence(
            service=Service.DETOKENIZER,
            instance_id=ME.instance_id,
            name="detok",
            models=("tiny",),
            status=DetokenizerStatus(num_open_choices=3),
        )


async def test_beats_count_what_mailbox_and_transport_dropped(world: _World) -> None:
    world.actor.num_dropped_messages = 4
    world.transport.count_dropped()
    async with world.actor:
        await world.beats.wait_for(1)
    assert world.beat(0).num_dropped_messages == 5


async def test_a_draining_actor_says_so_and_the_last_beat_says_goodbye(world: _World) -> None:
    async with world.actor as actor:
        actor.is_busy = True
        running = asyncio.create_task(actor.run())
        await world.beats.wait_for(1)
        actor.drain(deadline_s=10)
        await world.beats.wait_for(2)
        actor.is_busy = False
        await _finished(running)
    await world.beats.wait_for(3)
    said = [(world.beat(n).is_draining, world.beat(n).is_leaving) for n in (0, 1, -1)]
    assert said == [(False, False), (True, False), (True, True)]


async def test_what_others_wait_for_is_said_at_once(world: _World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.actor.BEAT_INTERVAL_S", 1000.0)
    async with world.actor as actor:
        await world.beats.wait_for(1)
        actor.announce()
        await world.beats.wait_for(2)
        actor.drain(deadline_s=10)
        await world.beats.wait_for(3)
        assert world.beat(2).is_draining


async def test_nobody_beats_while_the_broker_is_away(world: _World) -> None:
    await world.transport.close()
    async with world.actor as actor:
        running = asyncio.create_task(actor.run())
        await actor.until(lambda: actor.num_ticks >= 2)
        actor.drain(deadline_s=10)
        await _finished(running)
    assert world.beats.payloads == []


# Draining.


async def test_an_idle_actor_leaves_at_once(world: _World) -> None:
    async with world.actor as actor:
        actor.drain(deadline_s=1000)
        await _finished(actor.run())


async def test_draining_finishes_what_lies_in_the_mailbox(world: _World) -> None:
    async with world.actor as actor:
        for name in "abc":
            actor.post(AttachExecutor(InstanceId(name)))
        actor.drain(deadline_s=1000)
        await _finished(actor.run())
        assert "end c" in actor.events


async def test_a_busy_actor_stays_until_it_is_idle(world: _World) -> None:
    async with world.actor as actor:
        actor.is_busy = True
        actor.drain(deadline_s=1000)
        running = asyncio.create_task(actor.run())
        await actor.until(lambda: actor.num_ticks >= 3)
        assert not running.done()
        actor.is_busy = False
        await _finished(running)


async def test_a_busy_actor_leaves_at_the_deadline(world: _World) -> None:
    async with world.actor as actor:
        actor.is_busy = True
        actor.drain(deadline_s=20)
        running = asyncio.create_task(actor.run())
        world.clock.advance(19.9)
        await actor.until(lambda: actor.num_ticks >= 3)
        assert not running.done()
        world.clock.advance(0.2)
        await _finished(running)


async def test_a_second_drain_can_shorten_the_deadline_but_not_extend_it(world: _World) -> None:
    async with world.actor as actor:
        actor.is_busy = True
        actor.drain(deadline_s=20)
        actor.drain(deadline_s=1000)
        world.clock.advance(20)
        await _finished(actor.run())
        actor.drain(deadline_s=0)
        await _finished(actor.run())


async def test_a_drain_that_comes_while_the_actor_goes_to_sleep_wakes_it(world: _World) -> None:
    world.actor.tick_interval_s = 3600  # no tick may come to the rescue
    async with world.actor as actor:
        actor.on_idle_hook = lambda: actor.drain(deadline_s=1000)
        await _finished(actor.run())


# Failure.


async def test_what_a_handler_raises_ends_run_and_still_says_goodbye(world: _World) -> None:
    async def live() -> None:
        async with world.actor as actor:
            await world.tell("boom")
            await actor.run()

    with pytest.raises(_Boom, match="boom"):
        await live()
    await world.beats.wait_for(2)
    assert world.beat(-1).is_leaving
    assert world.actor.events[-1] == "stop"


async def test_a_failure_in_the_background_ends_run(world: _World) -> None:
    world.actor.tick_interval_s = 3600  # no tick may come to the rescue
    async with world.actor as actor:
        running = asyncio.create_task(actor.run())
        await actor.until(lambda: actor.events[-1] == "idle")
        await world.beats.wait_for(1)
        actor.status_error = _Boom("status")
        with pytest.raises(_Boom, match="status"):
            await _finished(running)
        actor.status_error = None
