"""The base of every service: one message at a time, a bounded mailbox."""

import asyncio
import logging

import pytest

from shared import subjects
from shared.codec import encode
from shared.ids import InstanceId
from shared.messages import AttachExecutor, DetachExecutor, TokensDetokenized
from tests.shared.acting import INBOX, ME, World, finished
from tests.shared.transport.receiver import Receiver


async def test_start_comes_first_and_stop_last(world: World) -> None:
    async with world.actor as actor:
        assert actor.events == ["start"]
        await world.tell("a")
        running = asyncio.create_task(actor.run())
        await actor.until(lambda: "end a" in actor.events)
        actor.drain(deadline_s=10)
        await finished(running)
        assert "stop" not in actor.events
    assert actor.events[-1] == "stop"


async def test_one_message_at_a_time_in_the_order_of_arrival(world: World) -> None:
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
        await finished(running)


async def test_idle_is_told_once_for_all_that_arrived_together(world: World) -> None:
    world.actor.tick_interval_s = 3600
    async with world.actor as actor:
        for name in "abc":
            actor.post(AttachExecutor(InstanceId(name)))
        running = asyncio.create_task(actor.run())
        await actor.until(lambda: actor.events[-1] == "idle")
        assert actor.events == ["start", *(f"{what} {name}" for name in "abc" for what in ("begin", "end")), "idle"]
        actor.drain(deadline_s=10)
        await finished(running)


async def test_what_a_full_mailbox_cannot_take_is_dropped_and_counted(world: World) -> None:
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
        await finished(running)
        assert "begin 8" not in actor.events


async def test_what_an_actor_tells_itself_is_never_dropped(world: World) -> None:
    async with world.actor as actor:
        for number in range(20):
            actor.post(AttachExecutor(InstanceId(str(number))))
        running = asyncio.create_task(actor.run())
        await actor.until(lambda: "end 19" in actor.events)
        actor.drain(deadline_s=10)
        await finished(running)
        assert sum(event.startswith("end") for event in actor.events) == 20


async def test_a_bad_message_is_dropped_counted_and_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
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
        await finished(running)


async def test_further_subjects_reach_the_mailbox_and_a_queue_group_shares(world: World) -> None:
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
        await finished(running)


async def test_ticks_come_again_and_again(world: World) -> None:
    async with world.actor as actor:
        running = asyncio.create_task(actor.run())
        await actor.until(lambda: actor.num_ticks >= 5)
        actor.drain(deadline_s=10)
        await finished(running)


async def test_ticks_that_wait_behind_a_stuck_handler_do_not_count_as_handled(world: World) -> None:
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
        await finished(running)


async def test_messages_to_an_instance_arrive_at_its_inbox(world: World) -> None:
    receiver = Receiver()
    await world.other.subscribe(subjects.inbox(InstanceId("executor-9")), receiver)
    assert await world.actor.send_to(InstanceId("executor-9"), DetachExecutor(ME.instance_id, 3))
    assert await receiver.wait_for(1) == [encode(DetachExecutor(ME.instance_id, 3))]


async def test_what_cannot_be_sent_is_logged_and_said_by_the_return_value(
    world: World, caplog: pytest.LogCaptureFixture
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
