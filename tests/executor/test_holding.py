"""Who holds an executor, and how it ends: attaching, fencing, detaching, draining."""

import asyncio

import pytest

from shared import subjects
from shared.codec import Decoder
from shared.ids import InstanceId, Service
from shared.messages import (
    AttachExecutor,
    AttachRefused,
    DetachExecutor,
    ExecutorAttached,
    ExecutorStatus,
    Presence,
    StepCompleted,
)
from shared.presence import DEAD_AFTER_S
from tests.executor.fakes import CAPACITY, WAIT_S
from tests.executor.stage import EXECUTOR_ID, Stage


async def test_a_free_executor_is_granted_with_its_capacity(stage: Stage) -> None:
    await stage.a.tell(AttachExecutor(stage.a.id))
    assert await stage.a.receive(ExecutorAttached) == ExecutorAttached(EXECUTOR_ID, 1, CAPACITY)
    assert stage.executor.status() == ExecutorStatus(held_by=stage.a.id, epoch=1, device="fake")


async def test_asking_twice_before_planning_gives_the_same_epoch_and_touches_nothing(stage: Stage) -> None:
    assert [await stage.a.attach(), await stage.a.attach()] == [1, 1]
    await stage.run_plans(stage.a, 1, 1, 1)
    assert stage.runner.calls == ["reset", "run 1"]


async def test_a_holder_that_lost_track_starts_anew(stage: Stage) -> None:
    """`ExecutorAttached` says that slots and blocks are empty and step 1 comes next, so it has to be true."""
    epoch = await stage.a.attach()
    await stage.run_plans(stage.a, epoch, 1, 3)
    assert await stage.a.attach() == epoch + 1
    await stage.run_plans(stage.a, epoch + 1, 1, 1)
    assert stage.runner.calls == ["reset", "run 1", "run 2", "run 3", "reset", "run 1"]


async def test_a_second_scheduler_is_refused_while_the_holder_beats(stage: Stage) -> None:
    await stage.a.attach()
    await stage.pass_time(5, stage.a, stage.b)
    await stage.b.tell(AttachExecutor(stage.b.id))
    assert await stage.b.receive(AttachRefused) == AttachRefused(EXECUTOR_ID, stage.a.id)


async def test_a_holder_is_not_taken_for_dead_before_its_first_beat(stage: Stage) -> None:
    await stage.a.attach()
    await stage.b.tell(AttachExecutor(stage.b.id))
    assert (await stage.b.receive(AttachRefused)).held_by == stage.a.id


async def test_a_holder_that_plans_is_alive_even_if_its_beats_are_lost(stage: Stage) -> None:
    epoch = await stage.a.attach()
    for step_id in range(1, 5):
        await stage.pass_time(1, stage.b)
        await stage.run_plans(stage.a, epoch, step_id, step_id)
    await stage.b.tell(AttachExecutor(stage.b.id))
    assert (await stage.b.receive(AttachRefused)).held_by == stage.a.id


async def test_a_silent_holder_is_replaced_and_fenced_off(stage: Stage) -> None:
    old = await stage.a.attach()
    await stage.a.beat()
    await stage.run_plans(stage.a, old, 1, 1)
    await stage.pass_time(DEAD_AFTER_S + 0.5, stage.b)
    new = await stage.b.attach()
    assert new > old
    await stage.a.send_plan(old, 2)  # it was frozen, and thaws
    await stage.run_plans(stage.b, new, 1, 1)
    assert stage.runner.calls == ["reset", "run 1", "reset", "run 1"]
    assert stage.executor.num_dropped_messages == 1
    assert stage.a.has_received_nothing_more()


async def test_a_silent_holder_nobody_wants_to_replace_just_goes_on(stage: Stage) -> None:
    """A broker that was away makes everybody silent; that alone costs nobody their blocks."""
    epoch = await stage.a.attach()
    await stage.pass_time(5)
    await stage.run_plans(stage.a, epoch, 1, 1)
    assert stage.runner.calls == ["reset", "run 1"]


async def test_a_holder_that_could_not_be_heard_without_the_broker_keeps_the_executor(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.a.attach()
    await stage.a.beat()
    await stage.settle()
    with monkeypatch.context() as broken:
        broken.setattr(stage.transport, "_is_connected", False)
        await stage.pass_time(30)
    await stage.b.tell(AttachExecutor(stage.b.id))
    assert (await stage.b.receive(AttachRefused)).held_by == stage.a.id


async def test_a_holder_that_leaves_frees_the_executor_at_once(stage: Stage) -> None:
    epoch = await stage.a.attach()
    await stage.a.beat()
    await stage.a.beat(is_leaving=True)
    await stage.settle()
    status = stage.executor.status()
    assert (status.held_by, status.epoch) == (None, epoch)  # the epoch tells this beat from one before the attachment
    assert await stage.b.attach() == epoch + 1


async def test_another_scheduler_that_leaves_changes_nothing(stage: Stage) -> None:
    await stage.a.attach()
    await stage.b.beat(is_leaving=True)
    await stage.settle()
    assert stage.executor.status().held_by == stage.a.id


async def test_detaching_frees_the_executor_at_once(stage: Stage) -> None:
    epoch = await stage.a.attach()
    await stage.run_plans(stage.a, epoch, 1, 1)
    await stage.a.tell(DetachExecutor(stage.a.id, epoch))
    await stage.a.send_plan(epoch, 2)
    assert await stage.b.attach() == epoch + 1
    await stage.run_plans(stage.b, epoch + 1, 1, 1)
    assert "run 2" not in stage.runner.calls
    assert stage.runner.calls[2] == "reset"
    assert stage.executor.num_dropped_messages == 1


async def test_only_the_holder_of_this_epoch_can_detach(stage: Stage) -> None:
    epoch = await stage.a.attach()
    await stage.b.tell(DetachExecutor(stage.b.id, epoch))
    await stage.a.tell(DetachExecutor(stage.a.id, epoch - 1))
    await stage.run_plans(stage.a, epoch, 1, 1)
    assert stage.executor.status().held_by == stage.a.id


# The end.


async def test_a_failing_step_ends_the_process_with_its_error(stage: Stage) -> None:
    epoch = await stage.a.attach()
    stage.runner.error = ZeroDivisionError("a bug")
    await stage.a.send_plan(epoch, 1)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await stage.finish()


async def test_a_draining_executor_that_nobody_holds_leaves(stage: Stage) -> None:
    stage.executor.drain(60)
    await stage.finish()


async def test_a_draining_executor_refuses_to_be_held(stage: Stage) -> None:
    epoch = await stage.a.attach()
    stage.executor.drain(60)
    for scheduler in (stage.b, stage.a):
        await scheduler.tell(AttachExecutor(scheduler.id))
        assert await scheduler.receive(AttachRefused) == AttachRefused(EXECUTOR_ID, None)
    await stage.run_plans(stage.a, epoch, 1, 2)


async def test_a_draining_executor_works_for_its_holder_until_it_detaches(stage: Stage) -> None:
    epoch = await stage.a.attach()
    stage.executor.drain(60)
    for step_id in range(1, 9):
        await stage.pass_time(0.5, stage.a)
        await stage.run_plans(stage.a, epoch, step_id, step_id)
    assert stage.running is not None
    assert not stage.running.done()
    await stage.a.tell(DetachExecutor(stage.a.id, epoch))
    await stage.finish()


async def test_a_draining_executor_whose_holder_plans_nothing_leaves(stage: Stage) -> None:
    await stage.a.attach()
    stage.executor.drain(60)
    await stage.pass_time(0.75, stage.a)
    assert stage.running is not None
    assert not stage.running.done()
    await stage.pass_time(0.5, stage.a)
    await stage.finish()


async def test_a_draining_executor_does_not_leave_a_step_unanswered(stage: Stage) -> None:
    epoch = await stage.a.attach()
    stage.runner.gate.clear()
    await stage.a.send_plan(epoch, 1)
    await stage.runner.wait_until_started()
    stage.executor.drain(60)
    await stage.pass_time(5, stage.a)
    assert stage.running is not None
    assert not stage.running.done()
    stage.runner.gate.set()
    assert (await stage.a.receive(StepCompleted)).result.step_id == 1
    await stage.finish()


async def test_leaving_waits_for_the_step_that_runs(stage: Stage) -> None:
    epoch = await stage.a.attach()
    stage.runner.gate.clear()
    await stage.a.send_plan(epoch, 1)
    await stage.runner.wait_until_started()
    stopping = asyncio.create_task(stage.executor.on_stop())
    await stage.settle()
    assert not stopping.done()
    stage.runner.gate.set()
    await asyncio.wait_for(stopping, WAIT_S)


async def test_beats_tell_model_holder_and_work(stage: Stage) -> None:
    beats: asyncio.Queue[Presence] = asyncio.Queue()
    decoder: Decoder[Presence] = Decoder(Presence)

    async def observe(payload: bytes, _headers: object) -> None:
        beats.put_nowait(decoder.decode(payload))

    epoch = await stage.a.attach()
    await stage.run_plans(stage.a, epoch, 1, 1)
    stage.runner.guesses = True
    await stage.run_plans(stage.a, epoch, 2, 2)
    await stage.a.transport.subscribe(subjects.presence(Service.EXECUTOR), observe)
    beat = await asyncio.wait_for(beats.get(), WAIT_S)
    assert (beat.instance_id, beat.name, beat.models) == (EXECUTOR_ID, "an executor", ("tiny",))
    assert beat.status == ExecutorStatus(
        held_by=stage.a.id,
        epoch=epoch,
        device="fake",
        num_steps=2,
        num_tokens=3,
        busy_s=1.0,
        num_guessed=3,
        num_guessed_right=1,
    )


async def test_who_holds_it_is_told_at_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that another scheduler takes a free one without a pause."""
    monkeypatch.setattr("shared.actor.BEAT_INTERVAL_S", 1000.0)
    beats: asyncio.Queue[Presence] = asyncio.Queue()
    decoder = Decoder[Presence](Presence)

    async def observe(payload: bytes, _headers: object) -> None:
        beats.put_nowait(decoder.decode(payload))

    async def next_holder() -> InstanceId | None:
        status = (await asyncio.wait_for(beats.get(), WAIT_S)).status
        assert isinstance(status, ExecutorStatus)
        return status.held_by

    await stage.a.transport.subscribe(subjects.presence(Service.EXECUTOR), observe)
    stage.executor.announce()  # the first beat may have been a while ago, and the next one a while off
    assert await next_holder() is None
    epoch = await stage.a.attach()
    assert await next_holder() == stage.a.id
    await stage.a.tell(DetachExecutor(stage.a.id, epoch))
    assert await next_holder() is None
