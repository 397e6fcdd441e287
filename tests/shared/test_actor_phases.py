"""How an actor lives and leaves: it beats, it drains within its deadline, it fails aloud."""

import asyncio

import pytest

from shared.ids import InstanceId, Service
from shared.messages import AttachExecutor, DetokenizerStatus, Presence
from tests.shared.acting import ME, Boom, World, finished


async def test_a_started_actor_beats_with_who_and_how_it_is(world: World) -> None:
    async with world.actor:
        await world.beats.wait_for(2)
        assert world.beat(0) == Presence(
            service=Service.DETOKENIZER,
            instance_id=ME.instance_id,
            name="detok",
            models=("tiny",),
            status=DetokenizerStatus(num_open_choices=3),
        )


async def test_beats_count_what_mailbox_and_transport_dropped(world: World) -> None:
    world.actor.num_dropped_messages = 4
    world.transport.count_dropped()
    async with world.actor:
        await world.beats.wait_for(1)
    assert world.beat(0).num_dropped_messages == 5


async def test_a_draining_actor_says_so_and_the_last_beat_says_goodbye(world: World) -> None:
    async with world.actor as actor:
        actor.is_busy = True
        running = asyncio.create_task(actor.run())
        await world.beats.wait_for(1)
        actor.drain(deadline_s=10)
        await world.beats.wait_for(2)
        actor.is_busy = False
        await finished(running)
    await world.beats.wait_for(3)
    said = [(world.beat(n).is_draining, world.beat(n).is_leaving) for n in (0, 1, -1)]
    assert said == [(False, False), (True, False), (True, True)]


async def test_what_others_wait_for_is_said_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.actor.BEAT_INTERVAL_S", 1000.0)
    async with world.actor as actor:
        await world.beats.wait_for(1)
        actor.announce()
        await world.beats.wait_for(2)
        actor.drain(deadline_s=10)
        await world.beats.wait_for(3)
        assert world.beat(2).is_draining


async def test_nobody_beats_while_the_broker_is_away(world: World) -> None:
    await world.transport.close()
    async with world.actor as actor:
        running = asyncio.create_task(actor.run())
        await actor.until(lambda: actor.num_ticks >= 2)
        actor.drain(deadline_s=10)
        await finished(running)
    assert world.beats.payloads == []


async def test_an_idle_actor_leaves_at_once(world: World) -> None:
    async with world.actor as actor:
        actor.drain(deadline_s=1000)
        await finished(actor.run())


async def test_draining_finishes_what_lies_in_the_mailbox(world: World) -> None:
    async with world.actor as actor:
        for name in "abc":
            actor.post(AttachExecutor(InstanceId(name)))
        actor.drain(deadline_s=1000)
        await finished(actor.run())
        assert "end c" in actor.events


async def test_a_busy_actor_stays_until_it_is_idle(world: World) -> None:
    async with world.actor as actor:
        actor.is_busy = True
        actor.drain(deadline_s=1000)
        running = asyncio.create_task(actor.run())
        await actor.until(lambda: actor.num_ticks >= 3)
        assert not running.done()
        actor.is_busy = False
        await finished(running)


async def test_a_busy_actor_leaves_at_the_deadline(world: World) -> None:
    async with world.actor as actor:
        actor.is_busy = True
        actor.drain(deadline_s=20)
        running = asyncio.create_task(actor.run())
        world.clock.advance(19.9)
        await actor.until(lambda: actor.num_ticks >= 3)
        assert not running.done()
        world.clock.advance(0.2)
        await finished(running)


async def test_a_second_drain_can_shorten_the_deadline_but_not_extend_it(world: World) -> None:
    async with world.actor as actor:
        actor.is_busy = True
        actor.drain(deadline_s=20)
        actor.drain(deadline_s=1000)
        world.clock.advance(20)
        await finished(actor.run())
        actor.drain(deadline_s=0)
        await finished(actor.run())


async def test_a_drain_that_comes_while_the_actor_goes_to_sleep_wakes_it(world: World) -> None:
    world.actor.tick_interval_s = 3600  # no tick may come to the rescue
    async with world.actor as actor:
        actor.on_idle_hook = lambda: actor.drain(deadline_s=1000)
        await finished(actor.run())


async def test_what_a_handler_raises_ends_run_and_still_says_goodbye(world: World) -> None:
    async def live() -> None:
        async with world.actor as actor:
            await world.tell("boom")
            await actor.run()

    with pytest.raises(Boom, match="boom"):
        await live()
    await world.beats.wait_for(2)
    assert world.beat(-1).is_leaving
    assert world.actor.events[-1] == "stop"


async def test_a_failure_in_the_background_ends_run(world: World) -> None:
    world.actor.tick_interval_s = 3600  # no tick may come to the rescue
    async with world.actor as actor:
        running = asyncio.create_task(actor.run())
        await actor.until(lambda: actor.events[-1] == "idle")
        await world.beats.wait_for(1)
        actor.status_error = Boom("status")
        with pytest.raises(Boom, match="status"):
            await finished(running)
        actor.status_error = None
